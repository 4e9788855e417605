"""Exact top-k of the whole catalogue, a tile at a time.

Tiles are scored in order of item id. A list of the k best keys is kept for each user. Equal scores are ordered by item
id, so an item of a later tile enters a full list only if its score is strictly better than the list's last score. Most
tiles hold no such item for most users: the row's best score says so, and the tile is dropped.

On a GPU a tile is cut into blocks of items, and only the k blocks with the best maxima are looked at. That is exact:
the k largest maxima are k items, so no item that is worse than all of them is among the k best.

Shapes: B users, E width, V items (ids 1 .. V), K items kept, W items of a tile, N blocks of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.evaluate.ranking.tiles import USERS_AT_A_TIME, LeavesOut, TileScores, dot_scores, tiles

# Scores of a tile. 8 MiB stay in a CPU's cache: 512 users x 1 M items x width 64 take 1.4 to 1.8 s of one core, while
# tiles of 128 MiB took 10 s. A GPU wants few large tiles: 2 GiB where blocks are looked at, else 64 MiB, since a key
# takes ten times a score's memory. Neither was tuned.
CPU_TILE, GPU_TILE, BLOCKS_TILE = 1 << 21, 1 << 24, 1 << 29
# Items of a block; not tuned.
BLOCK = 128
# Users that a GPU ranks together, at most; not tuned. trope/serve/moments.py encodes long histories fewer at a time.
_MOST_USERS = 8192
# A tile is no wider than it would be for this many users: the first tile's items all enter the list.
_LEAST_USERS = 64
# A key is a score's bits and the item's complement: larger keys are better, and no two are equal.
_LOW = 0xFFFFFFFF
_EMPTY = -(1 << 63)


class TopK(NamedTuple):
    """The best items of each user, best first. Where fewer than K are left, item 0 and score -inf fill the row."""

    items_BK: Tensor  # int64
    scores_BK: Tensor  # float32


def users_together(num_items: int, device: torch.device) -> int:
    """How many users to rank together: on a GPU as many as a tile holds with all items."""
    if device.type != "cuda":
        return USERS_AT_A_TIME
    return min(_MOST_USERS, max(USERS_AT_A_TIME, _blocks_tile(device) // (num_items + 1)))


def top_k(
    users_BE: Tensor, items_VE: Tensor, k: int, left_out: LeavesOut | None = None, tile: int | None = None
) -> TopK:
    """The `k` items with the largest dot products, equal ones in order of item id.

    users_BE, items_VE: float32, finite; row 0 of the items is padding and never ranked. left_out: pairs of a user's row
    and an item that are not ranked. tile: scores held at a time; memory is about 40 bytes for each.
    """
    assert users_BE.dtype == items_VE.dtype == torch.float32
    scores = dot_scores(users_BE, items_VE)
    return top_k_of(scores, len(users_BE), len(items_VE) - 1, users_BE.device, k, left_out, tile)


def top_k_of(
    scores: TileScores,
    users: int,
    num_items: int,
    device: torch.device,
    k: int,
    left_out: LeavesOut | None = None,
    tile: int | None = None,
) -> TopK:
    """`top_k` by any scores, float32."""
    if device.type == "cuda" and tile is None:
        room, least = _blocks_tile(device), _least_width(k)
        # With many users and a large k, even the narrowest tile that is worth its blocks would be too large.
        if least < num_items and users * least <= room:
            return top_k_by_blocks(scores, users, num_items, k, left_out, room)
    tile = tile or (CPU_TILE if device.type == "cpu" else GPU_TILE)
    best_BK, least_B = None, None
    ranges = tiles(num_items, max(1, tile // max(users, _LEAST_USERS)))
    for first, last in ranges:
        tile_BW = scores(first, last)
        if left_out is not None:
            left_out.leave_out(tile_BW, first)
        if len(ranges) == 1 and (found := _without_ties(tile_BW, first, k)) is not None:
            return found
        if best_BK is None or least_B is None:  # the first tile's best need no comparison
            best_BK = _filled(keys(tile_BW, first).topk(min(k, last - first), dim=1).values, k)
            least_B = _scores(best_BK[:, -1])
            continue
        rows = torch.nonzero(tile_BW.amax(1) > least_B).flatten()
        if len(rows):
            here_BW = keys(tile_BW if len(rows) == users else tile_BW[rows], first)
            here_BK = here_BW.topk(min(k, last - first), dim=1).values
            best_BK[rows] = torch.cat((best_BK[rows], here_BK), dim=1).topk(k, dim=1).values
            least_B = _scores(best_BK[:, -1])
    return _unpacked(torch.full((users, k), _EMPTY, device=device) if best_BK is None else best_BK)


def top_k_by_blocks(
    scores: TileScores, users: int, num_items: int, k: int, left_out: LeavesOut | None = None, tile: int = BLOCKS_TILE
) -> TopK:
    """`top_k_of` in large tiles, of which only the best blocks are looked at.

    tile: scores held at a time, at least `users` times the least width. At most a quarter of them are looked at, which
    takes about 50 bytes for each.
    """
    found = []
    for first, last in tiles(num_items, max(_least_width(k), tile // max(users, 1))):
        tile_BW = scores(first, last)
        if left_out is not None:
            left_out.leave_out(tile_BW, first)
        found.append(_of_blocks(tile_BW, first, k))
    if len(found) == 1:
        return found[0]
    scores_BC, items_BC = (torch.cat([getattr(each, name) for each in found], 1) for name in ("scores_BK", "items_BK"))
    return top_k_among(scores_BC, items_BC, k)


def _least_width(k: int) -> int:
    """Items of a tile at least, so that the `k` best blocks are at most a quarter of it."""
    return 4 * k * BLOCK


def _blocks_tile(device: torch.device) -> int:
    """Scores of a tile whose blocks are looked at: on a small card a 64th of its memory."""
    return min(BLOCKS_TILE, torch.cuda.get_device_properties(device).total_memory // (64 * 4))


def _of_blocks(tile_BW: Tensor, first: int, k: int) -> TopK:
    """The `k` best of a tile."""
    width = tile_BW.shape[1]
    whole = width // BLOCK * BLOCK
    maxima_BN = tile_BW[:, :whole].unflatten(1, (-1, BLOCK)).amax(2)
    if whole < width:
        maxima_BN = torch.cat((maxima_BN, tile_BW[:, whole:].amax(1, keepdim=True)), dim=1)
    if maxima_BN.shape[1] <= k:
        return _unpacked(_filled(keys(tile_BW, first).topk(min(k, width), dim=1).values, k))
    best_BK, blocks_BK = maxima_BN.topk(k + 1, dim=1)
    places_BKN = blocks_BK[:, :k, None] * BLOCK + torch.arange(BLOCK, device=tile_BW.device)
    places_BC = places_BKN.flatten(1)
    scores_BC = tile_BW.gather(1, places_BC.clamp(max=width - 1)).masked_fill_(places_BC >= width, -torch.inf)
    found = top_k_among(scores_BC, places_BC + first, k)
    # The best block that was not looked at may hold an equal score, and a smaller item.
    tied = torch.nonzero(best_BK[:, k] == best_BK[:, k - 1]).flatten()
    for rows in tied.split(max(1, GPU_TILE // width)) if len(tied) else ():
        again = _unpacked(keys(tile_BW[rows], first).topk(k, dim=1).values)
        found.items_BK[rows], found.scores_BK[rows] = again.items_BK, again.scores_BK
    return found


def top_k_among(scores_BC: Tensor, items_BC: Tensor, k: int) -> TopK:
    """The `k` best of each user's own candidates, float32 scores of distinct items; score -inf leaves one out."""
    found_BK = _packed(scores_BC, items_BC).topk(min(k, scores_BC.shape[1]), dim=1).values
    return _unpacked(_filled(found_BK, k))


