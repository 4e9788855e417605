"""What a `Memory` keeps: the events of its histories on the host, and keys and values on the model's device.

Shape letters: B histories, L events, S stored places, G new events, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.look import KeysValues

SPARE = 16
"""Places, or a quarter of those in use if that is more, which are added when a store is full."""


class Events(NamedTuple):
    """Histories in host memory, right-padded: what the next step is depends on them, and no GPU is waited for."""

    items_BL: Tensor  # int64
    times_BL: Tensor  # int64 Unix seconds
    lengths_B: Tensor

    @classmethod
    def copy_of(cls, *history: Tensor) -> Events:
        """Items, times and lengths as they are now."""
        return cls(*(x.detach().to("cpu", torch.int64, copy=True) for x in history))

    @classmethod
    def join(cls, parts: Sequence[Events]) -> Events:
        """All histories of several."""
        L = max(part.items_BL.shape[1] for part in parts)
        return cls(*(torch.cat(list(tensors)) for tensors in zip(*(part.with_room(L) for part in parts), strict=True)))

    def last_times(self) -> Tensor:
        """Of each history's last event, [B]."""
        return self.times_BL.gather(1, self.lengths_B[:, None] - 1)[:, 0]

    def with_room(self, length: int) -> Events:
        """The same with `length` places at least."""
        more = length - self.items_BL.shape[1]
        if more <= 0:
            return self
        return Events(F.pad(self.items_BL, (0, more)), F.pad(self.times_BL, (0, more)), self.lengths_B)

    def append(self, items_B: Tensor, times_B: Tensor, max_len: int) -> Events:
        """One event more in each history; those of `max_len` events lose their first. Changes the tensors in place."""
        places_B1 = self.lengths_B.clamp(max=max_len - 1)[:, None]
        longest = int(places_B1.max()) + 1
        kept = self if longest <= self.items_BL.shape[1] else self.with_room(min(max_len, room_for(longest)))
        is_full_B = self.lengths_B == max_len
        for x_BL, new_B in zip(kept[:2], (items_B, times_B), strict=True):
            if is_full_B.any():
                x_BL[is_full_B] = x_BL[is_full_B].roll(-1, dims=1)
            x_BL.scatter_(1, places_B1, new_B[:, None])
        return kept._replace(lengths_B=places_B1[:, 0] + 1)


class Layers:
    """Keys and values of every layer, [B, H, S, D] each, with room for more events.

    layers: as computed; they are copied. most: places that will ever be needed.
    """

    def __init__(self, layers: Sequence[KeysValues], most: int) -> None:
        self.most = most
        places = min(most, room_for(layers[0].keys.shape[2]))
        self._layers = [KeysValues(*(_widened(x, places) for x in layer)) for layer in layers]

    @classmethod
    def join(cls, parts: Sequence[Layers], used: int) -> Layers:
        """The first `used` places of all histories of several."""
        rows = zip(*(part.first(used) for part in parts), strict=True)  # of each layer, its keys and values in all parts
        joined = [KeysValues(*(torch.cat(_same_length(xs)) for xs in zip(*layers, strict=True))) for layers in rows]
        return cls(joined, parts[0].most)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._layers[0].keys.device

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(x.numel() * x.element_size() for layer in self._layers for x in layer)

    def first(self, places: int) -> tuple[KeysValues, ...]:
        """Views of the first places."""
        return tuple(KeysValues(layer.keys[:, :, :places], layer.values[:, :, :places]) for layer in self._layers)

    def write(self, new: Sequence[KeysValues], starts_B: Tensor, counts_B: Tensor) -> None:
        """Put the first counts_B of new places [B, H, G, D] behind starts_B, both on the host."""
        needed = int((starts_B + counts_B).max())
        if needed > self._layers[0].keys.shape[2]:
            places = min(self.most, room_for(needed))
            self._layers = [KeysValues(*(_widened(x, places) for x in layer)) for layer in self._layers]
        if len(starts_B) == 1:
            start, count = int(starts_B), int(counts_B)
            for layer, kept in zip(self._layers, new, strict=True):
                layer.keys[:, :, start : start + count] = kept.keys[:, :, :count]
                layer.values[:, :, start : start + count] = kept.values[:, :, :count]
            return
        rows_N, group_N = torch.nonzero(torch.arange(int(counts_B.max())) < counts_B[:, None], as_tuple=True)
        rows_N, group_N, places_N = (x.to(self.device) for x in (rows_N, group_N, starts_B[rows_N] + group_N))
        for layer, kept in zip(self._layers, new, strict=True):
            layer.keys[rows_N, :, places_N] = kept.keys[rows_N, :, group_N]
            layer.values[rows_N, :, places_N] = kept.values[rows_N, :, group_N]


def room_for(places: int) -> int:
    """Places to store where so many are in use."""
    return places + max(SPARE, places // 4)


def _widened(x_BHSD: Tensor, places: int) -> Tensor:
    """A copy with so many places, at least as many as there are; new places are zero."""
    B, H, S, D = x_BHSD.shape
    wide = x_BHSD.new_empty(B, H, places, D)
    wide[:, :, :S] = x_BHSD
    wide[:, :, S:] = 0  # they are read, with weight 0, beside longer histories
    return wide


def _same_length(parts: Sequence[Tensor]) -> list[Tensor]:
    """Each [B, H, S, D] with the places of the longest."""
    places = max(x.shape[2] for x in parts)
    return [x if x.shape[2] == places else _widened(x, places) for x in parts]
