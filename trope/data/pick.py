"""Some users of a stream as a small store of their own.

Shapes: U users of the small store, N their events.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.windows import flatten_ranges


class Part(NamedTuple):
    """Users that were taken out of a block, and their events. users_U: their numbers in the dataset."""

    users_U: Tensor
    lengths_U: Tensor
    items_N: Tensor
    times_N: Tensor
    splits_4U: Tensor

    @classmethod
    def of(cls, block: Sequences, users_U: Tensor, first: int) -> Part:
        """users_U: numbers in the block, whose first user is `first` in the dataset."""
        begins, ends = block.offsets[users_U], block.offsets[users_U + 1]
        places_N = flatten_ranges(begins, ends).places_T
        cuts = (block.train_end, block.valid_end, block.test_start, block.test_end)
        splits_4U = torch.stack([cut[users_U] for cut in cuts])
        return cls(users_U + first, ends - begins, block.items[places_N], block.times[places_N], splits_4U)


def join(stream: Stream, parts: list[Part]) -> Sequences:
    """The users of all parts, in the order of the parts."""
    lengths_U = torch.cat([part.lengths_U for part in parts])
    tensors = {
        "items": torch.cat([part.items_N for part in parts]),
        "times": torch.cat([part.times_N for part in parts]),
        "offsets": torch.cat((lengths_U.new_zeros(1), lengths_U.cumsum(0))),
        "splits": torch.cat([part.splits_4U for part in parts], dim=1),
    }
    return Sequences(stream.path, stream.meta, tensors)


def pick(stream: Stream, users: list[int]) -> Sequences:
    """Some users, in rising order and each once; only the shards that hold them are read, one at a time."""
    firsts = [0, *accumulate(size.users for size in stream.sizes)]
    parts = []
    for shard, numbers in groupby(users, lambda user: bisect_right(firsts, user) - 1):
        block = stream.read([shard]).data.to(stream.device)
        parts.append(Part.of(block, torch.tensor(list(numbers), device=stream.device) - firsts[shard], firsts[shard]))
    return join(stream, parts)
