"""`Memory`: histories encoded once, to be looked at from any moment and to be continued event by event.

    memory = model.remember(items_BL, times_BL, lengths_B)
    out_BME = model.look(memory, moments_M)      # what encode_last gives, for a year of moments at once
    memory.append(items_B, times_B)              # one new event of each history

`trope.models.remember` says what is kept and why that is exact.

Shape letters: B histories, L events, S settled events, G pending events, M moments, E width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from trope.models.kept import Events, Layers
from trope.models.look_context import Pending, Settled, Speeds
from trope.models.remember import look, remember, settle, settled_counts
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
        with _plain_tensors():
            events = Events.copy_of(items_BL, times_BL, lengths_B)
            settled_B = settled_counts(events.times_BL, events.lengths_B, model.looks_later)
            layers = Layers(remember(model, items_BL, times_BL, lengths_B), model.config.model.max_len)
        self._take(model, events, settled_B, layers, Speeds())

    def _take(
        self, model: SequentialRecommender, events: Events, settled_B: Tensor, layers: Layers, speeds: Speeds
    ) -> Self:
        self.model, self._events, self._settled_B, self._layers, self._speeds = model, events, settled_B, layers, speeds
        self._inputs: tuple[Settled, Pending] | None = None
        return self

    @classmethod
    def join(cls, memories: Sequence[Memory]) -> Memory:
        """One memory of all histories of several memories of one model, in their order; a copy."""
        if not memories or any(memory.model is not memories[0].model for memory in memories):
            raise ValueError("join takes one memory or more of the same model, got others; remember with one model")
        with _plain_tensors():
            settled_B = torch.cat([memory._settled_B for memory in memories])
            layers = Layers.join([memory._layers for memory in memories], int(settled_B.max()))
            events = Events.join([memory._events for memory in memories])
        return cls.__new__(cls)._take(memories[0].model, events, settled_B, layers, memories[0]._speeds)

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
        return self._layers.num_bytes

    def look(self, moments: Tensor) -> Tensor:
        """See `SequentialRecommender.look`."""
        check_time_dtype(moments, "moments")
        if moments.dim() not in (1, 2) or (moments.dim() == 2 and len(moments) != len(self)):
            raise ValueError(
                f"moments must be [M], or [B, M] with a row for each of {len(self)} histories, got "
                f"{tuple(moments.shape)}"
            )
        _check_mode(self.model)
        with _plain_tensors():
            moments_BM = moments.to(self._layers.device, torch.int64).expand(len(self), -1)
            settled, pending = self._parts()
            past = self._layers.first(settled.times_BS.shape[1])
            parts = moments_BM.split(self._moments_at_a_time(settled, pending), dim=1)
            outs = [look(self.model, past, settled, pending, part, self._speeds) for part in parts]
            return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

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
        max_len = self.model.config.model.max_len
        with _plain_tensors():
            items_B, times_B = (x.detach().to("cpu", torch.int64) for x in (items_B, times_B))
            is_full_B = self._events.lengths_B == max_len
            settles_B = ~is_full_B
            if self.model.looks_later:
                settles_B &= times_B > self._events.last_times()
            if settles_B.any():
                self._settle(settles_B, times_B)
            self._events = self._events.append(items_B, times_B, max_len)
            self._inputs = None
            if is_full_B.any():
                self._encode_anew(is_full_B)

    def _parts(self) -> tuple[Settled, Pending]:
        """Where settled events stand, and the pending ones, on the model's device; formed once after each append."""
        if self._inputs is None:
            items_BL, times_BL, lengths_B = self._events
            counts_B, S = lengths_B - self._settled_B, int(self._settled_B.max())
            group = torch.arange(int(counts_B.max()))
            index_BG = torch.minimum(self._settled_B[:, None] + group, lengths_B[:, None] - 1)
            items_BG = items_BL.gather(1, index_BG)
            if len(group) > 1:
                items_BG.masked_fill_(group >= counts_B[:, None], 0)
            on_host = times_BL[:, :S], self._settled_B, items_BG, times_BL.gather(1, index_BG), index_BG, counts_B
            times_BS, settled_B, *pending = (x.to(self._layers.device) for x in on_host)
            has_padding = int(self._settled_B.min()) < S
            self._inputs = Settled(times_BS, settled_B, has_padding), Pending(*pending)
        return self._inputs

    def _moments_at_a_time(self, settled: Settled, pending: Pending) -> int:
        model = self.model.config.model
        widest = max(model.heads * settled.times_BS.shape[1], 4 * model.heads * model.head_dim)
        most = MOST_NUMBERS.get(self._layers.device.type, MOST_NUMBERS["cuda"])
        return max(1, most // (pending.items_BG.numel() * widest))

    def _settle(self, settles_B: Tensor, times_B: Tensor) -> None:
        """Keep the pending events of some histories for good; the others' are computed too and not kept."""
        settled, pending = self._parts()
        past, times_B = self._layers.first(settled.times_BS.shape[1]), times_B.to(self._layers.device)
        new = settle(self.model, past, settled, pending, times_B, self._speeds)
        counts_B = torch.where(settles_B, self._events.lengths_B - self._settled_B, 0)
        self._layers.write(new, self._settled_B, counts_B)
        self._settled_B = self._settled_B + counts_B

    def _encode_anew(self, which_B: Tensor) -> None:
        """Remember the windows of some histories from their events, all of one length."""
        events = Events(*(x[which_B] for x in self._events))
        new = remember(self.model, *(x.to(self._layers.device) for x in events))
        counts_B = torch.zeros_like(self._settled_B).masked_scatter(which_B, events.lengths_B)
        if not which_B.all():  # rows of the whole batch
            new = tuple(type(layer)(*(_rows(x, which_B) for x in layer)) for layer in new)
        self._layers.write(new, torch.zeros_like(counts_B), counts_B)
        anew = settled_counts(events.times_BL, events.lengths_B, self.model.looks_later)
        self._settled_B = self._settled_B.masked_scatter(which_B, anew)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """No gradients; tensors that later calls may write to, also where the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _rows(x: Tensor, which_B: Tensor) -> Tensor:
    """x as some rows of a batch that is zero elsewhere."""
    whole = x.new_zeros(len(which_B), *x.shape[1:])
    whole[which_B.to(x.device)] = x
    return whole


def _check_mode(model: SequentialRecommender) -> None:
    if model.training:
        raise ValueError("a memory needs a model without dropout, got one in training mode; call model.eval()")


def _check(model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
    for block in model.blocks:
        if not block.can_remember:
            raise ValueError(block.refusal())
    _check_mode(model)
    check_time_dtype(times_BL)
    if items_BL.dim() != 2 or times_BL.shape != items_BL.shape or lengths_B.shape != items_BL.shape[:1]:
        raise ValueError(
            "remember takes items and times [B, L] and lengths [B], got shapes "
            f"{tuple(items_BL.shape)}, {tuple(times_BL.shape)} and {tuple(lengths_B.shape)}"
        )
    if not len(lengths_B) or not 1 <= int(lengths_B.min()) <= int(lengths_B.max()) <= items_BL.shape[1]:
        raise ValueError("remember needs a history, and from 1 to L events in each; leave empty histories out")
