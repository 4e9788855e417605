"""`Memory`: histories encoded once, to be looked at from any moment and to be continued event by event.

    memory = model.remember(items_BL, times_BL, lengths_B)
    out_BME = model.look(memory, moments_M)      # what encode_last gives, for a year of moments at once
    memory.append(items_B, times_B)              # one new event of each history

`trope.models.remember` says what is kept and why that is exact.

Shape letters: B histories, L events, S settled events, G pending events, M moments, H heads, D head dim, E width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trope.kernels.look import KeysValues
from trope.models.look_context import Pending, Settled
from trope.models.remember import look, remember, settle, settled_counts
from trope.rotary.checks import check_time_dtype

if TYPE_CHECKING:
    from trope.models.recommender import SequentialRecommender

# Numbers of one intermediate tensor of `look`; more moments are looked at in parts.
MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}
SPARE = 16  # events a memory can take before its tensors grow by a quarter


class Events(NamedTuple):
    """Histories in host memory, right-padded: padded items are 0, and padded times the row's last time."""

    items_BL: Tensor
    times_BL: Tensor
    lengths_B: Tensor


class Memory:
    """B histories of one model, with the keys and values of every layer. Made by `SequentialRecommender.remember`.

    A memory belongs to the weights it was made with: make it anew when they change. Calls must not overlap while one of
    them is `append`, which changes the memory in place.

    Args:
        model: in eval mode, with blocks that can remember.
        items_BL, times_BL, lengths_B: as in `SequentialRecommender.encode`; at least one event a history.
    """

    def __init__(self, model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
        _check(model, items_BL, times_BL, lengths_B)
        self.model = model
        with _plain_tensors():
            # What decides the next step is read on the host; a GPU is not waited for each time.
            self._events = Events(*(x.detach().to("cpu", torch.int64, copy=True) for x in (items_BL, times_BL, lengths_B)))
            self._settled_B = settled_counts(self._events.times_BL, self._events.lengths_B, model.looks_later)
            self._layers = remember(model, items_BL, times_BL, lengths_B)
            self._parts: tuple[Settled, Pending] | None = None

    def __len__(self) -> int:
        """B."""
        return len(self._settled_B)

    @property
    def events(self) -> Events:
        """The histories, at most the model's `max_len` last events of each; not to be changed."""
        return self._events

    @property
    def num_bytes(self) -> int:
        """Of the keys and values, which is nearly all that a memory takes."""
        return sum(x.numel() * x.element_size() for layer in self._layers for x in layer)

    def look(self, moments: Tensor) -> Tensor:
        """See `SequentialRecommender.look`."""
        check_time_dtype(moments, "moments")
        if moments.dim() not in (1, 2) or (moments.dim() == 2 and len(moments) != len(self)):
            raise ValueError(
                f"moments must be [M], or [B, M] with a row for each of {len(self)} histories, got {tuple(moments.shape)}"
            )
        self._check_mode()
        moments_BM = moments.to(self._device, torch.int64).expand(len(self), -1)
        with _plain_tensors():
            settled, pending = self._inputs()
            layers = self._past(settled.times_BS.shape[1])
            parts = moments_BM.split(self._moments_at_a_time(settled, pending), dim=1)
            return torch.cat([look(self.model, layers, settled, pending, part) for part in parts], dim=1)

    def append(self, items_B: Tensor, times_B: Tensor) -> None:
        """Continue each history by one event, in place; `look` then gives what `encode_last` gives with that event.

        The events that were pending now look from the new event's time and are settled. With
        `model.predicts="next-moment"` they stay pending while the new event has their own time.

        A history of `max_len` events loses its oldest one. Every position of the window then moves, and all that is
        left had seen that event, so the window is encoded anew: at full length an append costs what `remember` costs.

        items_B, times_B: int64, one item and one time (Unix seconds) for each history.
        """
        check_time_dtype(times_B)
        if items_B.shape != (len(self),) or times_B.shape != (len(self),):
            raise ValueError(
                f"append takes one item and one time for each of {len(self)} histories, got shapes "
                f"{tuple(items_B.shape)} and {tuple(times_B.shape)}"
            )
        self._check_mode()
        items_B, times_B = (x.detach().to("cpu", torch.int64) for x in (items_B, times_B))
        lengths_B, rows_B = self._events.lengths_B, torch.arange(len(self))
        is_full_B = lengths_B == self.model.config.model.max_len
        settles_B = ~is_full_B
        if self.model.looks_later:
            settles_B &= times_B > self._events.times_BL[rows_B, lengths_B - 1]
        with _plain_tensors():
            if settles_B.any():
                self._settle(settles_B, times_B)
            self._grow(min(int(lengths_B.max()) + 1, self.model.config.model.max_len))
            self._events = _appended(self._events, items_B, times_B, is_full_B)
            if is_full_B.any():
                self._encode_anew(is_full_B)
            self._parts = None

    @classmethod
    def join(cls, memories: Sequence[Memory]) -> Memory:
        """One memory of the histories of several, of the same model, in this order; a copy."""
        if not memories or any(memory.model is not memories[0].model for memory in memories):
            raise ValueError("join takes one memory or more of the same model; remember the histories with one model")
        joined = cls.__new__(cls)
        joined.model, joined._parts = memories[0].model, None
        most, stored = (max(int(m._settled_B.max()) for m in memories), max(m._capacity for m in memories))
        with _plain_tensors():
            wide = [_padded(memory._events, stored) for memory in memories]
            joined._events = Events(*(torch.cat(parts) for parts in zip(*wide, strict=True)))
            joined._settled_B = torch.cat([memory._settled_B for memory in memories])
            joined._layers = tuple(
                KeysValues(*(torch.cat([_wide(x, most) for x in parts]) for parts in zip(*layers, strict=True)))
                for layers in zip(*(memory._layers for memory in memories), strict=True)
            )
        return joined

    @property
    def _device(self) -> torch.device:
        return self._layers[0].keys.device

    @property
    def _capacity(self) -> int:
        return self._events.items_BL.shape[1]

    def _check_mode(self) -> None:
        if self.model.training:
            raise ValueError("the model is in training mode, whose dropout no two calls share; call model.eval()")

    def _past(self, S: int) -> tuple[KeysValues, ...]:
        return tuple(KeysValues(*(x[:, :, :S] for x in layer)) for layer in self._layers)

    def _inputs(self) -> tuple[Settled, Pending]:
        """Where the settled events stand, and the pending ones, on the model's device; kept until the next append."""
        if self._parts is None:
            items_BL, times_BL, lengths_B = self._events
            counts_B = lengths_B - self._settled_B
            group = torch.arange(int(counts_B.max()))
            index_BG = torch.minimum(self._settled_B[:, None] + group, lengths_B[:, None] - 1)
            items_BG = items_BL.gather(1, index_BG).masked_fill(group >= counts_B[:, None], 0)
            host = (times_BL[:, : int(self._settled_B.max())], self._settled_B, items_BG, times_BL.gather(1, index_BG))
            times_BS, settled_B, items_BG, times_BG, index_BG, counts_B = (
                x.to(self._device) for x in (*host, index_BG, counts_B)
            )
            self._parts = Settled(times_BS, settled_B), Pending(items_BG, times_BG, index_BG, counts_B)
        return self._parts

    def _moments_at_a_time(self, settled: Settled, pending: Pending) -> int:
        heads, S = self._layers[0].keys.shape[1], settled.times_BS.shape[1]
        widest = max(heads * S, 4 * self.model.config.model.width)
        return max(1, MOST_NUMBERS.get(self._device.type, 1 << 26) // (pending.items_BG.numel() * widest))

    def _settle(self, settles_B: Tensor, times_B: Tensor) -> None:
        """Compute the pending events of some histories for good; the others' are computed too and left out."""
        settled, pending = self._inputs()
        layers = self._past(settled.times_BS.shape[1])
        kept = settle(self.model, layers, settled, pending, times_B.to(self._device))
        is_new_BG = settles_B[:, None] & (torch.arange(pending.items_BG.shape[1]) < self._pending_B[:, None])
        rows_N, group_N = torch.nonzero(is_new_BG, as_tuple=True)
        places_N = (self._settled_B[rows_N] + group_N).to(self._device)
        rows_N, group_N = rows_N.to(self._device), group_N.to(self._device)
        self._grow(int(self._events.lengths_B.max()))
        for layer, new in zip(self._layers, kept, strict=True):
            for stored_BHSD, new_BHGD in zip(layer, new, strict=True):
                stored_BHSD[rows_N, :, places_N] = new_BHGD[rows_N, :, group_N].to(stored_BHSD.dtype)
        self._settled_B = torch.where(settles_B, self._events.lengths_B, self._settled_B)

    @property
    def _pending_B(self) -> Tensor:
        return self._events.lengths_B - self._settled_B

    def _grow(self, length: int) -> None:
        """Make room for histories of this length, and a quarter more than that, up to `max_len`."""
        most = self.model.config.model.max_len
        wanted = min(most, length + max(SPARE, length // 4))
        if self._capacity < length:
            self._events = _padded(self._events, wanted)
        if self._layers[0].keys.shape[2] < length:
            self._layers = tuple(KeysValues(*(_wide(x, wanted) for x in layer)) for layer in self._layers)

    def _encode_anew(self, which_B: Tensor) -> None:
        """Remember the windows of some histories from their events."""
        rows = torch.nonzero(which_B).flatten()
        items_BL, times_BL, lengths_B = (x[rows] for x in self._events)
        self._settled_B[rows] = settled_counts(times_BL, lengths_B, self.model.looks_later)
        L = int(lengths_B.max())
        window = (x.to(self._device) for x in (items_BL[:, :L], times_BL[:, :L], lengths_B))
        kept = remember(self.model, *window)
        self._grow(L)
        for layer, new in zip(self._layers, kept, strict=True):
            for stored_BHSD, new_BHLD in zip(layer, new, strict=True):
                stored_BHSD[rows.to(self._device), :, :L] = new_BHLD.to(stored_BHSD.dtype)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without gradients, and with tensors that later calls may write to, also where the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _check(model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
    for block in model.blocks:
        if not block.can_remember:
            raise ValueError(block.refusal())
    if model.training:
        raise ValueError("remember needs a model without dropout, got one in training mode; call model.eval()")
    check_time_dtype(times_BL)
    if items_BL.dim() != 2 or times_BL.shape != items_BL.shape or lengths_B.shape != items_BL.shape[:1]:
        raise ValueError(
            "remember takes items and times [B, L] and lengths [B], got "
            f"{tuple(items_BL.shape)}, {tuple(times_BL.shape)} and {tuple(lengths_B.shape)}"
        )
    if not len(lengths_B) or not 1 <= int(lengths_B.min()) <= int(lengths_B.max()) <= items_BL.shape[1]:
        raise ValueError("remember needs a history, and in each between 1 and L events; leave empty histories out")


def _appended(events: Events, items_B: Tensor, times_B: Tensor, is_full_B: Tensor) -> Events:
    """One event more in each row; full rows lose their first."""
    items_BL, times_BL, lengths_B = events
    if is_full_B.any():
        items_BL, times_BL = items_BL.clone(), times_BL.clone()
        for x_BL in (items_BL, times_BL):
            x_BL[is_full_B] = x_BL[is_full_B].roll(-1, dims=1)
    places_B = lengths_B - is_full_B.long()
    rows_B = torch.arange(len(lengths_B))
    items_BL[rows_B, places_B], times_BL[rows_B, places_B] = items_B, times_B
    return Events(items_BL, times_BL, places_B + 1)


def _padded(events: Events, length: int) -> Events:
    more = length - events.items_BL.shape[1]
    items_BL = torch.nn.functional.pad(events.items_BL, (0, more))
    return Events(items_BL, torch.cat((events.times_BL, events.times_BL[:, -1:].expand(-1, more)), dim=1), events[2])


def _wide(x_BHSD: Tensor, length: int) -> Tensor:
    """x with `length` places; new places are zero."""
    wide = x_BHSD.new_zeros(*x_BHSD.shape[:2], length, x_BHSD.shape[3])
    kept = min(length, x_BHSD.shape[2])
    wide[:, :, :kept] = x_BHSD[:, :, :kept]
    return wide
