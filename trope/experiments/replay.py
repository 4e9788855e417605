"""Prequential evaluation: predict, then learn. What does freshness buy, and what does it cost?

The test window of a holdout is cut into ticks. At each tick everybody with an event in it is asked at the tick's start,
with all events before as history; then every way of staying fresh may learn the tick:

    stale           trained until the first tick; its counts stand still as well
    counts only     the same network; everybody's counts (the pulse) follow the events
    update          learns each tick in a few steps (`trope.train.update`)
    retrain         trained from the start before a tick, for the epochs that validation chose
    counting alone  no network: decayed counts, their half-life chosen on the ticks of the validation window

    DIR/plan.json        what the replay was begun with
    DIR/ticks/0003.json  metrics, steps and seconds of a finished tick
    DIR/models/          the models to go on with
    DIR/train/           the training until the first tick, unless a run was given

Shapes: N events.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trope.config import Config
from trope.data.catalogue import Catalogue
from trope.data.folder import sha256_of
from trope.data.sequences import Sequences
from trope.data.views import asked_at, trained_until
from trope.evaluate.baselines import Events, MostPopular, batch_size, decayed_counts, half_lives
from trope.evaluate.evaluation import EvalResult, encoder, evaluate, fitted_pulse, rank_users
from trope.evaluate.live import LiveScorer, users_at_a_time
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.pulse import SortedEvents
from trope.models.recommender import SequentialRecommender
from trope.runs import (
    BEST,
    CATALOGUE,
    CONFIG,
    MODEL_CONFIG,
    RunLock,
    changed_settings,
    read_data,
    read_json,
    read_lineage,
    seal,
    write_json,
)  # fmt: skip
from trope.settings import read_saved_toml
from trope.times import say_duration
from trope.train.distributed import Group
from trope.train.fit import Recipe, read_recipe
from trope.train.process import reproducible
from trope.train.pulse import keep_counts
from trope.train.step import NothingToLearn
from trope.train.update import Spent, retrain, update

STALE, COUNTS, UPDATE, RETRAIN, COUNTING = "stale", "counts only", "update", "retrain", "counting alone"
WAYS = (STALE, COUNTS, UPDATE, RETRAIN, COUNTING)
METRICS = ("Recall@10", "NDCG@10")
PLAN, TICKS, MODELS, TRAINING = "plan.json", "ticks", "models", "train"
MOST_TICKS = 9_999  # their numbers have four digits, so that names sort as numbers do
_CHECKSUMS = ("data", "model")  # what a plan has as a checksum, which tells a reader nothing
_TICK_KINDS: dict[str, Any] = {
    "tick": int, "start": int, "end": int, "users": int, "ways": dict[str, dict], "spent": dict[str, dict],
}  # fmt: skip


class Tick(NamedTuple):
    """A part of the test window: from `start` until before `end`, Unix seconds."""

    number: int
    start: int
    end: int


def ticks_of(start: int, end: int, every: int) -> list[Tick]:
    """[start, end) in parts of `every` seconds; the last may be shorter."""
    if every < 1:
        raise ValueError(f"--every must be longer than 0 seconds, got {every}")
    if (end - start) / every > MOST_TICKS:
        raise ValueError(f"--every {say_duration(every)} gives more than {MOST_TICKS:,} ticks; choose a longer one")
    starts = range(start, end, every)
    return [Tick(number, first, min(first + every, end)) for number, first in enumerate(starts)]


class Replay:
    """A replay in a folder, tick by tick. It goes on where it was stopped.

    Args:
        data: a holdout dataset; its test window is replayed.
        run: trained on it.
        out: the folder.
        every: seconds of a tick. retrain_every: retrain before each so many ticks; 0 never.
        steps: of each update; as `trope.train.update` chooses if None.
    """

    def __init__(
        self,
        data: Sequences,
        run: Path,
        out: Path,
        every: int,
        retrain_every: int,
        steps: int | None,
        device: torch.device,
        lock: RunLock,
    ) -> None:
        self.ticks = ticks_to_replay(data, every)
        self.group, self.out, self.steps, self.retrain_every = Group(0, 1, device), out, steps, retrain_every
        self.recipe = read_recipe(run)
        if read_lineage(run) is not None:
            raise ValueError(f"{run} was trained on every event, the test's too; replay a run of `trope train`")
        _check_items(run, data)
        self.run, self.data = run, data.to(device)
        plan = {
            "data": data.meta["checksum"], "model": sha256_of(run / BEST / MODEL_CONFIG), "every": every,
            "retrain_every": retrain_every, "steps": steps,
        }  # fmt: skip
        _open(out, plan, lock)
        self.first = self._stale()
        if self.first.time_span[1] >= self.ticks[0].start:
            raise ValueError(f"{run} was trained on events of the test window of {data.path}; leave out --like")
        self.has_pulse = fitted_pulse(self.first) is not None
        self.half_life = self._half_life()

    @property
    def config(self) -> Config:
        """Of the run."""
        return self.recipe.config

    @property
    def ways(self) -> list[str]:
        """The ways that are compared: without a pulse there are no counts to follow."""
        left_out = {*(() if self.has_pulse else (COUNTS,)), *(() if self.retrain_every else (RETRAIN,))}
        return [way for way in WAYS if way not in left_out]

    def play(self, tell: Callable[[dict[str, Any], int], None] | None = None) -> list[dict[str, Any]]:
        """Every tick, in order; returns their records. tell: called with each new record and the number of ticks."""
        records = self._finished()
        with reproducible(self.group.device):
            updated, retrained = self._models(len(records))
            for tick in self.ticks[len(records) :]:
                spent = {way: Spent(0, 0.0) for way in self.ways}
                if self.retrain_every and tick.number and tick.number % self.retrain_every == 0:
                    retrained, spent[RETRAIN] = self._retrain(tick.start)
                    retrained.save_pretrained(self._model(RETRAIN, tick.number))
                asked = self._ask(tick, updated, retrained)
                updated, spent[UPDATE] = self._update(updated, tick)
                updated.save_pretrained(self._model(UPDATE, tick.number + 1))
                record = {
                    "tick": tick.number, "start": tick.start, "end": tick.end, **asked,
                    "spent": {way: each._asdict() for way, each in spent.items()},
                }  # fmt: skip
                write_json(self._record(tick.number), seal(record))
                self._tidy()
                records.append(record)
                if tell is not None:
                    tell(record, len(self.ticks))
        return records

    def _ask(self, tick: Tick, updated: SequentialRecommender, retrained: SequentialRecommender) -> dict[str, Any]:
        """Metrics of every way; nothing of the tick is used but its events as what was chosen."""
        view = asked_at(self.data, tick.start, tick.end)
        if not len(view.eval_users("test")):
            return {"users": 0, "ways": {}}
        found: dict[str, EvalResult] = {}
        for way in self.ways:
            if way == STALE:
                found[way] = rank(self.first, view, self.config, counted_until=self.ticks[0].start)
            elif way == COUNTS:
                found[way] = rank(self.first, view, self.config)
            elif way == UPDATE:
                found[way] = rank(updated, view, self.config)
            elif way == RETRAIN:
                found[way] = rank(retrained, view, self.config)
            else:
                found[way] = by_counts(view, self.half_life, self.config)
        ways = {way: {name: each.metrics[name] for name in METRICS} for way, each in found.items()}
        return {"users": len(found[STALE].users), "ways": ways}

    def _update(self, model: SequentialRecommender, tick: Tick) -> tuple[SequentialRecommender, Spent]:
        """The model after it has learned a tick."""
        known = trained_until(self.data, tick.end)
        fresh_N = (self.data.times >= tick.start) & (self.data.times < tick.end)
        try:
            return update(model, known, self.config, fresh_N, self.recipe.factors, self.group, self.steps)[:2]
        except NothingToLearn:
            return model, Spent(0, 0.0)

    def _retrain(self, until: int) -> tuple[SequentialRecommender, Spent]:
        known = trained_until(self.data, until)
        model, spent = retrain(known, self.config, self.recipe.factors, self.group)
        if model.pulse is not None and self.recipe.pulse is not None:
            model.pulse.take_weights(self.recipe.pulse["weights"])
            keep_counts(model, known)
        return model, spent

    def _stale(self) -> SequentialRecommender:
        """The model trained until the first tick: the run's own if it was refitted, else trained as it was chosen."""
        if self.config.train.refit:
            return SequentialRecommender.from_pretrained(self.run / BEST).to(self.group.device)
        kept = self._model(STALE, 0)
        if kept.is_dir():
            return SequentialRecommender.from_pretrained(kept).to(self.group.device)
        with reproducible(self.group.device):
            model, _ = self._retrain(self.ticks[0].start)
        model.save_pretrained(kept)
        return model

    def _half_life(self) -> int:
        """The half-life of counting alone that is best on the ticks of the validation window."""
        start, window = window_of(self.data)
        every = self.ticks[0].end - self.ticks[0].start
        before = trained_until(self.data, start - window)
        totals = dict.fromkeys(half_lives(before), 0.0)
        for tick in ticks_of(start - window, start, every):
            view = asked_at(self.data, tick.start, tick.end)
            for half_life in totals if len(view.eval_users("test")) else ():
                found = by_counts(view, half_life, self.config)
                totals[half_life] += found.metrics[METRICS[0]] * len(found.users)
        return max(totals, key=lambda half_life: totals[half_life])  # the shortest of equals

    def _models(self, number: int) -> tuple[SequentialRecommender, SequentialRecommender]:
        """The updated and the retrained model to go on with at a tick."""
        updated = retrained = self.first
        if number:
            updated = SequentialRecommender.from_pretrained(self._model(UPDATE, number)).to(self.group.device)
            last = (number - 1) // self.retrain_every * self.retrain_every if self.retrain_every else 0
            if last:
                retrained = SequentialRecommender.from_pretrained(self._model(RETRAIN, last)).to(self.group.device)
        return updated, retrained

    def _finished(self) -> list[dict[str, Any]]:
        """Records of the ticks that are done."""
        records = []
        for tick in self.ticks:
            path = self._record(tick.number)
            if not path.is_file():
                break
            records.append(read_json(path, _TICK_KINDS, "remove it and the ones after it, and replay again"))
        return records

    def _record(self, number: int) -> Path:
        return self.out / TICKS / f"{number:04d}.json"

    def _model(self, way: str, number: int) -> Path:
        return self.out / MODELS / f"{way}-{number:04d}"

    def _tidy(self) -> None:
        """Keep the latest model of each way, from which the next tick goes on."""
        for way in (UPDATE, RETRAIN):
            for old in sorted((self.out / MODELS).glob(f"{way}-*"))[:-1]:
                shutil.rmtree(old)