def keys(scores_BW: Tensor, first: int) -> Tensor:
    """Keys that sort as (score, then smaller item first); scores_BW: float32 scores of the items from `first` on."""
    return _packed(scores_BW, torch.arange(first, first + scores_BW.shape[1], device=scores_BW.device))


def _without_ties(tile_BW: Tensor, first: int, k: int) -> TopK | None:
    """The `k` best where their scores and the next one all differ: no key is needed then, which saves most of the time.

    None where two are equal, or where the tile has not more than `k` items.
    """
    if tile_BW.shape[1] <= k:
        return None
    scores_BK, places_BK = tile_BW.topk(k + 1, dim=1)
    if (scores_BK[:, 1:] == scores_BK[:, :-1]).any():
        return None
    # Were one of them -inf, that is left out, the next one would be too.
    return TopK(places_BK[:, :k] + first, scores_BK[:, :k] + 0.0)


def _filled(best_BK: Tensor, k: int) -> Tensor:
    """Keys with empty places behind them where there are fewer than `k`."""
    missing = k - best_BK.shape[1]
    return torch.nn.functional.pad(best_BK, (0, missing), value=_EMPTY) if missing else best_BK


def _packed(scores: Tensor, items: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return _rising(bits).long().bitwise_left_shift_(32).bitwise_or_(_LOW - items)


def _unpacked(best_BK: Tensor) -> TopK:
    scores_BK = _scores(best_BK)
    return TopK((_LOW - (best_BK & _LOW)).masked_fill(scores_BK == -torch.inf, 0), scores_BK)


def _scores(keys: Tensor) -> Tensor:
    """The scores in keys; -inf for an empty place."""
    scores = _rising((keys >> 32).int()).view(torch.float32)
    return scores.masked_fill(keys == _EMPTY, -torch.inf)


def _rising(bits: Tensor) -> Tensor:
    """A float's bits as an integer that sorts as the float does, and back.

    The bits of negative floats fall as the number rises: all but the sign are flipped.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
