"""Places for every user of a split by a model's dot products, on the device: large batches, counted by the kernel.

The host decides once which users go together. After that nothing is read back before the last batch is under way, and
the counts come in one transfer. Users are sorted by the length of their histories, so that short ones are not padded
to long ones. The three constants below bound the memory, whatever the number of users and items.

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
from trope.data.stream import Stream
from trope.data.windows import flatten_ranges, last_events, seen_counts
from trope.evaluate.metrics import Ints, Places
from trope.evaluate.ranking.tiles import Cells, diverged
from trope.kernels.ranking import Catalogue, places

Encode = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Histories (items [B, L], times [B, L], lengths [B], t_now [B]) to vectors [B, E]."""

TOKENS = 1 << 18  # positions encoded at a time
ROWS = 1 << 15  # positives ranked at a time
CELLS = 1 << 24  # items left out at a time
# Lengths are rounded up and users down to a multiple, so that kernels meet few different shapes.
_ROUND = 16


class UserBatch(NamedTuple):
    """Users `first` .. `last` - 1 of the sorted users, with their numbers of positives and of items left out."""

    first: int
    last: int
    rows: int
    cells: int


class UserBatches:
    """The users of a split, sorted and divided into batches.

    data: on the device that ranks. split: valid or test. filter_seen: none, window or history. max_len: of histories.
    """

    def __init__(self, data: Sequences, split: str, filter_seen: str, max_len: int) -> None:
        users_U = data.eval_users(split)
        if len(users_U) == 0:
            raise ValueError(no_users(data, split))
        found = data.eval_batch(split, users_U, 1)
        self.data, self.users_U, self.max_len, self.t_now_U = data, users_U, max_len, found.t_now
        cells = Cells.distinct(found.positives, found.positive_offsets, data.num_items)
        self.positives_S = cells.items
        # User u owns positives offsets[u] .. offsets[u+1]; every user has one.
        self.offsets_U = torch.searchsorted(cells.rows, torch.arange(len(users_U) + 1, device=data.device))
        self.counts_U = self.offsets_U.diff()
        # Where each history begins and ends in the store.
        past_U = data.split_range(split)[0][users_U].long()
        self.begins_U = data.offsets[users_U]
        self.ends_U = self.begins_U + past_U
        windows_U = past_U.clamp(max=max_len)
        self.seen_U = seen_counts(past_U, max_len, filter_seen)
        # The longest first: what fits the memory then fits it to the end.
        self.order_U = torch.argsort(windows_U, descending=True, stable=True)
        by_user = torch.stack((windows_U, self.counts_U, self.seen_U))[:, self.order_U].cpu().numpy()
        self._windows: Ints = by_user[0]
        self._rows: Ints = np.concatenate(([0], by_user[1].cumsum()))
        self._cells: Ints = np.concatenate(([0], by_user[2].cumsum()))

    def __iter__(self) -> Iterator[UserBatch]:
        """All users, as many at a time as ROWS and CELLS allow, at least one."""
        first, total = 0, len(self.users_U)
        while first < total:
            fits = (np.searchsorted(sums, sums[first] + most, "right") - 1
                    for sums, most in ((self._rows, ROWS), (self._cells, CELLS)))  # fmt: skip
            last = max(first + 1, int(min(fits)))
            rows, cells = (int(sums[last] - sums[first]) for sums in (self._rows, self._cells))
            yield UserBatch(first, last, rows, cells)
            first = last

    def encode(self, encode: Encode, batch: UserBatch) -> Tensor:
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
        """What the model encodes; `length` is no longer than these users need."""
        begins_B, ends_B = self.begins_U[index_B], self.ends_U[index_B]
        return *last_events(self.data.items, self.data.times, begins_B, ends_B, length), self.t_now_U[index_B]

    def places(self, users_BE: Tensor, catalogue: Catalogue, batch: UserBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Which positives of the split these are, how many items are better than each, and how many tie; each [S]."""
        index_B = self.order_U[batch.first : batch.last]
        first_B = self.offsets_U[index_B]
        index_S, rows_S, _ = flatten_ranges(first_B, first_B + self.counts_U[index_B], batch.rows)
        positives_S = self.positives_S[index_S]
        if batch.cells == 0:
            return index_S, *places(users_BE, catalogue, rows_S, positives_S)
        ends_B = self.ends_U[index_B]
        places_T, rows_T, offsets_B = flatten_ranges(ends_B - self.seen_U[index_B], ends_B, batch.cells)
        stride = self.data.num_items + 1
        left_T = _thinned(rows_T * stride + self.data.items[places_T], rows_S * stride + positives_S) % stride
        return index_S, *places(users_BE, catalogue, rows_S, positives_S, left_T, offsets_B)


def rank_on_device(encode: Encode, catalogue: Catalogue, users: UserBatches, progress: bool = False) -> Places:
    """Places of all positives, users in rising order.

    progress: show a bar of the batches under way; the device may be a little behind.
    """
    device = users.users_U.device
    found_S = torch.empty((2, len(users.positives_S)), dtype=torch.int32, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    with tqdm(total=len(users.users_U), desc="evaluate", disable=not progress, leave=False) as bar:
        for batch in users:
            users_BE = users.encode(encode, batch)
            # Only noted here: to look at it would wait for the device.
            finite &= torch.isfinite(users_BE).all()
            index_S, better_S, ties_S = users.places(users_BE, catalogue, batch)
            found_S[0, index_S], found_S[1, index_S] = better_S, ties_S
            bar.update(batch.last - batch.first)
    better, ties = found_S.cpu().numpy().astype(np.int64)
    if not finite:
        raise ValueError(diverged("outputs"))
    return Places(better, ties, users.offsets_U.cpu().numpy())


def no_users(data: Sequences | Stream, split: str) -> str:
    """The message for a split without users."""
    return f"{data.path} has no user to evaluate in split {split!r}; prepare it with {data.protocol.alternative}"


def _thinned(keys_T: Tensor, positives_S: Tensor) -> Tensor:
    """The keys sorted, with 0 for a key that came before or is among `positives_S`, which is sorted and not empty."""
    keys_T = keys_T.sort().values
    near_T = torch.searchsorted(positives_S, keys_T).clamp(max=len(positives_S) - 1)
    drop_T = positives_S[near_T] == keys_T
    drop_T[1:] |= keys_T[1:] == keys_T[:-1]
    return keys_T.masked_fill(drop_T, 0)
