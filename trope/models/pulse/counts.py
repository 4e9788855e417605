"""Decayed counts: how often everybody chose each item, where an event counts half after each half-life.

A bank of half-lives, multiscale as T-RoPE's own: what is popular this hour, this week, this year. Counts are facts and
need no training: they follow the events. Only events strictly before a moment count at it.

Shapes: K half-lives, C rows (half-lives, then periods), V items (ids 1 .. V; column 0 is padding), N events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trope.models.pulse.seasons import SeasonCounts
from trope.models.pulse.shares import log_shares

# From a quarter of an hour to 7.5 years, each four times the one before.
HALF_LIVES = tuple(900 * 4**k for k in range(10))
_GRAINS = (86_400, 3_600, 60)


def grain(times_N: Tensor) -> int:
    """The unit of a log's times, in seconds: a day, an hour, a minute or a second."""
    return next((unit for unit in _GRAINS if not bool((times_N % unit).any())), 1)


def active_half_lives(times_N: Tensor, span: int) -> list[int]:
    """Places in `HALF_LIVES` that a log can tell apart: no shorter than its times' unit, no longer than its span."""
    unit = grain(times_N)
    found = [place for place, seconds in enumerate(HALF_LIVES) if unit <= seconds <= span]
    return found or [0]


class DecayedCounts:
    """Counts of every item at a moment that only moves forward.

    half_lives: seconds, [K].
    """

    def __init__(self, half_lives: Tensor, num_items: int) -> None:
        self.half_lives_K = half_lives.double()
        self.counts_KV = torch.zeros((len(half_lives), num_items + 1), dtype=torch.float64, device=half_lives.device)
        self.moment: int | None = None

    @classmethod
    def of(cls, half_lives: Tensor, counts_KV: Tensor, moment: int) -> DecayedCounts:
        """Counts that were kept at a moment."""
        kept = cls(half_lives, counts_KV.shape[1] - 1)
        kept.counts_KV.copy_(counts_KV)
        kept.moment = moment
        return kept

    def move(self, moment: int, items_N: Tensor, times_N: Tensor) -> None:
        """Go on to `moment` and count new events; they must lie strictly before it."""
        if self.moment is not None:
            assert moment >= self.moment, "counts only move forward"
            self.counts_KV *= self._left(torch.tensor(moment - self.moment, device=times_N.device))
        self.moment = moment
        if len(items_N):
            self.counts_KV.index_add_(1, items_N.long(), self._left(moment - times_N))

    def log_shares(self, moment: int | None = None, expected_KV: Tensor | None = None) -> Tensor:
        """log of each item's share of all counts, float32 [K, V + 1].

        moment: as they would be then if nothing more happened, or what is expected, `expected_KV`; an earlier one gives
        them as they are.
        """
        counts_KV = self.counts_KV
        if moment is not None and self.moment is not None and moment > self.moment:
            counts_KV = counts_KV * self._left(torch.tensor(moment - self.moment, device=counts_KV.device))
        return log_shares(counts_KV if expected_KV is None else counts_KV + expected_KV)

    def _left(self, seconds: Tensor) -> Tensor:
        """What is left of a count after `seconds`, [K, ..]."""
        return torch.exp2(-seconds.double().reshape(1, -1) / self.half_lives_K[:, None])


class CountStream:
    """Counts of a log at rising moments.

    items_N, times_N: events in any order; those in the order of time are not copied. periods: places in `PERIODS` to
        count by season; None leaves their rows out.
    """

    def __init__(
        self,
        items_N: Tensor,
        times_N: Tensor,
        half_lives: Tensor,
        num_items: int,
        periods: Sequence[int] | None = None,
    ) -> None:
        self.items_N, self.times_N = items_N, times_N
        if bool((times_N[1:] < times_N[:-1]).any()):
            self.times_N, order = torch.sort(times_N, stable=True)
            self.items_N = items_N[order]
        self.counts = DecayedCounts(half_lives.to(times_N.device), num_items)
        self.seasons = None if periods is None else SeasonCounts(list(periods), num_items, times_N.device)
        self._done = 0

    def at(self, moments: Tensor) -> Iterator[Tensor]:
        """Log shares at `moments`, which rise and lie after those of the call before; each float32 [C, V + 1]."""
        ends = torch.searchsorted(self.times_N, moments).tolist()
        for moment, end in zip(moments.tolist(), ends, strict=True):
            new = slice(self._done, max(end, self._done))
            items_N, times_N = self.items_N[new], self.times_N[new]
            self._done = new.stop
            self.counts.move(moment, items_N, times_N)
            shares_KV = self.counts.log_shares()
            if self.seasons is None:
                yield shares_KV
                continue
            self.seasons.add(items_N, times_N)
            yield torch.cat((shares_KV, self.seasons.log_shares(moment)))
