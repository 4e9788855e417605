"""What the one worker thread does with a batch: store events, follow the store, then answer all questions together.

Events come first, so that a question which arrives with an event, or after it, sees the event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from trope.server.answers import answer
from trope.server.metrics import Metrics
from trope.server.refusal import Refused
from trope.server.schema import Event, Question
from trope.server.served import Served
from trope.server.store import Store, StoreError

Outcome = bytes | BaseException | Any
Deliver = Callable[[list[tuple[int, Outcome]]], None]


@dataclass(frozen=True, slots=True)
class Post:
    """Events to keep."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Ask:
    """Questions of one body; is_list: whether the answer is a list too."""

    questions: Sequence[Question]
    is_list: bool


@dataclass(frozen=True, slots=True)
class Call:
    """Something else to do between two batches, with the worker."""

    function: Callable[[Worker], Any]


Job = Post | Ask | Call


class Worker:
    """Owns the served model; only its thread calls `run`."""

    def __init__(self, served: Served, store: Store, metrics: Metrics) -> None:
        self.served, self.store, self.metrics = served, store, metrics

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], deliver: Deliver) -> None:
        """Do all jobs. `deliver` gets pairs of a job's place and its outcome, as soon as they are known."""
        posts = [(place, job) for place, job in enumerate(jobs) if isinstance(job, Post)]
        if posts:
            deliver(self._keep(posts))
        others = [(place, job) for place, job in enumerate(jobs) if not isinstance(job, Post)]
        try:
            self.served.follow()
        except StoreError as error:
            deliver([(place, _unavailable(error)) for place, _ in others])
            return
        asks = [(place, job) for place, job in others if isinstance(job, Ask)]
        if asks:
            deliver(self._answer(asks))
        for place, job in others:
            if isinstance(job, Call):
                deliver([(place, _outcome(job.function, self))])

    def _keep(self, posts: list[tuple[int, Post]]) -> list[tuple[int, Outcome]]:
        """All posts together, so that they share one flush to disk."""
        try:
            new = self.store.append([post.events for _, post in posts])
        except StoreError as error:
            return [(place, _unavailable(error)) for place, _ in posts]
        self.metrics.events.inc(sum(new))
        return [
            (place, orjson.dumps({"stored": count, "repeated": len(post.events) - count, "model": self.served.version}))
            for (place, post), count in zip(posts, new, strict=True)
        ]

    def _answer(self, asks: list[tuple[int, Ask]]) -> list[tuple[int, Outcome]]:
        questions = [question for _, ask in asks for question in ask.questions]
        try:
            answers = iter(answer(self.served, questions))
        except StoreError as error:
            return [(place, _unavailable(error)) for place, _ in asks]
        except Exception as error:
            if len(asks) == 1:
                return [(asks[0][0], error)]
            # One question must not fail the others of its batch.
            return [outcome for each in asks for outcome in self._answer([each])]
        found: list[tuple[int, Outcome]] = []
        for place, ask in asks:
            said = [next(answers) for _ in ask.questions]
            for each in said:
                self.metrics.count_answer(each)
            found.append((place, orjson.dumps(said if ask.is_list else said[0])))
        return found


def _outcome(function: Callable[[Worker], Any], worker: Worker) -> Outcome:
    try:
        return function(worker)
    except StoreError as error:
        return _unavailable(error)
    except Exception as error:  # handed to whoever asked, who logs it
        return error


def _unavailable(error: StoreError) -> Refused:
    return Refused(str(error), 503, retry_after=1)
