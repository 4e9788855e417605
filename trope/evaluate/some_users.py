"""Some users of a split, at random: what is fitted or chosen on validation asks no more of them.

Of a stream, the same users are drawn as of the same data in memory. Two passes find them: one counts the users of each
block, one takes out the events of those that were drawn, which become a small store of their own.

Shapes: U users of a store, D users that were drawn, N events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.windows import flatten_ranges

View = Callable[[Sequences], Sequences]
"""The same users and events under other splits."""


class Drawn(NamedTuple):
    """Users in the order of t_now, and the store that has them; of a stream, it has nobody else."""

    data: Sequences
    users_D: Tensor


def some_users(data: Sequences, split: str, most: int, generator: torch.Generator) -> Tensor:
    """Some users of a split, at random, in the order of t_now."""
    users = data.eval_users(split)
    return _by_moment(data, split, users[draw(len(users), most, generator).to(users.device)])


def draw_users(
    data: Sequences | Stream, views: Sequence[View], split: str, most: int, generator: torch.Generator
) -> list[Drawn]:
    """At most so many users of each view's split."""
    if isinstance(data, Stream):
        return _draw_of_stream(data, views, split, most, generator)
    stores = [view(data) for view in views]
    return [Drawn(store, some_users(store, split, most, generator)) for store in stores]


def draw(total: int, most: int, generator: torch.Generator) -> Tensor:
    """At most so many of the numbers below `total`, in random order."""
    return torch.randperm(total, generator=generator)[:most]


def _by_moment(data: Sequences, split: str, users: Tensor) -> Tensor:
    return users[torch.argsort(data.eval_batch(split, users, 1).t_now, stable=True)]


def _draw_of_stream(
    stream: Stream, views: Sequence[View], split: str, most: int, generator: torch.Generator
) -> list[Drawn]:
    counts = list(stream.over_blocks(lambda user, block: [len(view(block).eval_users(split)) for view in views]))
    drawn = [draw(sum(of_view), most, generator) for of_view in zip(*counts, strict=True)]
    rising = [places_D.sort() for places_D in drawn]
    done = [0] * len(views)  # users of each view's split in the blocks before

    def take(user: int, block: Sequences) -> _Part:
        chosen = []
        for number, view in enumerate(views):
            users = view(block).eval_users(split)
            first, last = torch.searchsorted(
                rising[number].values, torch.tensor([done[number], done[number] + len(users)])
            )
            places_D = rising[number].values[first:last] - done[number]
            chosen.append(users[places_D.to(users.device)])
            done[number] += len(users)
        return _Part.of(block, torch.unique(torch.cat(chosen)), chosen, user)

    parts = list(stream.over_blocks(take))
    lengths_U = torch.cat([part.lengths_U for part in parts])
    store = Sequences(
        stream.path,
        stream.meta,
        {
            "items": torch.cat([part.items_N for part in parts]),
            "times": torch.cat([part.times_N for part in parts]),
            "offsets": torch.cat((lengths_U.new_zeros(1), lengths_U.cumsum(0))),
            "splits": torch.cat([part.splits_4U for part in parts], dim=1),
        },
    )
    users_U, found = torch.cat([part.users_U for part in parts]), []
    for number, view in enumerate(views):
        taken_D = torch.cat([part.chosen[number] for part in parts])
        users_D = torch.empty_like(taken_D)
        users_D[rising[number].indices.to(taken_D.device)] = torch.searchsorted(users_U, taken_D)  # as they were drawn
        data = view(store)
        found.append(Drawn(data, _by_moment(data, split, users_D)))
    return found


class _Part(NamedTuple):
    """What is taken out of a block: users by their number in the dataset, their events, and whom each view drew."""

    users_U: Tensor
    lengths_U: Tensor
    items_N: Tensor
    times_N: Tensor
    splits_4U: Tensor
    chosen: list[Tensor]

    @classmethod
    def of(cls, block: Sequences, users_U: Tensor, chosen: list[Tensor], first: int) -> _Part:
        """users_U, chosen: numbers in the block, whose first user is `first` in the dataset."""
        begins, ends = block.offsets[users_U], block.offsets[users_U + 1]
        places_N = flatten_ranges(begins, ends).places_T
        cuts = (block.train_end, block.valid_end, block.test_start, block.test_end)
        splits_4U = torch.stack([cut[users_U] for cut in cuts])
        numbers = [each + first for each in chosen]
        return cls(users_U + first, ends - begins, block.items[places_N], block.times[places_N], splits_4U, numbers)
