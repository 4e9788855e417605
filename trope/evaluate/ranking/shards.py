"""Ranking a catalogue whose rows are spread over ranks: each rank scores its own rows; only counts and lists travel.

Better-scored items and ties are sums over ranks, so they are exact. The k best items are the best of the ranks' k best.
Every function here is a collective: all ranks call it, in the same order and for the same users.

Shapes: B users, E width, K items kept, S positives of these users.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from trope.evaluate.ranking.places import TILE, count_better, own_scores, scored_once
from trope.evaluate.ranking.tiles import Cells, LeavesOut, TileScores, diverged, dot_scores, tiles
from trope.evaluate.ranking.topk import TopK, top_k_among, top_k_of
from trope.evaluate.ranking.user_batches import Encode
from trope.models.sharded_items import ShardedItemTable


class ShardRanking:
    """One rank's part of the rankings by a sharded table's dot products. Refuses rows that are not finite."""

    def __init__(self, table: ShardedItemTable) -> None:
        self.table, self.shard = table, table.shard
        unit_VE = table.unit_copy(torch.float32, "torch")
        # A rank that alone refuses leaves the others waiting.
        if table.sum((~torch.isfinite(unit_VE)).any().float()):
            raise ValueError(diverged("item vectors"))
        self.unit_VE = unit_VE

    def encode(self, encode: Encode, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """Vectors of all users of a batch, [B, E]; each rank encodes some of them."""
        B, (rank, size, _) = len(items_BL), self.shard
        first, last = B * rank // size, B * (rank + 1) // size
        # A rank without users encodes one too: the rows of its items are asked for together.
        mine = slice(first, max(last, first + 1)) if first < B else slice(B - 1, B)
        found_BE = encode(items_BL[mine], times_BL[mine], lengths_B[mine], t_now_B[mine]).float()
        out_BE = found_BE.new_zeros((B, found_BE.shape[1]))
        out_BE[first:last] = found_BE[: last - first]
        return self.table.sum(out_BE)

    def scores(self, users_BE: Tensor) -> TileScores:
        """Scores of this rank's items, asked for by their ids."""
        dots, before = dot_scores(users_BE, self.unit_VE), self.shard.first - 1
        return lambda first, last: dots(first - before, last - before)

    def count_places(
        self, scores: TileScores, num_items: int, positives: Cells, left_out: Cells, users: int, tile: int = TILE
    ) -> tuple[Tensor, Tensor]:
        """`trope.evaluate.ranking.count_places` over all ranks; `scores` are of this rank's items."""
        assert num_items == self.shard.num_items
        ranges = tiles(self.shard.last - 1, max(1, tile // users), self.shard.first)
        scores = scored_once(scores, ranges)
        own_S = own_scores(scores, ranges, positives)
        if own_S is None:
            own_S = self.unit_VE.new_zeros(len(positives.items))
        # One rank has the score, the others add 0.
        own_S = self.table.sum(own_S)
        counts = count_better(scores, ranges, own_S, positives, left_out, users)
        better_S, equal_S = self.table.sum(torch.stack(counts))
        return better_S, equal_S - 1

    def top_k(self, users_BE: Tensor, k: int, left_out: LeavesOut | None = None, tile: int | None = None) -> TopK:
        """`trope.evaluate.ranking.top_k` over all ranks; the same on each of them."""
        before, mine = self.shard.first - 1, self.shard.last - self.shard.first
        shifted = None if left_out is None else _Shifted(left_out, before)
        dots = dot_scores(users_BE, self.unit_VE)
        found = top_k_of(dots, len(users_BE), mine, users_BE.device, k, shifted, tile)
        if self.shard.size == 1:
            return found
        ids_BK = found.items_BK + before * (found.items_BK > 0)
        items, scores = ([torch.empty_like(x) for _ in range(self.shard.size)] for x in (ids_BK, found.scores_BK))
        dist.all_gather(items, ids_BK)
        dist.all_gather(scores, found.scores_BK)
        return top_k_among(torch.cat(scores, dim=1), torch.cat(items, dim=1), k)


class _Shifted:
    """What is left out of a rank's items, which are numbered from 1."""

    def __init__(self, left_out: LeavesOut, before: int) -> None:
        self.left_out, self.before = left_out, before

    def leave_out(self, tile_BV: Tensor, first: int, /) -> None:
        self.left_out.leave_out(tile_BV, first + self.before)
