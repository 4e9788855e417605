"""Full-catalogue places by counting: how many items score better than each positive, and how many the same.

Only counts leave a tile of the catalogue. A positive's own score is read from the same product that it is compared
with. Computed in another way it would differ in the last bit, and a collapsed model, whose items all score alike, could
put every positive first.

Shapes: B users, V items (ids 1 .. V), S positives of these users.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.evaluate.ranking.tiles import Cells, TileScores, tiles

# Scores held at a time: 128 MiB of float32.
TILE = 1 << 25


def count_places(
    scores: TileScores, num_items: int, positives: Cells, left_out: Cells, users: int, tile: int = TILE
) -> tuple[Tensor, Tensor]:
    """Better-scored items and ties of each positive, both int64 [S].

    positives: distinct, at least one for each row. left_out: not ranked; holds no positive.
    tile: scores held at a time, over all users.
    """
    ranges = tiles(num_items, max(1, tile // users))
    # A catalogue that fits one tile is scored once; a larger one twice, since a product is cheap and memory is not.
    whole_BV = scores(*ranges[0]) if len(ranges) == 1 else None
    own_S = None
    for first, last in ranges:
        tile_BV = scores(first, last) if whole_BV is None else whole_BV
        here, cells = positives.within(first, last)
        own_S = tile_BV.new_empty(len(positives.items)) if own_S is None else own_S
        own_S[here] = tile_BV[cells.rows, cells.items]
    assert own_S is not None, "a catalogue has at least one item"
    better_S, equal_S = (torch.zeros_like(positives.items) for _ in range(2))
    for first, last in ranges:
        tile_BV = scores(first, last) if whole_BV is None else whole_BV
        left_out.leave_out(tile_BV, first)
        for part in torch.arange(len(own_S), device=own_S.device).split(users):
            # With one positive each, row b is user b's and need not be copied.
            mine_SV = tile_BV if len(own_S) == users else tile_BV[positives.rows[part]]
            better_S[part] += (mine_SV > own_S[part, None]).sum(1)
            equal_S[part] += (mine_SV == own_S[part, None]).sum(1)
    return better_S, equal_S - 1  # a positive equals itself
