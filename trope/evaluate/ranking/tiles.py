"""Tiles of the catalogue: which items are scored together, by what, and which are left out.

Shapes: B users, E width, V items (ids 1 .. V), X items left out of the users' rankings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

USERS_AT_A_TIME = 512
"""Users that are encoded and ranked together, where nothing else decides."""
TileScores = Callable[[int, int], Tensor]
"""Scores of items first .. last - 1 as a new tensor [B, last - first]; finite."""


class Cells(NamedTuple):
    """Pairs of a user's row in the batch and an item."""

    rows: Tensor
    items: Tensor

    @classmethod
    def distinct(cls, items: Tensor, offsets: Tensor, num_items: int) -> Cells:
        """From a jagged list (row b: offsets[b] .. offsets[b+1]), each pair once, sorted by row and item."""
        keys = torch.unique(torch.repeat_interleave(offsets.diff()) * (num_items + 1) + items)
        return cls(keys // (num_items + 1), keys % (num_items + 1))

    def without(self, others: Cells, num_items: int) -> Cells:
        """The pairs that are not among `others`."""
        mine, theirs = (cells.rows * (num_items + 1) + cells.items for cells in (self, others))
        left = ~torch.isin(mine, theirs)
        return Cells(self.rows[left], self.items[left])

    def within(self, first: int, last: int) -> tuple[Tensor, Cells]:
        """Which pairs have an item in first .. last - 1, and those pairs with items counted from `first`."""
        here = torch.nonzero((self.items >= first) & (self.items < last)).flatten()
        return here, Cells(self.rows[here], self.items[here] - first)

    def leave_out(self, tile_BV: Tensor, first: int) -> None:
        """Give these pairs the score -inf, in place; tile_BV: scores of the items from `first` on."""
        _, cells = self.within(first, first + tile_BV.shape[1])
        tile_BV[cells.rows, cells.items] = -torch.inf


class LeavesOut(Protocol):
    """What is not ranked; `Cells` is one."""

    def leave_out(self, tile_BV: Tensor, first: int, /) -> None:
        """Give it the score -inf, in place; tile_BV: scores of the items from `first` on."""


def tiles(num_items: int, width: int, start: int = 1) -> list[tuple[int, int]]:
    """Items `start` .. num_items as ranges of at most `width` items, (first, last + 1), in order of id."""
    return [(first, min(first + width, num_items + 1)) for first in range(start, num_items + 1, width)]


def dot_scores(users_BE: Tensor, items_VE: Tensor) -> TileScores:
    """Scores by dot product in float32, whatever precision is set outside; items_VE: [V + 1, E], row 0 is padding."""

    def scores(first: int, last: int) -> Tensor:
        with _full_float32(users_BE.device):
            return users_BE @ items_VE[first:last].T

    return scores


def check_finite(x: Tensor, what: str) -> None:
    """Refuse a diverged model: NaN compares as better than nothing, which would put its positives first."""
    if not torch.isfinite(x).all():
        raise ValueError(diverged(what))


def diverged(what: str) -> str:
    """The message for a model whose `what` is not finite."""
    return f"the model's {what} contain NaN or infinity: it diverged; train again, with a lower train.lr"


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32: both round scores so coarsely that items tie by the hundred."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
