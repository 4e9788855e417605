"""The order of an epoch over shards: shards in random order, a block of some of them, windows shuffled inside a block.

Everything depends on (seed, epoch), the number of windows of each shard, and how many shards a block has. It does not
depend on the number of processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from trope.train.step import seed_for


class Cursor(NamedTuple):
    """Where in a stream a batch begins: the epoch, its block, the window in it; and the shards of a block."""

    epoch: int
    block: int
    offset: int
    window: int


class EpochOrder(NamedTuple):
    """One epoch. blocks: the shards of each. starts: where each begins among the epoch's windows, and their number."""

    blocks: list[list[int]]
    starts: list[int]

    def block_of(self, place: int) -> int:
        """The block that holds the window at a place of the epoch."""
        return bisect_right(self.starts, place, hi=len(self.blocks)) - 1


def epoch_order(counts: Sequence[int], window: int, seed: int, epoch: int) -> EpochOrder:
    """The order of an epoch. counts: windows of each shard, none of them in at least one. window: shards of a block."""
    generator = torch.Generator().manual_seed(seed_for(seed, "shards", epoch))
    shards = torch.randperm(len(counts), generator=generator).tolist()
    blocks = [shards[low : low + window] for low in range(0, len(shards), window)]
    starts = [0, *accumulate(sum(counts[shard] for shard in block) for block in blocks)]
    return EpochOrder(blocks, starts)


def shuffled(count: int, seed: int, epoch: int, block: int) -> Tensor:
    """The order of a block's windows, int64 [count]."""
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch, block))
    return torch.randperm(count, generator=generator)


def whole_order(counts: Sequence[int], window: int, seed: int, epoch: int) -> Tensor:
    """The same epoch for a store that holds all shards: the order of its windows, int64 [W]."""
    first = [0, *accumulate(counts)]
    order = epoch_order(counts, window, seed, epoch)
    parts = []
    for number, shards in enumerate(order.blocks):
        windows = torch.cat([torch.arange(first[shard], first[shard + 1]) for shard in shards])
        parts.append(windows[shuffled(len(windows), seed, epoch, number)])
    return torch.cat(parts)