def _check_items(run: Path, data: Sequences) -> None:
    """Refuse a run that numbers its items otherwise. The same log with another window numbers them alike."""
    if read_data(run)["checksum"] == data.meta["checksum"]:
        return
    ids = data.ids("item_ids")
    if ids is None or ids.to_list() != Catalogue.load(run / CATALOGUE).item_ids.to_list():
        raise ValueError(
            f"{run} was trained on other items than those of {data.path}; replay the run's own dataset, or leave out "
            "--like to train a run first"
        )


def window_of(data: Sequences) -> tuple[int, int]:
    """Start and length of a holdout's test window."""
    if data.protocol.name != "holdout":
        raise ValueError(
            f"{data.path} is split by {data.protocol.name}; a replay needs a test window, so prepare the data with "
            "--protocol holdout --window 7d"
        )
    assert data.protocol.cutoff is not None
    assert data.protocol.window is not None
    return data.protocol.cutoff, data.protocol.window


def ticks_to_replay(data: Sequences, every: int) -> list[Tick]:
    """The ticks of a holdout's test window, at least two: nothing is learned before the first."""
    start, window = window_of(data)
    ticks = ticks_of(start, start + window, every)
    if len(ticks) < 2:
        raise ValueError(
            "nothing is learned before the only tick; choose --every at most half of the test window, "
            f"{say_duration(window)}"
        )
    return ticks


