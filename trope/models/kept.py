"""What a `Memory` keeps: the events of its histories on the host, and keys and values on the model's device.

Shape letters: B histories, L events, S settled events, G pending events, K = S + G, H heads, D head dim, Z = 2 N keys
and values of N layers.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.kernels.look import KeysValues
from trope.models.look_context import Pending
from trope.models.remember import Layers

SPARE = 16
"""Places, or a quarter of those in use if that is more, that a store gets beyond what it needs."""
_PAGES = 1 << 15
Numbers = npt.NDArray[np.int64]


class Events(NamedTuple):
    """Histories in host memory, right-padded: what the next step is depends on them, and no GPU is waited for."""

    items_BL: Numbers
    times_BL: Numbers  # Unix seconds
    lengths_B: Numbers

    @classmethod
    def copy_of(cls, *history: Tensor) -> Self:
        """Items, times and lengths as they are now."""
        return cls(*(x.detach().to("cpu", torch.int64, copy=True).numpy() for x in history))

    @classmethod
    def join(cls, parts: Sequence[Events]) -> Self:
        """All histories of several."""
        widths = {part.items_BL.shape[1] for part in parts}
        if len(widths) == 1:
            items_BL, times_BL = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
        else:
            L = max(widths)
            items_BL, times_BL = (np.concatenate([_widened(part[side], L) for part in parts]) for side in (0, 1))
        return cls(items_BL, times_BL, np.concatenate([part.lengths_B for part in parts]))

    def move_into(self, other: Events) -> Events:
        """The same events in the arrays of others of the same size, which are not to be used any more."""
        for mine, room in zip(self, other, strict=True):
            room[:] = mine
        return other

    def rows(self, which_B: npt.NDArray[np.bool_]) -> tuple[Tensor, ...]:
        """Some histories, as tensors."""
        return tuple(torch.from_numpy(x[which_B]) for x in self)

    def last_times(self) -> Numbers:
        """Of each history's last event, [B]."""
        return self.times_BL[np.arange(len(self.lengths_B)), self.lengths_B - 1]

    def append(self, items_B: Numbers, times_B: Numbers, max_len: int) -> Self:
        """One event more in each history; those of `max_len` events lose their first. Changes the arrays in place."""
        is_full_B = self.lengths_B == max_len
        places_B = self.lengths_B - is_full_B
        longest = int(places_B.max()) + 1
        width = self.items_BL.shape[1] if longest <= self.items_BL.shape[1] else min(max_len, room_for(longest))
        items_BL, times_BL = _widened(self.items_BL, width), _widened(self.times_BL, width)
        rows_B = np.arange(len(places_B))
        for x_BL, new_B in ((items_BL, items_B), (times_BL, times_B)):
            if is_full_B.any():
                x_BL[is_full_B] = np.roll(x_BL[is_full_B], -1, axis=1)
            x_BL[rows_B, places_B] = new_B
        return type(self)(items_BL, times_BL, places_B + 1)

    def settled_counts(self, looks_later: bool) -> Numbers:
        """How many events of each history no moment changes, [B]; the others are pending, at least one.

        looks_later: as in `SequentialRecommender`.
        """
        if not looks_later:
            return self.lengths_B - 1
        # As in `query_times`: an event looks from a later one's time once a time rises between them.
        places = np.arange(1, self.times_BL.shape[1])
        rises_BL = (self.times_BL[:, 1:] > self.times_BL[:, :-1]) & (places < self.lengths_B[:, None])
        return np.where(rises_BL, places, 0).max(axis=1, initial=0)

    def pending(self, settled_B: Numbers, device: torch.device) -> Pending:
        """The events behind the settled ones, with where their keys stand."""
        S, counts_B = int(settled_B.max()), self.lengths_B - settled_B
        if int(counts_B.max()) == 1 and int(settled_B.min()) == S:
            return self._last(S, device)
        group, places = np.arange(int(counts_B.max())), np.arange(S)
        G = len(group)
        index_BG = np.minimum(settled_B[:, None] + group, self.lengths_B[:, None] - 1)
        rows_B1 = np.arange(len(settled_B))[:, None]
        items_BG, times_BG = self.items_BL[rows_B1, index_BG], self.times_BL[rows_B1, index_BG]
        seen_BGK = np.empty((len(settled_B), G, S + G), np.bool_)
        seen_BGK[:, :, :S] = (places < settled_B[:, None])[:, None]
        seen_BGK[:, :, S:] = group <= group[:, None]
        key_index_BK = np.concatenate((np.broadcast_to(places, (len(settled_B), S)), index_BG), axis=1)
        key_times_BK = np.concatenate((self.times_BL[:, :S], times_BG), axis=1)
        distances_BGK = key_index_BK[:, None] - index_BG[:, :, None]
        arrays = (items_BG, times_BG, index_BG, counts_B, key_times_BK, distances_BGK, seen_BGK)
        return Pending(*(torch.from_numpy(x).to(device) for x in arrays))

    def _last(self, S: int, device: torch.device) -> Pending:
        """`pending` where all histories have S settled events and one more: each sees all its keys."""
        B = len(self.lengths_B)
        times_BK = torch.from_numpy(self.times_BL[:, : S + 1].copy()).to(device)
        items_B1 = torch.from_numpy(self.items_BL[:, S : S + 1].copy()).to(device)
        index_B1 = torch.full((B, 1), S, device=device)
        distances_BGK = torch.arange(-S, 1, device=device).expand(B, 1, S + 1)
        return Pending(
            items_B1, times_BK[:, S:], index_B1, torch.ones_like(index_B1[:, 0]), times_BK, distances_BGK, None
        )


