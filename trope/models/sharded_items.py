"""The item table by rows over ranks: `ItemTable`'s interface where no process holds all rows.

Autograd never sees the rows. A step asks for the rows of its batch (`fetch`), which makes a small `ItemTable` of them.
Model and loss run on that table as they do on a whole one. The gradients of its rows go back to the ranks that have
them (`give_back`), and each rank updates its own rows by the kernel that updates a whole table.

Shape letters: V items of the catalogue, E width, U items of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trope.kernels.table import InputEntries, ScoreEntries
from trope.models.exchange import Route, RowGradients, Shard, add_by_twos, find_route, gather_rows
from trope.models.items import ItemTable, TableRows, first_rows, row_entries


class Fetched(NamedTuple):
    """The rows of a batch.

    table: their own table. items: what was asked for, numbered as in that table; 0 stays 0. route: for the gradients.
    """

    table: ItemTable
    items: tuple[Tensor, ...]
    route: Route


class ShardedItemTable(TableRows):
    """One rank's rows of the vectors of all items, and the way to the others. Gradients and norms are of its own rows.

    Args:
        num_items: V, of all ranks.
        width: E.
        rank, size: of this process, and how many there are.
    """

    def __init__(self, num_items: int, width: int, rank: int, size: int) -> None:
        super().__init__()
        self.num_items, self.width, self.shard = num_items, width, Shard(rank, size, num_items)
        rows = first_rows(num_items, width, self.shard.first, self.shard.last)
        self.weight = nn.Parameter(rows, requires_grad=False)

    def embed(self, items: Tensor) -> Tensor:
        """What the network reads for items [..]: sqrt(E) times their rows, [.., E]; not differentiable. Collective."""
        with torch.no_grad():
            found = self.fetch(items)
            return found.table.embed(found.items[0])

    def fetch(self, *items: Tensor) -> Fetched:
        """The rows of these items as a table of their own, whose rows have gradients. Collective."""
        flat = torch.cat([torch.zeros_like(items[0].reshape(-1)[:1]), *(each.reshape(-1) for each in items)])
        ids, places = torch.unique(flat, return_inverse=True)  # rising, and 0 is there: it stays 0
        route = find_route(ids[1:], self.shard)
        rows_UE = self.weight.new_zeros((len(ids), self.width))
        rows_UE[1:] = route.rows(self.weight.detach())
        parts = places[1:].split([each.numel() for each in items])
        numbered = tuple(part.view(each.shape) for part, each in zip(parts, items, strict=True))
        return Fetched(ItemTable.of_rows(rows_UE), numbered, route)

    def give_back(self, fetched: Sequence[Fetched], by_twos: bool = False) -> tuple[ScoreEntries, InputEntries]:
        """What all ranks found for this rank's rows, for `gradient` and `update`. Collective.

        fetched: one, or this rank's parts where gradients are added `by_twos`, in the order of `trope.train.parts`.
        """
        found = []
        for table, _, route in fetched:
            assert table.weight.grad is not None, "a backward pass comes first"
            found.append(RowGradients(route.rows_G, route.gradients(table.weight.grad[1:]), route.given))
        # Entries are sorted by row in a stable way: one rank's gradient of a row is added after the other's.
        rows_G, grad_GE, _ = add_by_twos(found) if by_twos else found[0]
        return row_entries(rows_G, grad_GE, len(self.weight) - 1)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of all ranks' values, in place. Collective."""
        if self.shard.size > 1:
            dist.all_reduce(value)
        return value

    def whole(self) -> Tensor | None:
        """All rows [V + 1, E] on the first rank's host, None elsewhere. Collective."""
        return gather_rows(self.weight.detach(), self.shard)