def check_training(out: Path, config: Config) -> None:
    """Refuse another training in a folder with a replay: more epochs would change the model that its ticks are of."""
    if not (out / PLAN).is_file():
        return
    saved = out / TRAINING / CONFIG
    if not saved.is_file():
        raise ValueError(f"{out} holds a replay of a run given as --like; name that run again, or choose another --out")
    changed = changed_settings(read_saved_toml(saved, training=True), config, may_change=())
    if changed:
        raise ValueError(f"{out} holds another replay: {'; '.join(changed)}; choose another --out")


def rank(model: SequentialRecommender, view: Sequences, config: Config, counted_until: int | None = None) -> EvalResult:
    """Rank the catalogue at a tick; counted_until: only events before this moment count for the pulse."""
    model.train(False)
    pulse, seen, max_len = fitted_pulse(model), config.eval.filter_seen, config.model.max_len
    if pulse is None:
        return evaluate(model, view, "test", seen, max_len)
    with torch.inference_mode():
        items_VE = model.item_vectors().float()
        scorer = LiveScorer(pulse, encoder(model, items_VE.device, "auto"), items_VE, view, "test")
        if counted_until is not None:
            events = view.first_events(view.test_start)
            events = events[view.times[events] < counted_until]
            scorer.stream = pulse.count(view.items[events], view.times[events])
        batch = users_at_a_time(view.num_items, USERS_AT_A_TIME)
        return rank_users(scorer, view, "test", seen, max_len, batch=batch)


def by_counts(view: Sequences, half_life: int, config: Config) -> EvalResult:
    """Rank the catalogue at a tick by everybody's decayed counts alone."""
    events = SortedEvents(*Events.of(view, "test"))
    scorer = decayed_counts(MostPopular(view), events, [half_life])[half_life]
    seen, max_len = config.eval.filter_seen, config.model.max_len
    return rank_users(scorer, view, "test", seen, max_len, batch=batch_size(view))


def _open(out: Path, plan: dict[str, Any], lock: RunLock) -> None:
    """Make the folder, or check that it holds a replay of the same."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a folder; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    lock.take(out)
    path = out / PLAN
    if path.is_file():
        stored = read_json(path, {}, "choose another --out")
        changed = [
            f"another {name}" if name in _CHECKSUMS else f"{name} was {stored.get(name)!r}, now {plan[name]!r}"
            for name in plan
            if stored.get(name) != plan[name]
        ]
        if changed:
            raise ValueError(f"{out} holds another replay: {'; '.join(changed)}; choose another --out")
    else:
        write_json(path, seal(plan))


def recipe_name(recipe: Recipe) -> str:
    """The model's block, encoding, pulse and width, for titles."""
    model, kind = recipe.config.model, recipe.config.rotary.kind
    parts = [model.block, *([kind] if kind != "none" else []), *(["pulse"] if model.pulse else [])]
    return f"{' + '.join(parts)}, width {model.width}"
