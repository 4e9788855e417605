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

from trope.data.pick import Part, join
from trope.data.sequences import Sequences
from trope.data.stream import Stream

View = Callable[[Sequences], Sequences]
"""The same users and events under other splits."""


class Drawn(NamedTuple):
    """Users in the order of t_now, and the store that has them; of a stream, it has nobody else."""

    data: Sequences
    users_D: Tensor


def as_it_is(data: Sequences) -> Sequences:
    """The view that changes nothing."""
    return data


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

    def take(user: int, block: Sequences) -> tuple[Part, list[Tensor]]:
        chosen = []
        for number, view in enumerate(views):
            users, places_D = view(block).eval_users(split), rising[number].values
            low, high = torch.searchsorted(places_D, torch.tensor([done[number], done[number] + len(users)])).tolist()
            chosen.append(users[(places_D[low:high] - done[number]).to(users.device)])
            done[number] += len(users)
        return Part.of(block, torch.unique(torch.cat(chosen)), user), [each + user for each in chosen]

    taken = list(stream.over_blocks(take))
    parts = [part for part, _ in taken]
    store, users_U, found = join(stream, parts), torch.cat([part.users_U for part in parts]), []
    for number, view in enumerate(views):
        chosen_D = torch.cat([chosen[number] for _, chosen in taken])
        users_D = torch.empty_like(chosen_D)
        users_D[rising[number].indices.to(chosen_D.device)] = torch.searchsorted(
            users_U, chosen_D
        )  # as they were drawn
        data = view(store)
        found.append(Drawn(data, _by_moment(data, split, users_D)))
    return found
