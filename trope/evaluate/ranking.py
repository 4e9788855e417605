"""Full-catalogue places by counting: how many items score better than each positive, how many the same.

Only counts leave a tile of the catalogue, so the matrix of all scores never exists. A positive's own score is read from
the same product that it is compared with: computed in another way it would differ in the last bit, and a collapsed
model, whose items all score alike, could put every positive first.

Shapes: B users, V items (ids 1 .. V), S positives of these users, X items left out of their rankings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TileScores = Callable[[int, int], Tensor]
"""Scores of items first .. last - 1 as a new tensor [B, last - first]."""
# Scores held at a time: 128 MiB of float32.
TILE = 1 << 25


class Cells(NamedTuple):
    """Pairs of a user's row in the batch and an item."""

    rows: Tensor
    items: Tensor

    @classmethod
    def distinct(cls, items: Tensor, offsets: Tensor, num_items: int) -> Cells:
        """From a jagged list (row b: offsets[b] .. [b+1]), each pair once, sorted by row and item."""
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


def place(
    scores: TileScores, num_items: int, positives: Cells, left_out: Cells, users: int, tile: int = TILE
) -> tuple[Tensor, Tensor]:
    """Better-scored items and ties of each positive, both int64 [S].

    positives: distinct, at least one for each row. left_out: not ranked; holds no positive.
    tile: scores held at a time, over all users.
    """
    width = max(1, tile // users)
    tiles = [(first, min(first + width, num_items + 1)) for first in range(1, num_items + 1, width)]
    # A catalogue that fits one tile is scored once; a larger one twice, since a product is cheap and memory is not.
    whole_BV = scores(*tiles[0]) if len(tiles) == 1 else None
    own_S = None
    for first, last in tiles:
        tile_BV = scores(first, last) if whole_BV is None else whole_BV
        here, cells = positives.within(first, last)
        own_S = tile_BV.new_empty(len(positives.items)) if own_S is None else own_S
        own_S[here] = tile_BV[cells.rows, cells.items]
    assert own_S is not None, "a catalogue has at least one item"
    better_S, equal_S = (torch.zeros_like(positives.items) for _ in range(2))
    for first, last in tiles:
        tile_BV = scores(first, last) if whole_BV is None else whole_BV
        _, cells = left_out.within(first, last)
        tile_BV[cells.rows, cells.items] = math.nan  # neither better than nor equal to anything
        for part in torch.arange(len(own_S), device=own_S.device).split(users):
            # With one positive each, row b is user b's and need not be copied.
            mine_SV = tile_BV if len(own_S) == users else tile_BV[positives.rows[part]]
            better_S[part] += (mine_SV > own_S[part, None]).sum(1)
            equal_S[part] += (mine_SV == own_S[part, None]).sum(1)
    return better_S, equal_S - 1  # a positive equals itself
