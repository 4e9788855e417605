"""Every user of a split ranked by a model's dot products, on the device: encode in large batches, count by the kernel.

What batches look like is decided once, on the host; after that nothing is read back before the last batch is under way,
and the counts come in one transfer. Users go in the order of their histories' lengths, so that short ones are not
padded to long ones. Memory is bounded by the three constants below, whatever the number of users and items.

Shapes: U users of the split, B of a batch, L positions, S positives, T items left out, V items, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trope.data.sequences import Sequences
from trope.evaluate.metrics import Ints, Places
from trope.evaluate.ranking import Cells
from trope.kernels.ranking import Catalogue, places

Encode = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Histories (items [B, L], times [B, L], lengths [B], t_now [B]) to vectors [B, E]."""

TOKENS = 1 << 18  # positions encoded at a time
ROWS = 1 << 15  # positives ranked at a time
CELLS = 1 << 24  # items left out at a time
# Lengths are rounded up and users down to a multiple, so that kernels meet few different shapes.
_ROUND = 16


class Batch(NamedTuple):
    """Users `first` .. `last` - 1 in the order of the plan, with their numbers of positives and of items seen."""

    first: int
    last: int
    rows: int
    cells: int


class Plan:
    """Who is ranked with whom.

    data: on the device that ranks. split: valid or test. filter_seen: none, window or history. max_len: of histories.
    """

    def __init__(self, data: Sequences, split: str, filter_seen: str, max_len: int) -> None:
        users_U = data.eval_users(split)
        if len(users_U) == 0:
            raise ValueError(no_users(data, split))
        data.seen(split, users_U[:1], max_len, filter_seen)  # refuses an unknown filter
        found = data.eval_batch(split, users_U, 1)
        self.data, self.users_U, self.max_len, self.t_now_U = data, users_U, max_len, found.t_now
        cells = Cells.distinct(found.positives, found.positive_offsets, data.num_items)
        self.positives_S = cells.items
        # User u owns positives offsets[u] .. offsets[u+1]; every user has one.
        self.offsets_U = torch.searchsorted(cells.rows, torch.arange(len(users_U) + 1, device=data.device))
        self.counts_U = self.offsets_U.diff()
        # Where each history ends in the store; it began at its user's first event.
        past_U = (data.train_end if split == "valid" else data.test_start)[users_U].long()
        self.ends_U = data.offsets[users_U] + past_U
        self.windows_U = past_U.clamp(max=max_len)
        self.seen_U = {"none": torch.zeros_like(past_U), "window": self.windows_U, "history": past_U}[filter_seen]
        # The longest first: what fits the memory then fits it to the end.
        self.order_U = torch.argsort(self.windows_U, descending=True, stable=True)
        by_user = torch.stack((self.windows_U, self.counts_U, self.seen_U))[:, self.order_U].cpu().numpy()
        self._windows: Ints = by_user[0]
        self._rows: Ints = np.concatenate(([0], by_user[1].cumsum()))
        self._cells: Ints = np.concatenate(([0], by_user[2].cumsum()))

    def batches(self) -> Iterator[Batch]:
        """All users, as many at a time as ROWS and CELLS allow, at least one."""
        first, total = 0, len(self.users_U)
        while first < total:
            fits = (np.searchsorted(sums, sums[first] + most, "right") - 1
                    for sums, most in ((self._rows, ROWS), (self._cells, CELLS)))  # fmt: skip
            last = max(first + 1, int(min(fits)))
            rows, cells = (int(sums[last] - sums[first]) for sums in (self._rows, self._cells))
            yield Batch(first, last, rows, cells)
            first = last

    def encode(self, encode: Encode, batch: Batch) -> Tensor:
        """The users' vectors, float32 [B, E]."""
        parts, first = [], batch.first
        while first < batch.last:
            length = min(self.max_len, -(-int(self._windows[first]) // _ROUND) * _ROUND)
            users = max(1, TOKENS // length)
            last = min(batch.last, first + (users if users < _ROUND else users // _ROUND * _ROUND))
            parts.append(encode(*self._histories(self.order_U[first:last], length)).float())
            first = last
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _histories(self, index_B: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Sequences.eval_batch` cuts them, but no longer than these users need."""
        ends_B, lengths_B = self.ends_U[index_B], self.windows_U[index_B]
        places_L = torch.arange(length, device=index_B.device)
        where_BL = torch.minimum((ends_B - lengths_B)[:, None] + places_L, ends_B[:, None] - 1)
        items_BL = self.data.items[where_BL].long().masked_fill(places_L >= lengths_B[:, None], 0)
        return items_BL, self.data.times[where_BL], lengths_B, self.t_now_U[index_B]

    def places(self, users_BE: Tensor, catalogue: Catalogue, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Which positives of the split these are, how many items are better than each, and how many tie; each [S]."""
        index_B = self.order_U[batch.first : batch.last]
        index_S, rows_S = _ranges(self.offsets_U[index_B], self.counts_U[index_B], batch.rows)
        positives_S = self.positives_S[index_S]
        if batch.cells == 0:
            return index_S, *places(users_BE, catalogue, rows_S, positives_S)
        seen_B = self.seen_U[index_B]
        where_T, rows_T = _ranges(self.ends_U[index_B] - seen_B, seen_B, batch.cells)
        stride = self.data.num_items + 1
        left_T = _thinned(rows_T * stride + self.data.items[where_T], rows_S * stride + positives_S) % stride
        offsets_B = torch.nn.functional.pad(seen_B.cumsum(0), (1, 0))
        return index_S, *places(users_BE, catalogue, rows_S, positives_S, left_T, offsets_B)


def rank_by_dot(encode: Encode, catalogue: Catalogue, plan: Plan, progress: bool = False) -> tuple[Places, bool]:
    """Places of all positives, users in rising order; and whether every vector was finite (if not, they mean nothing).

    progress: show a bar (of what is under way: the device may be a little behind).
    """
    found_S = torch.empty((2, len(plan.positives_S)), dtype=torch.int32, device=plan.users_U.device)
    finite = torch.ones((), dtype=torch.bool, device=plan.users_U.device)
    with tqdm(total=len(plan.users_U), desc="evaluate", disable=not progress, leave=False) as bar:
        for batch in plan.batches():
            users_BE = plan.encode(encode, batch)
            finite &= torch.isfinite(users_BE).all()
            index_S, better_S, ties_S = plan.places(users_BE, catalogue, batch)
            found_S[0, index_S], found_S[1, index_S] = better_S, ties_S
            bar.update(batch.last - batch.first)
    better, ties = found_S.cpu().numpy().astype(np.int64)
    return Places(better, ties, plan.offsets_U.cpu().numpy()), bool(finite)


def no_users(data: Sequences, split: str) -> str:
    """What to say of a split that holds nobody."""
    return f"{data.path} has no user to evaluate in split {split!r}; prepare it with another protocol"


def _ranges(starts_B: Tensor, counts_B: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Every position of the ranges in turn, and whose it is; both [total], which must be the counts' sum."""
    rows = torch.repeat_interleave(counts_B, output_size=total)
    before_B = counts_B.cumsum(0) - counts_B
    return torch.arange(total, device=starts_B.device) + (starts_B - before_B)[rows], rows


def _thinned(keys_T: Tensor, positives_S: Tensor) -> Tensor:
    """The keys sorted, with 0 for a key that came before or is among `positives_S`, which is sorted and not empty."""
    keys_T = keys_T.sort().values
    near_T = torch.searchsorted(positives_S, keys_T).clamp(max=len(positives_S) - 1)
    drop_T = positives_S[near_T] == keys_T
    drop_T[1:] |= keys_T[1:] == keys_T[:-1]
    return keys_T.masked_fill(drop_T, 0)
