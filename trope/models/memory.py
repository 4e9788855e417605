"""`Memory`: histories encoded once, to be looked at from any moment and to be continued event by event.

    memory = model.remember(items_BL, times_BL, lengths_B)
    out_BME = model.look(memory, moments_M)      # what encode_last gives, for a year of moments at once
    memory.append(items_B, times_B)              # one new event of each history

`trope.models.remember` says what is kept and why that is exact.

Shape letters: B histories, L events, S settled events, G pending events, M moments, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.kernels.look import KeysValues
from trope.models.kept import Events, Numbers, Store
from trope.models.look_context import Pending, Speeds
from trope.models.remember import blocks_of, look, remember, settle, step
from trope.rotary import IndexRoPE, TORoPE, TRoPE
from trope.rotary.checks import check_time_dtype

if TYPE_CHECKING:
    from trope.models.recommender import SequentialRecommender

# Numbers in the largest intermediate tensor of a look; more moments are looked at in parts.
MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}


class Memory:
    """B histories of one model, with the keys and values of every layer. `SequentialRecommender.remember` makes it.

    A memory belongs to the weights it was made with: make it anew when they change. `append` changes the memory in
    place, so no other call may run at the same time.

    Args:
        model: in eval mode, with blocks that can remember.
        items_BL, times_BL, lengths_B: as in `SequentialRecommender.encode`; at least one event a history.
    """

    def __init__(self, model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
        _check(model, items_BL, times_BL, lengths_B)
        with torch.inference_mode():
            events = Events.copy_of(items_BL, times_BL, lengths_B)
            _check_lengths(events)
            store = Store(remember(model, items_BL, times_BL, lengths_B), model.config.model.max_len)
            speeds = Speeds([part for part in model.blocks.modules() if isinstance(part, TRoPE | TORoPE | IndexRoPE)])
        self._take(model, events, events.settled_counts(model.looks_later), store, speeds)

    def _take(
        self, model: SequentialRecommender, events: Events, settled_B: Numbers, store: Store, speeds: Speeds
    ) -> Self:
        self.model, self._events, self._settled_B, self._store, self._speeds = model, events, settled_B, store, speeds
        self._pending: Pending | None = None
        return self

    @classmethod
    def join(cls, memories: Sequence[Memory]) -> Memory:
        """One memory of all histories of several memories of one model, in their order; a copy."""
        if not memories or any(memory.model is not memories[0].model for memory in memories):
            raise ValueError("join takes one memory or more of the same model, got others; remember with one model")
        events = Events.join([memory._events for memory in memories])
        settled_B = np.concatenate([memory._settled_B for memory in memories])
        store = Store.join([memory._store for memory in memories])
        return cls.__new__(cls)._take(memories[0].model, events, settled_B, store, memories[0]._speeds)

    def __len__(self) -> int:
        """B."""
        return len(self._settled_B)

    @property
    def events(self) -> Events:
        """The histories, at most the last `max_len` events of each; read only."""
        return self._events

    @property
    def num_bytes(self) -> int:
        """Of the keys and values, which is nearly all that a memory takes."""
        return self._store.num_bytes

    def move_apart(self) -> None:
        """Keep keys and values in pages of their own.

        A service that replaces memories all day would else leave holes in the process's heap.
        """
        self._store.move_apart()

    def move_into(self, room: Memory) -> None:
        """Keep everything where another memory has it, which has as many bytes and is not to be used any more."""
        assert room.model is self.model
        self._store.move_into(room._store)
        if room._events.items_BL.shape == self._events.items_BL.shape:
            self._events = self._events.move_into(room._events)
        self._speeds, self._pending = room._speeds, None

    def look(self, moments: Tensor) -> Tensor:
        """See `SequentialRecommender.look`."""
        check_time_dtype(moments, "moments")
        if moments.dim() not in (1, 2) or (moments.dim() == 2 and len(moments) != len(self)):
            raise ValueError(
                f"moments must be [M], or [B, M] with a row for each of {len(self)} histories, got "
                f"{tuple(moments.shape)}"
            )
        _check_mode(self.model)
        with torch.inference_mode():
            moments_BM = moments.to(self._store.device, torch.int64).expand(len(self), -1)
            past, pending = self._parts()
            parts = moments_BM.split(self._moments_at_a_time(pending), dim=1)
            outs = [look(self.model, past, pending, part, self._speeds) for part in parts]
        with torch.inference_mode(False):
            return torch.cat(outs, dim=1)  # a copy, so that it is no tensor of inference mode and may meet weights

    def append(self, items_B: Tensor, times_B: Tensor) -> None:
        """Continue each history by one event, in place. `look` then gives what `encode_last` gives with that event.

        The pending events now look from the new event's time and are settled. With `model.predicts="next-moment"` they
        stay pending while the new event has their own time.

        A history of `max_len` events loses its oldest one. Every position of its window then moves, and what is left
        has seen the lost event, so the window is encoded anew: at full length an append costs what `remember` costs.

        items_B, times_B: int64, one item and one time (Unix seconds) for each history. As in `encode`, values are not
        checked; times should not fall.
        """
        check_time_dtype(times_B)
        if items_B.shape != (len(self),) or times_B.shape != (len(self),):
            raise ValueError(
                f"append takes one item and one time for each of {len(self)} histories, got shapes "
                f"{tuple(items_B.shape)} and {tuple(times_B.shape)}"
            )
        _check_mode(self.model)
        items, times = (x.detach().to("cpu", torch.int64).numpy() for x in (items_B, times_B))
        max_len = self.model.config.model.max_len
        is_full_B = self._events.lengths_B == max_len
        settles_B = ~is_full_B
        if self.model.looks_later:
            settles_B &= times > self._events.last_times()
        with torch.inference_mode():
            if settles_B.any():
                self._settle(settles_B, times)
            self._events, self._pending = self._events.append(items, times, max_len), None
            if is_full_B.any():
                self._encode_anew(is_full_B)

    def _parts(self) -> tuple[tuple[KeysValues, ...], Pending]:
        """Keys and values of the settled events, and the pending ones, which are formed once after each append."""
        if self._pending is None:
            self._pending = self._events.pending(self._settled_B, self._store.device)
        return self._store.first(int(self._settled_B.max())), self._pending

    def _moments_at_a_time(self, pending: Pending) -> int:
        model = self.model.config.model
        widest = max(model.heads * pending.key_times_BK.shape[1], 4 * model.heads * model.head_dim)
        most = MOST_NUMBERS.get(self._store.device.type, MOST_NUMBERS["cuda"])
        return max(1, most // (pending.items_BG.numel() * widest))

    def _settle(self, settles_B: npt.NDArray[np.bool_], times: Numbers) -> None:
        """Keep the pending events of some histories for good; the others' are computed too and not kept."""
        past, pending = self._parts()
        counts_B = np.where(settles_B, self._events.lengths_B - self._settled_B, 0)
        looking_from_B = torch.from_numpy(times).to(self._store.device)
        if pending.seen_BGK is None:  # one event in each, at the same place: the place behind the settled ones is free
            places = pending.key_times_BK.shape[1]
            self._store.make_room(places)
            step(self.model, self._store.first(places), pending, looking_from_B, self._speeds)
        else:
            new = settle(self.model, past, pending, looking_from_B, self._speeds)
            self._store.write(new, self._settled_B, counts_B)
        self._settled_B = self._settled_B + counts_B

    def _encode_anew(self, which_B: npt.NDArray[np.bool_]) -> None:
        """Remember the full windows of some histories from their events."""
        window = [x.to(self._store.device) for x in self._events.rows(which_B)]
        new = remember(self.model, *window)
        rows = torch.from_numpy(np.flatnonzero(which_B)).to(self._store.device)
        for kept, layer in zip(self._store.first(window[0].shape[1]), new, strict=True):
            kept.keys[rows], kept.values[rows] = layer
        self._settled_B = np.where(which_B, self._events.settled_counts(self.model.looks_later), self._settled_B)


def _check_mode(model: SequentialRecommender) -> None:
    if model.training:
        raise ValueError("a memory needs a model without dropout, got one in training mode; call model.eval()")


def _check(model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
    for block in blocks_of(model):
        if not block.can_remember:
            raise ValueError(block.refusal())
    _check_mode(model)
    check_time_dtype(times_BL)
    if items_BL.dim() != 2 or times_BL.shape != items_BL.shape or lengths_B.shape != items_BL.shape[:1]:
        raise ValueError(
            "remember takes items and times [B, L] and lengths [B], got shapes "
            f"{tuple(items_BL.shape)}, {tuple(times_BL.shape)} and {tuple(lengths_B.shape)}"
        )


def _check_lengths(events: Events) -> None:
    """On the host's copy: a GPU is not waited for once more."""
    lengths_B = events.lengths_B
    if not len(lengths_B) or not 1 <= lengths_B.min() <= lengths_B.max() <= events.items_BL.shape[1]:
        raise ValueError("remember needs a history, and from 1 to L events in each; leave empty histories out")
