"""Decayed counts: how often everybody chose each item, where an event counts half after each half-life.

A bank of half-lives, multiscale as T-RoPE's own: what is popular this hour, this week, this year. Counts are facts and
need no training: they follow the events. Only events strictly before a moment count at it.

Shapes: K half-lives, C rows (half-lives, then periods), V items (ids 1 .. V; column 0 is padding), N events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trope.models.pulse.seasons import SeasonCounts
from trope.models.pulse.shares import log_shares

# From a quarter of an hour to 7.5 years, each four times the one before.
HALF_LIVES = tuple(900 * 4**k for k in range(10))
_GRAINS = (86_400, 3_600, 60)
_PIECE = 1 << 20


def grain(times_N: Tensor) -> int:
    """The unit of a log's times, in seconds: a day, an hour, a minute or a second."""
    # Piece by piece: it needs little memory, and mostly the first piece says no.
    pieces = times_N.split(_PIECE)
    return next((unit for unit in _GRAINS if not any(bool((piece % unit).any()) for piece in pieces)), 1)


def half_lives_within(unit: int, span: int) -> list[int]:
    """Places in `HALF_LIVES` that a log can tell apart: no shorter than its times' unit, no longer than its span."""
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
        self.decay(moment)
        self.add(items_N, times_N)

    def decay(self, moment: int) -> None:
        """Go on to `moment`."""
        if self.moment is not None:
            assert moment >= self.moment, "counts only move forward"
            self.counts_KV *= self._left(torch.tensor(moment - self.moment, device=self.counts_KV.device))
        self.moment = moment

    def add(self, items_N: Tensor, times_N: Tensor) -> None:
        """Count new events strictly before the moment."""
        assert self.moment is not None, "nothing is counted at no moment"
        if len(items_N):
            self.counts_KV.index_add_(1, items_N.long(), self._left(self.moment - times_N))

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


class EventsInTime(Protocol):
    """Events in the order of time, from a store in memory or from a stream (`trope.data.in_time`)."""

    @property
    def device(self) -> torch.device: ...

    def restart(self) -> None:
        """Begin with the first event again."""

    def until(self, moments: list[int]) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
        """For each of the rising moments the events strictly before it that were not given yet: items and times."""


class SortedEvents:
    """Events in memory. items_N, times_N: in any order; those in the order of time are not copied."""

    def __init__(self, items_N: Tensor, times_N: Tensor) -> None:
        self.items_N, self.times_N = items_N, times_N
        if bool((times_N[1:] < times_N[:-1]).any()):
            self.times_N, order = torch.sort(times_N, stable=True)
            self.items_N = items_N[order]
        self._done = 0

    @property
    def device(self) -> torch.device:
        return self.times_N.device

    def restart(self) -> None:
        """See `EventsInTime`."""
        self._done = 0

    def until(self, moments: list[int]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """See `EventsInTime`."""
        ends = torch.searchsorted(self.times_N, torch.tensor(moments, device=self.device)).tolist()
        for end in ends:
            new = slice(self._done, max(end, self._done))
            self._done = new.stop
            yield [(self.items_N[new], self.times_N[new])]


class CountStream:
    """Counts of a log at rising moments.

    periods: places in `PERIODS` to count by season; None leaves their rows out.
    """

    def __init__(
        self, events: EventsInTime, half_lives: Tensor, num_items: int, periods: Sequence[int] | None = None
    ) -> None:
        self.events, self._num_items, self._periods = events, num_items, periods
        self._half_lives = half_lives.to(events.device)
        self._begin()

    def at(self, moments: Tensor) -> Iterator[Tensor]:
        """Log shares at `moments`, which rise; each float32 [C, V + 1].

        Moments before those of the last call begin with the first event again.
        """
        for moment in self._each(moments):
            shares_KV = self.counts.log_shares()
            if self.seasons is not None:
                shares_KV = torch.cat((shares_KV, self.seasons.log_shares(moment)))
            yield shares_KV

    def counts_at(self, moments: Tensor) -> Iterator[Tensor]:
        """The counts themselves, float64 [K, V + 1]; each is good until the next one is asked for."""
        for _ in self._each(moments):
            yield self.counts.counts_KV

    def _each(self, moments: Tensor) -> Iterator[int]:
        """Go on to each moment."""
        asked = moments.tolist()
        if asked and self.counts.moment is not None and asked[0] < self.counts.moment:
            self.events.restart()
            self._begin()
        for moment, pieces in zip(asked, self.events.until(asked), strict=True):
            self.counts.decay(moment)
            for items_N, times_N in pieces:
                self.counts.add(items_N, times_N)
                if self.seasons is not None:
                    self.seasons.add(items_N, times_N)
            yield moment

    def _begin(self) -> None:
        self.counts = DecayedCounts(self._half_lives, self._num_items)
        device, periods = self.events.device, self._periods
        self.seasons = None if periods is None else SeasonCounts(list(periods), self._num_items, device)
