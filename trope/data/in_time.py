"""`InTime`: the events of a stream's histories in the order of time, for what counts them (`trope.models.pulse`).

A store in memory sorts its events; a stream merges those that each shard holds sorted (`trope.data.by_time`). At most
`MERGED` events are in memory, and they are handed over `PIECE` at a time, since what counts them needs more memory for
each than they take.

Shapes: N events.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from trope.data.by_time import EventRuns, Pair

PIECE = 1 << 17


class InTime:
    """Events at rising moments, each once.

    with_validation: the events that validation asks for too, as the test's histories have them. device: where to.
    """

    def __init__(self, runs: EventRuns, with_validation: bool, device: torch.device) -> None:
        self.runs, self.with_validation, self.device = runs, with_validation, device
        self.restart()

    def restart(self) -> None:
        """Begin with the first event again."""
        self._pieces = _pieces(self.runs, self.with_validation)
        self._held: Pair | None = None

    def until(self, moments: list[int]) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        """For each of the rising moments the events strictly before it that were not given yet, in pieces.

        Pieces are items [N] and times [N]; those of a moment are taken before the next moment is asked for.
        """
        for moment in moments:
            yield self._before(moment)

    def _before(self, moment: int) -> Iterator[tuple[Tensor, Tensor]]:
        while (held := self._held or next(self._pieces, None)) is not None:
            items, times = held
            end = int(np.searchsorted(times, moment))
            self._held = (items[end:], times[end:]) if end < len(times) else None
            if end:
                yield torch.from_numpy(items[:end]).to(self.device), torch.from_numpy(times[:end]).to(self.device)
            if self._held is not None:
                return


def _pieces(runs: EventRuns, with_validation: bool) -> Iterator[Pair]:
    """All of the events, a piece at a time."""
    # No method: it would hold the `InTime` that holds it, and both would stay in memory until Python looks for circles.
    for items, times in runs.merged():
        if with_validation:
            items = np.abs(items)
        else:
            items, times = items[items > 0], times[items > 0]
        for first in range(0, len(items), PIECE):
            yield items[first : first + PIECE], times[first : first + PIECE]
