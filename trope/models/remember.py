"""Remember and look as functions of tensors: what each layer keeps of a history, and the output at any moment.

In `encode`, event m looks from the time of event m + 1, and only the last event looks from t_now. With
`model.predicts="next-moment"` all events of the last time do. So a history has two parts:

- settled events. Their keys and values are the same for every moment, in every layer. `remember` keeps them.
- pending events, one or the last tied group. `look` computes them for each moment, against what was kept.

The functions have no state; `trope.models.memory.Memory` holds it.

Shape letters: B histories, L events, S settled events, G pending events, M moments, H heads, D head dim, E width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from trope.kernels.look import KeysValues
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.block import Block
from trope.models.context import Context, Stream
from trope.models.look_context import LookContext, Pending, Speeds
from trope.rotary import query_times

if TYPE_CHECKING:
    from trope.models.recommender import SequentialRecommender

Layers = tuple[KeysValues, ...]
"""Keys and values of every layer, [B, H, S, D] each."""


def blocks_of(model: SequentialRecommender) -> list[Block]:
    """The model's blocks, with their type, which `nn.ModuleList` does not know."""
    return cast(list[Block], list(model.blocks))


def remember(model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> Layers:
    """Keys and values of all events. Those of settled events are final; the others are not to be read."""
    B, L = items_BL.shape
    index_BL = torch.arange(L, device=items_BL.device).expand(B, L)
    looking_from_BL = query_times(times_BL, lengths_B, check_values=False, later=model.looks_later)
    x_TE = model.embed(items_BL, index_BL).flatten(0, 1)
    bounds = SequenceBounds.padded(lengths_B, L)
    context = Context(bounds, times_BL.flatten(), looking_from_BL.flatten(), index_BL.flatten(), like=x_TE)
    *blocks, last = blocks_of(model)
    stream, kept = Stream(x_TE), []
    for block in blocks:
        stream, layer = block.remember(stream, context)
        kept.append(layer)
    kept.append(last.keys_values(stream, context))
    return tuple(KeysValues(*(x.view(B, L, *x.shape[1:]).transpose(1, 2) for x in layer)) for layer in kept)


def look(model: SequentialRecommender, past: Layers, pending: Pending, moments_BM: Tensor, speeds: Speeds) -> Tensor:
    """Unit vectors [B, M, E], float32: what `encode_last` gives for each history at each of its moments.

    past: of the settled events, in the order of `pending.key_times_BK`.
    """
    x_TE = model.embed(pending.items_BG, pending.index_BG).flatten(0, 1)
    context = LookContext(pending, moments_BM, x_TE, speeds)
    stream = Stream(x_TE)  # once for all moments: the first block tells them apart
    for block, layer in zip(blocks_of(model), past, strict=True):
        stream, _ = block.look(stream, context, layer)
    B, M, G = context.shape
    start_TE, looking_from_T = context.each_moment(x_TE), moments_BM.reshape(-1)
    if G > 1:  # the last pending event speaks for the history
        last_T = torch.arange(B * M, device=x_TE.device) * G + pending.counts_B.repeat_interleave(M) - 1
        stream = Stream(stream.x_TE[last_T], None if stream.delta_TE is None else stream.delta_TE[last_T])
        start_TE = start_TE[last_T]
    return model.normalise(model.finish(stream, start_TE, looking_from_T)).view(B, M, -1)


def settle(model: SequentialRecommender, past: Layers, pending: Pending, times_B: Tensor, speeds: Speeds) -> Layers:
    """Keys and values of the pending events, [B, H, G, D], when the next event's time is known: they look from it."""
    x_TE = model.embed(pending.items_BG, pending.index_BG).flatten(0, 1)
    context = LookContext(pending, times_B[:, None], x_TE, speeds)
    *blocks, last = blocks_of(model)
    stream, kept = Stream(x_TE), []
    for block, layer in zip(blocks, past[:-1], strict=True):
        stream, new = block.look(stream, context, layer)
        kept.append(new)
    kept.append(last.keys_values(stream, context))
    B, _, G = context.shape
    return tuple(KeysValues(*(x.view(B, G, *x.shape[1:]).transpose(1, 2) for x in new)) for new in kept)


def step(model: SequentialRecommender, kept: Layers, pending: Pending, times_B: Tensor, speeds: Speeds) -> None:
    """`settle` for one pending event of each history and as many settled ones in each: writes to the last of `kept`.

    kept: [B, H, S + 1, D], the settled events' keys and values, and a place for the pending one's.
    """
    x_TE = model.embed(pending.items_BG, pending.index_BG).flatten(0, 1)
    context = LookContext(pending, times_B[:, None], x_TE, speeds)
    *blocks, last = blocks_of(model)
    stream = Stream(x_TE)
    for block, layer in zip(blocks, kept[:-1], strict=True):
        stream = block.step(stream, context, layer)
    kept[-1].keys[:, :, -1], kept[-1].values[:, :, -1] = last.keys_values(stream, context)
