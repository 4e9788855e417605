"""`WindowCounts`: how often everybody chose each item in the last hours or days, at rising moments.

Of a stream the events of a window may be more than memory holds. So an event is counted when it comes into a window,
and when it leaves it is read a second time. Where there is one moment, as in a holdout, no event leaves.

Shapes: W windows, V items (ids 1 .. V; column 0 is padding), N events, M moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trope.models.pulse import EventsInTime


class WindowCounts:
    """Counts of several windows.

    events: makes everybody's events in the order of time, from the first one. seconds: lengths of the windows.
    """

    def __init__(
        self, events: Callable[[], EventsInTime], seconds: Sequence[int], num_items: int, device: torch.device
    ) -> None:
        self.events, self.seconds = events, list(seconds)
        self.counts_WV = torch.zeros((len(self.seconds), num_items + 1), dtype=torch.float64, device=device)
        self._moment: int | None = None
        self._begin()

    def at(self, moments: Tensor) -> Iterator[Tensor]:
        """Counts [W, V + 1] of the events in the windows that end right before each of the rising moments.

        Each is good until the next one is asked for. Moments before those of the last call begin with the first event.
        """
        for moment in moments.tolist():
            if self._moment is not None and moment < self._moment:
                self._begin()
            if moment != self._moment:
                self._come(moment)
                if self._moment is not None:
                    for row, seconds in enumerate(self.seconds):
                        self._leave(row, self._moment - seconds, moment - seconds)
                self._moment = moment
            yield self.counts_WV

    def _begin(self) -> None:
        self.counts_WV.zero_()
        self._coming = self.events()
        self._leaving: list[EventsInTime | None] = [None] * len(self.seconds)
        self._moment = None

    def _come(self, moment: int) -> None:
        """Count what came since the last moment. At the first one, what lies in the windows."""
        (pieces,) = self._coming.until([moment])
        for items_N, times_N in pieces:
            for row, seconds in enumerate(self.seconds):
                here_N = items_N if self._moment is not None else items_N[times_N >= moment - seconds]
                self._count(row, here_N, 1.0)

    def _leave(self, row: int, before: int, now: int) -> None:
        """Take out what left a window, which began at `before` and begins at `now`."""
        leaving = self._leaving[row]
        if leaving is None:
            leaving = self._leaving[row] = self.events()
            (never_here,) = leaving.until([before])
            for _ in never_here:
                pass
        (pieces,) = leaving.until([now])
        for items_N, _ in pieces:
            self._count(row, items_N, -1.0)

    def _count(self, row: int, items_N: Tensor, sign: float) -> None:
        change_N = torch.full((len(items_N),), sign, dtype=torch.float64, device=items_N.device)
        self.counts_WV[row].index_add_(0, items_N.long(), change_N)
