"""The counting baselines of a stream: the same numbers as those of the same data in memory.

All of them are ranked in one pass over the users. Everybody's events are counted in the order of time: once where all
users are asked at one moment, as in a holdout, else anew for each block of users. Windows then read them a second time
for each length, as they leave.

Shapes: B users of a batch, M their distinct moments, W windows, V items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trope.config import Config
from trope.data.sequences import EvalBatch, Sequences
from trope.data.stream import Stream
from trope.evaluate.baselines import (
    AGAIN,
    DECAYED,
    MOST_POPULAR,
    RECENT,
    Again,
    BatchCounts,
    MostPopular,
    baselines,
    batch_size,
    choose_half_lives,
    chosen_half_lives,
    decayed_counts,
    equal_baselines,
    say_equal,
)  # fmt: skip
from trope.evaluate.evaluation import EvalResult, Scorer, rank_all
from trope.evaluate.ranking import TileScores
from trope.evaluate.ranking.user_batches import no_users
from trope.evaluate.streamed import joined, over_blocks
from trope.evaluate.window_counts import WindowCounts
from trope.times import say_short


class Ranked(NamedTuple):
    """Results by the baselines' names in tables, a sentence for each that equals another one, and chosen half-lives."""

    results: dict[str, EvalResult]
    equal: list[str]
    half_lives: dict[str, int]  # seconds, by the name of the baseline


def rank_baselines(data: Sequences | Stream, split: str, config: Config, progress: bool = False) -> Ranked:
    """Rank the catalogue for every user of a split by counting; see `trope.evaluate.baselines`."""
    if isinstance(data, Stream):
        return _rank_stream(data, split, config, progress)
    scorers, seen, max_len = baselines(data, split, config), config.eval.filter_seen, config.model.max_len
    results = rank_all(scorers, data, split, seen, max_len, progress, batch=batch_size(data))
    return Ranked(results, equal_baselines(scorers, data, split), chosen_half_lives(scorers))


def _rank_stream(stream: Stream, split: str, config: Config, progress: bool) -> Ranked:
    if not stream.can_evaluate(split):
        raise ValueError(no_users(stream, split))
    popular = MostPopular(stream)
    windows = _Windows(stream, split)
    counts = BatchCounts(windows.at)
    everybody: dict[str, Scorer] = {MOST_POPULAR: popular}
    everybody |= {name: PopularInWindow(popular, counts, place) for place, name in enumerate(RECENT)}
    chosen, half_lives = choose_half_lives(stream, popular, config), {}
    if chosen is not None:
        name = f"{DECAYED}, {say_short(chosen.decayed)}"
        everybody[name] = decayed_counts(popular, stream.in_time(split), [chosen.decayed])[chosen.decayed]
        half_lives = {name: chosen.decayed, AGAIN: chosen.again}
    seen, max_len, batch = config.eval.filter_seen, config.model.max_len, batch_size(stream, len(RECENT) + 1)

    def rank(user: int, block: Sequences) -> dict[str, EvalResult]:
        if not block.can_evaluate(split):
            return {}
        scorers = dict(everybody)
        if chosen is not None:
            scorers[AGAIN] = Again(popular, block, split, chosen.again)
        found = rank_all(scorers, block, split, seen, max_len, progress, batch=batch)
        return {name: EvalResult(result.users + user, result.places) for name, result in found.items()}

    blocks = [found for found in over_blocks(stream, rank, progress) if found]
    results = {name: joined([found[name] for found in blocks]) for name in blocks[0]}
    return Ranked(results, windows.say_equal(), half_lives)


class PopularInWindow:
    """Scores an item by its events in a window before t_now, then by its training events: as `RecentlyPopular` does.

    counts: of several windows, of which `place` is this one.
    """

    def __init__(self, popular: MostPopular, counts: BatchCounts, place: int) -> None:
        self.overall_V, self.counts, self.place = popular.counts_V, counts, place

    def __call__(self, batch: EvalBatch) -> TileScores:
        """Needs a batch in the order of t_now."""
        counts_WMV, moment_B = self.counts(batch)
        scores_MV = counts_WMV[self.place] * (self.overall_V.max() + 1) + self.overall_V
        return lambda first, last: scores_MV[:, first:last][moment_B]


class _Windows:
    """The counts of `RECENT`, and which windows held the same events at all moments that were asked for."""

    def __init__(self, stream: Stream, split: str) -> None:
        seconds = [3_600 * hours for hours in RECENT.values()]
        self.counts = WindowCounts(lambda: stream.in_time(split), seconds, stream.num_items, stream.device)
        self.split = split
        self.is_empty_W = torch.ones(len(seconds), dtype=torch.bool, device=stream.device)
        self.is_same_WW = torch.ones((len(seconds), len(seconds)), dtype=torch.bool, device=stream.device)

    def at(self, moments: Tensor) -> Iterator[Tensor]:
        for counts_WV in self.counts.at(moments):
            total_W = counts_WV.sum(1)
            self.is_empty_W &= total_W == 0
            self.is_same_WW &= total_W[:, None] == total_W
            yield counts_WV

    def say_equal(self) -> list[str]:
        place = {name: number for number, name in enumerate(RECENT)}
        return say_equal(
            {name: bool(self.is_empty_W[number]) for name, number in place.items()},
            lambda one, other: bool(self.is_same_WW[place[one], place[other]]),
            self.split,
        )
