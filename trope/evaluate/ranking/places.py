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
    scores = scored_once(scores, ranges)
    own_S = own_scores(scores, ranges, positives)
    assert own_S is not None, "a catalogue has at least one item"
    better_S, equal_S = count_better(scores, ranges, own_S, positives, left_out, users)
    return better_S, equal_S - 1  # a positive equals itself


def scored_once(scores: TileScores, ranges: list[tuple[int, int]]) -> TileScores:
    """The same scores. One tile is kept; several are scored each time, since a product is cheap and memory is not."""
    if len(ranges) != 1:
        return scores
    kept_BV = scores(*ranges[0])
    return lambda first, last: kept_BV


def own_scores(scores: TileScores, ranges: list[tuple[int, int]], positives: Cells) -> Tensor | None:
    """The scores of the positives themselves, [S]; 0 for those outside the ranges. None without a range."""
    own_S = None
    for first, last in ranges:
        tile_BV = scores(first, last)
        here, cells = positives.within(first, last)
        own_S = tile_BV.new_zeros(len(positives.items)) if own_S is None else own_S
        own_S[here] = tile_BV[cells.rows, cells.items]
    return own_S


def count_better(
    scores: TileScores, ranges: list[tuple[int, int]], own_S: Tensor, positives: Cells, left_out: Cells, users: int
) -> tuple[Tensor, Tensor]:
    """How many items of the ranges score better than each positive, and how many the same, itself included; [S]."""
    better_S, equal_S = (torch.zeros_like(positives.items) for _ in range(2))
    for first, last in ranges:
        tile_BV = scores(first, last)
        left_out.leave_out(tile_BV, first)
        for part in torch.arange(len(own_S), device=own_S.device).split(users):
            # With one positive each, row b is user b's and need not be copied.
            mine_SV = tile_BV if len(own_S) == users else tile_BV[positives.rows[part]]
            better_S[part] += (mine_SV > own_S[part, None]).sum(1)
            equal_S[part] += (mine_SV == own_S[part, None]).sum(1)
    return better_S, equal_S
