"""What the one worker thread does with a batch: store events, follow the store, then answer all questions together.

Events come first, so that a question which arrives with an event, or after it, sees the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from trope.devices import on_own_gpu
from trope.server.answers import answer
from trope.server.metrics import Metrics
from trope.server.refusal import Refused
from trope.server.schema import Event, Question
from trope.server.served import Served
from trope.server.store import Store, StoreError
from trope.server.trial import Trial

TOGETHER = 20_000
"""Events that are stored together. Redis answers nobody meanwhile, and has five seconds (`redis_store`)."""
Outcome = bytes | BaseException | Any
Deliver = Callable[[list[tuple[int, Outcome]]], None]


@dataclass(frozen=True, slots=True)
class Post:
    """Events to keep."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Ask:
    """Questions of one body; is_list: whether the answer is a list too. is_shown: whether to a user, see `Trial`."""

    questions: Sequence[Question]
    is_list: bool
    is_shown: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Something else to do between two batches, with the worker."""

    function: Callable[[Worker], Any]


Job = Post | Ask | Call


class Worker:
    """Owns the served models; only its thread calls `run`.

    models: by arm of the trial, the control first; without a trial one, under any name.
    compared: a second model for the page. It follows the store with the others: a day's events at once take a minute.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        store: Store,
        metrics: Metrics,
        trial: Trial | None = None,
        compared: Served | None = None,
    ) -> None:
        self.models, self.store, self.metrics, self.trial = dict(models), store, metrics, trial
        self.compared = compared
        self.failure: str | None = None  # of the store, in the last batch that needed it

    @property
    def served(self) -> Served:
        """The only model, or the control's."""
        return next(iter(self.models.values()))

    @property
    def device(self) -> torch.device:
        """Of all models."""
        return self.served.recommender.device

    @on_own_gpu
    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], deliver: Deliver) -> None:
        """Do all jobs. `deliver` gets pairs of a job's place and its outcome, as soon as they are known."""
        posts = [(place, job) for place, job in enumerate(jobs) if isinstance(job, Post)]
        failure = None
        if posts:
            outcomes, failure = self._keep(posts)
            self.failure = failure or self.failure  # before anybody learns of it; cleared below
            deliver(outcomes)
        others = [(place, job) for place, job in enumerate(jobs) if not isinstance(job, Post)]
        try:
            for served in self.models.values():
                served.follow()
            if self.compared is not None:
                self.compared.follow()
            self.failure = failure
        except StoreError as error:
            self.failure = str(error)
            deliver([(place, _unavailable(error)) for place, _ in others])
            return
        asks = [(place, job) for place, job in others if isinstance(job, Ask)]
        if asks:
            deliver(self._answer(asks))
        for place, job in others:
            if isinstance(job, Call):
                deliver([(place, _outcome(job.function, self))])

    def _keep(self, posts: list[tuple[int, Post]]) -> tuple[list[tuple[int, Outcome]], str | None]:
        """Many posts together, so that they share one flush to disk; also returns why the store did not take some."""
        found: list[tuple[int, Outcome]] = []
        for group in _groups(posts):
            try:
                new = self.store.append([post.events for _, post in group])
            except StoreError as error:
                return found + [(place, _unavailable(error)) for place, _ in posts[len(found) :]], str(error)
            self.metrics.events.inc(sum(new))
            for (place, post), count in zip(group, new, strict=True):
                said = {"stored": count, "repeated": len(post.events) - count, "model": self.served.version}
                found.append((place, orjson.dumps(said)))
        return found, None

    def _answer(self, asks: list[tuple[int, Ask]]) -> list[tuple[int, Outcome]]:
        questions = [question for _, ask in asks for question in ask.questions]
        try:
            answers = iter(self._by_arm(questions))
        except StoreError as error:
            self.failure = str(error)
            return [(place, _unavailable(error)) for place, _ in asks]
        except Exception as error:
            if len(asks) == 1:
                return [(asks[0][0], error)]
            # One question must not fail the others of its batch.
            return [outcome for each in asks for outcome in self._answer([each])]
        found: list[tuple[int, Outcome]] = []
        every: list[dict[str, Any]] = []
        for place, ask in asks:
            said = [next(answers) for _ in ask.questions]
            if self.trial is not None:
                for question, each in zip(ask.questions, said, strict=True):
                    self.trial.sign(question, each, is_shown=ask.is_shown)
            every += said
            found.append((place, orjson.dumps(said if ask.is_list else said[0])))
        self.metrics.count_answers(every)
        return found

    def _by_arm(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Answers in the order of the questions; those of one arm are made together."""
        if self.trial is None:
            return answer(self.served, questions)
        arms = [self.trial.arm_of(question) for question in questions]
        found: dict[int, dict[str, Any]] = {}
        for arm, served in self.models.items():
            places = [place for place, other in enumerate(arms) if other == arm]
            if places:
                said = answer(served, [questions[place] for place in places])
                found |= dict(zip(places, said, strict=True))
        return [found[place] for place in range(len(questions))]


def _groups(posts: list[tuple[int, Post]]) -> Iterator[list[tuple[int, Post]]]:
    """Posts in their order, as many at a time as have TOGETHER events; a post is never divided."""
    group: list[tuple[int, Post]] = []
    events = 0
    for place, post in posts:
        if group and events + len(post.events) > TOGETHER:
            yield group
            group, events = [], 0
        group.append((place, post))
        events += len(post.events)
    yield group


def _outcome(function: Callable[[Worker], Any], worker: Worker) -> Outcome:
    try:
        return function(worker)
    except StoreError as error:
        return _unavailable(error)
    except Exception as error:  # handed to whoever asked, who logs it
        return error


def _unavailable(error: StoreError) -> Refused:
    return Refused(str(error), 503, retry_after=1)
