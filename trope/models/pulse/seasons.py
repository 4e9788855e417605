"""Counts by season: how often everybody chose each item at this time of the day, of the week, of the year.

Each period is a circle of bins. An event adds one to its bin; at a moment a bin counts half for each bin that it lies
away from the moment's own place on the circle, before or behind: what sold in the weeks to come, a year ago. A period
is used where the training data hold it one and a half times at least; a shorter log cannot tell a season from a trend.

Shapes: P periods, G bins of a period, V items (column 0 is padding), N events.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.models.pulse.shares import log_shares
from trope.times import DAY, YEAR

PERIODS = (DAY, 7 * DAY, YEAR)
BINS = 32
_FEW = 16  # events are few where there are so many bins for each
ENOUGH = 1.5
"""How often a period must lie in the training data."""


def known_periods(span: int) -> list[int]:
    """Places in `PERIODS` that data of this length, in seconds, can tell."""
    return [place for place, seconds in enumerate(PERIODS) if span >= ENOUGH * seconds]


class SeasonCounts:
    """Counts of every item in the bins of some periods.

    places: in `PERIODS`.
    """

    def __init__(self, places: list[int], num_items: int, device: torch.device) -> None:
        self.places = places
        self.bins_PGV = torch.zeros((len(places), BINS, num_items + 1), device=device)

    def add(self, items_N: Tensor, times_N: Tensor) -> None:
        """Count events."""
        for row, place in enumerate(self.places):
            bins_N = times_N % PERIODS[place] * BINS // PERIODS[place]
            size = self.bins_PGV.shape[2]
            flat, places_N = self.bins_PGV[row].view(-1), bins_N * size + items_N.long()
            if _FEW * len(places_N) < len(flat):  # only the bins that they are in
                places_N, counts_N = torch.unique(places_N, return_counts=True)
                flat[places_N] += counts_N
            else:
                flat += torch.bincount(places_N, minlength=len(flat))

    def log_shares(self, moment: int) -> Tensor:
        """log of each item's share at this time of each period, [all periods, V + 1]; 0 for periods not counted."""
        found = self.bins_PGV.new_zeros(len(PERIODS), self.bins_PGV.shape[2])
        centres_G = torch.arange(BINS, device=found.device) + 0.5
        for row, place in enumerate(self.places):
            here = moment % PERIODS[place] * BINS / PERIODS[place]
            apart_G = (centres_G - here).abs()
            weights_G = torch.exp2(-torch.minimum(apart_G, BINS - apart_G))
            found[place] = log_shares((weights_G @ self.bins_PGV[row])[None])[0]
        return found