class Store:
    """Keys and values of every layer in one tensor [Z, B, H, S, D], with room for more events.

    layers: as computed; they are copied. most: places that will ever be needed.
    """

    def __init__(self, layers: Layers, most: int) -> None:
        self.most = most
        B, H, L, D = layers[0].keys.shape
        self._kept_ZBHSD = _zeros(layers[0].keys, 2 * len(layers), B, H, min(most, room_for(L)), D)
        for kept_BHSD, new_BHLD in zip(self._kept_ZBHSD, (x for layer in layers for x in layer), strict=True):
            kept_BHSD[:, :, :L] = new_BHLD

    @classmethod
    def join(cls, parts: Sequence[Store]) -> Store:
        """All histories of several."""
        joined = cls.__new__(cls)
        joined.most = parts[0].most
        kept = [part._kept_ZBHSD for part in parts]
        places = max(x.shape[3] for x in kept)
        with torch.inference_mode(False):
            joined._kept_ZBHSD = torch.cat([x if x.shape[3] == places else _with_places(x, places) for x in kept], 1)
        return joined

    @property
    def device(self) -> torch.device:
        """Where the tensor lies."""
        return self._kept_ZBHSD.device

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return self._kept_ZBHSD.numel() * self._kept_ZBHSD.element_size()

    def move_apart(self) -> None:
        """Keep the tensor in pages of its own, outside of the heap; on a CPU, and unless it is small."""
        kept = self._kept_ZBHSD
        if kept.device.type != "cpu" or self.num_bytes < _PAGES or sys.platform == "win32":
            return
        pages = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with torch.inference_mode(False):
            self._kept_ZBHSD = torch.frombuffer(pages, dtype=kept.dtype).view(kept.shape).copy_(kept)

    def move_into(self, other: Store) -> None:
        """Take the tensor of a store of the same size, which is not to be used any more."""
        assert other._kept_ZBHSD.shape == self._kept_ZBHSD.shape
        other._kept_ZBHSD.copy_(self._kept_ZBHSD)
        self._kept_ZBHSD = other._kept_ZBHSD

    def first(self, places: int) -> Layers:
        """Views of the first places."""
        kept = self._kept_ZBHSD[:, :, :, :places].unbind(0)
        return tuple(KeysValues(keys, values) for keys, values in zip(kept[::2], kept[1::2], strict=True))

    def make_room(self, places: int) -> None:
        """Have so many places at least."""
        if places > self._kept_ZBHSD.shape[3]:
            self._kept_ZBHSD = _with_places(self._kept_ZBHSD, min(self.most, room_for(places)))

    def write(self, new: Layers, starts_B: Numbers, counts_B: Numbers) -> None:
        """Put the first counts_B of new places [B, H, G, D] behind starts_B."""
        self.make_room(int((starts_B + counts_B).max()))
        new_ZBHGD = torch.stack([x for layer in new for x in layer])
        rows_N, group_N = np.nonzero(np.arange(int(counts_B.max())) < counts_B[:, None])
        arrays = rows_N, group_N, starts_B[rows_N] + group_N
        rows, group, places = (torch.from_numpy(x).to(self.device) for x in arrays)
        self._kept_ZBHSD[:, rows, :, places] = new_ZBHGD[:, rows, :, group]


def room_for(places: int) -> int:
    """Places to store where so many are in use; rounded up, so that stores come in few sizes."""
    return -(-(places + max(SPARE, places // 4)) // SPARE) * SPARE


def _widened(x_BL: Numbers, length: int) -> Numbers:
    """x itself, or a copy with so many columns; new ones are zero."""
    more = length - x_BL.shape[1]
    return np.pad(x_BL, ((0, 0), (0, more))) if more > 0 else x_BL


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros that may be written to later, outside of inference mode too."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _with_places(kept_ZBHSD: Tensor, places: int) -> Tensor:
    """A copy with so many places. New ones are zero: they are read, with weight 0, beside longer histories."""
    Z, B, H, S, D = kept_ZBHSD.shape
    wide = _zeros(kept_ZBHSD, Z, B, H, places, D)
    wide[:, :, :, :S] = kept_ZBHSD
    return wide
