"""Rows over ranks: which rank has which items, and how rows and their gradients travel.

Items 1 .. V are cut into as many runs as there are ranks, rank 0 has the first. A rank asks each row once, whatever the
number of its tokens that need it, and sends one gradient back for it. Everything here is a collective: all ranks call
it, in the same order.

Shapes: U rows that this rank asks for, G rows that others ask of it, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist


class Shard(NamedTuple):
    """A rank's share of the items: first .. last - 1 of 1 .. num_items, maybe none."""

    rank: int
    size: int
    num_items: int

    @property
    def first(self) -> int:
        """The first item of this rank."""
        return self.start_of(self.rank)

    @property
    def last(self) -> int:
        """The item after the last of this rank."""
        return self.start_of(self.rank + 1)

    def start_of(self, rank: int) -> int:
        """The first item of a rank; V + 1 for the rank after the last."""
        return 1 + self.num_items * rank // self.size

    def starts(self, device: torch.device) -> Tensor:
        """The first item of each rank, and V + 1; [ranks + 1]."""
        return torch.tensor([self.start_of(rank) for rank in range(self.size + 1)], device=device)


class Route(NamedTuple):
    """Who asks whom for which rows in one step.

    asked: how many rows this rank asks of each rank. given: how many each rank asks of this one. rows_G: which rows of
    this rank's table those are, rank by rank.
    """

    asked: list[int]
    given: list[int]
    rows_G: Tensor

    def rows(self, table: Tensor) -> Tensor:
        """The rows that this rank asked for, in the order of their ids, [U, E]. table: this rank's rows."""
        return _travel(table[self.rows_G], self.given, self.asked)

    def gradients(self, grad_UE: Tensor) -> Tensor:
        """What the ranks found for this rank's `rows_G`, [G, E]. grad_UE: what this rank found for its rows."""
        return _travel(grad_UE, self.asked, self.given)


def find_route(ids_U: Tensor, shard: Shard) -> Route:
    """Tell every rank which of its rows are needed here. ids_U: different items above 0, rising."""
    asked_N = torch.searchsorted(ids_U, shard.starts(ids_U.device)).diff()
    given_N = _travel(asked_N, [1] * shard.size, [1] * shard.size)
    asked, given = torch.stack((asked_N, given_N)).tolist()
    # Row 0 of each rank's table is padding.
    return Route(asked, given, _travel(ids_U, asked, given) - (shard.first - 1))


class RowGradients(NamedTuple):
    """Gradients of this rank's rows, grad_GE for rows_G: given[r] of them by rank r, one rank after the other."""

    rows_G: Tensor
    grad_GE: Tensor
    given: list[int]

    def by_rank(self) -> list[RowGradients]:
        """Those of each rank."""
        pieces = zip(self.rows_G.split(self.given), self.grad_GE.split(self.given), strict=True)
        return [RowGradients(rows, grads, [len(rows)]) for rows, grads in pieces]


def add_by_twos(found: Sequence[RowGradients]) -> RowGradients:
    """Each row once, with the sum of its gradients in the order of `trope.train.parts`.

    found: for each rank's first part, for each rank's second part, and so on; 1, 2, 4 .. of them and of ranks.
    """
    # Rank 0 has the first parts of the batch.
    parts = [part for of_rank in zip(*(each.by_rank() for each in found), strict=True) for part in of_rank]
    while len(parts) > 1:
        parts = [_sum_of_two(one, other) for one, other in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


def _sum_of_two(one: RowGradients, other: RowGradients) -> RowGradients:
    rows_G, places = torch.unique(torch.cat((one.rows_G, other.rows_G)), return_inverse=True)
    grads = torch.cat((one.grad_GE, other.grad_GE))
    # At most two numbers meet, so no order of adding matters.
    return RowGradients(rows_G, grads.new_zeros((len(rows_G), grads.shape[1])).index_add_(0, places, grads), [])


def gather_rows(table: Tensor, shard: Shard) -> Tensor | None:
    """The tables of all ranks as one [V + 1, ..] on the first rank's host, row 0 zero; None elsewhere."""
    if shard.rank > 0:
        for piece in table[1:].split(_piece(table)):
            dist.send(piece.contiguous(), 0)
        return None
    whole = torch.zeros((shard.num_items + 1, *table.shape[1:]), dtype=table.dtype)
    whole[1 : shard.last] = table[1:].cpu()
    for rank in range(1, shard.size):
        for part in whole[shard.start_of(rank) : shard.start_of(rank + 1)].split(_piece(table)):
            piece = torch.empty(part.shape, dtype=table.dtype, device=table.device)
            dist.recv(piece, rank)
            part.copy_(piece)
    return whole


def _piece(table: Tensor) -> int:
    """Rows sent at a time: 64 MiB of float32."""
    return max(1, (1 << 24) // max(1, table[:1].numel()))


def _travel(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send the first sent[0] rows to rank 0, and so on; what came from rank 0, and so on."""
    if len(sent) == 1:
        return rows
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived
