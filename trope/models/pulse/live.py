"""Counts that follow the events after training, and what the year says of those that nobody has told.

Between the last event told and the moment asked for, counts of a log that knows its year are filled with what is
expected: each stretch of the year sells what it sold before, at the same rate. A model asked for next April, with
nothing observed since December, then knows April. A shorter log cannot say, and its counts stand still.

Shapes: K half-lives, G bins of a year, V items (column 0 is padding), N events.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trope.models.pulse.counts import DecayedCounts
from trope.models.pulse.seasons import BINS, PERIODS, SeasonCounts
from trope.times import YEAR

_MOST_YEARS = 8  # what was expected longer ago than this weighs little at any half-life


class LiveCounts:
    """Everybody's counts at any moment from the last event told.

    counts, seasons: of all events so far. since: time of the first of them.
    """

    def __init__(self, counts: DecayedCounts, seasons: SeasonCounts, since: int) -> None:
        self.counts, self.seasons, self.since = counts, seasons, since
        places = {PERIODS[place]: row for row, place in enumerate(seasons.places)}
        self._year = places.get(YEAR)
        self.added = 0  # how often events were added: what was computed before is out of date

    def add(self, items_N: Tensor, times_N: Tensor) -> None:
        """Count new events, each once; they may be older than some that were counted before."""
        self.counts.move(max(self.counts.moment or 0, int(times_N.max()) + 1), items_N, times_N)
        self.seasons.add(items_N, times_N)
        self.added += 1

    def log_shares(self, moment: int) -> Tensor:
        """log of each item's share, by half-life and by season, [C, V + 1]; before the last event told, as then."""
        return torch.cat((self.counts.log_shares(moment, self._expected(moment)), self.seasons.log_shares(moment)))

    def _expected(self, moment: int) -> Tensor | None:
        """Decayed counts of the events to be expected between the last one told and `moment`, [K, V + 1]."""
        begin = self.counts.moment
        if self._year is None or begin is None or not self.since < begin < moment:
            return None
        covered_N, bins_N = stretches(self.since, begin)
        covered_G = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins_N, covered_N.diff()).clamp(min=1.0)
        edges_N, bins_N = stretches(max(begin, moment - _MOST_YEARS * YEAR), moment)
        half_lives_K1 = self.counts.half_lives_K[:, None].cpu()
        # One event a second, decayed at the end, over each stretch.
        weight_KN = half_lives_K1 / math.log(2) * torch.exp2((edges_N - moment) / half_lives_K1).diff(dim=1)
        weight_KG = torch.zeros(len(weight_KN), BINS, dtype=torch.float64).index_add_(1, bins_N, weight_KN)
        told_GV = self.seasons.bins_PGV[self._year]
        return (weight_KG / covered_G).to(told_GV) @ told_GV


def stretches(begin: int, end: int) -> tuple[Tensor, Tensor]:
    """A stretch of time cut at the year's bins: its edges, float64 [N + 1], and the bin of each piece, [N]."""
    size = YEAR / BINS
    inner = torch.arange(math.floor(begin / size) + 1, math.ceil(end / size), dtype=torch.float64) * size
    edges_N = torch.cat((torch.tensor([begin]), inner, torch.tensor([end])))
    return edges_N, ((edges_N[:-1] + edges_N[1:]) / 2 / size).floor().long() % BINS
