"""Remember and look as functions of tensors: what each layer keeps of a history, and the output at any moment.

In `encode` event m looks from the time of event m + 1, and only the last event looks from t_now. With
`model.predicts="next-moment"` all events of the last time do. So a history has two parts:

- settled events. Their keys and values are the same for every moment, in every layer. `remember` keeps them.
- pending events, one or the last tied group. `look` computes them for each moment, against what was kept.

The functions have no state; `trope.models.memory.Memory` holds it.

Shape letters: B histories, L events, S settled events, G pending events, M moments, H heads, D head dim, E width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trope.kernels.look import KeysValues
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.context import Context, Stream
from trope.models.look_context import LookContext, Pending, Settled, Speeds
from trope.rotary import query_times

if TYPE_CHECKING:
    from trope.models.recommender import SequentialRecommender


def settled_counts(times_BL: Tensor, lengths_B: Tensor, looks_later: bool) -> Tensor:
    """How many events of each history no moment changes, [B]; the others are pending, at least one."""
    if not looks_later:
        return lengths_B - 1
    # As in `query_times`: an event looks from a later one's time once a time rises between them.
    places = torch.arange(1, times_BL.shape[1] + 1, device=times_BL.device)
    rises_BL = (times_BL.roll(-1, dims=1) > times_BL) & (places < lengths_B[:, None])
    return torch.where(rises_BL, places, 0).amax(dim=1)


def remember(
    model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor
) -> tuple[KeysValues, ...]:
    """Keys and values of each layer, [B, H, L, D]. Those of settled events are final, the others are not to be read."""
    B, L = items_BL.shape
    index_BL = torch.arange(L, device=items_BL.device).expand(B, L)
    looking_from_BL = query_times(times_BL, lengths_B, check_values=False, later=model.looks_later)
    x_TE = model.embed(items_BL, index_BL).flatten(0, 1)
    bounds = SequenceBounds.padded(lengths_B, L)
    context = Context(bounds, times_BL.flatten(), looking_from_BL.flatten(), index_BL.flatten(), like=x_TE)
    stream, kept = Stream(x_TE), []
    for block in model.blocks[:-1]:
        stream, layer = block.remember(stream, context)
        kept.append(layer)
    kept.append(model.blocks[-1].keys_values(stream, context))
    return _by_head(kept, context)


def look(
    model: SequentialRecommender,
    layers: tuple[KeysValues, ...],
    settled: Settled,
    pending: Pending,
    moments_BM: Tensor,
    speeds: Speeds,
) -> Tensor:
    """Unit vectors [B, M, E], float32: what `encode_last` gives for each history at each of its moments.

    layers: keys and values of the settled events in each layer, [B, H, S, D].
    """
    stream, start_TE, context = _enter(model, settled, pending, moments_BM, speeds)
    for block, past in zip(model.blocks, layers, strict=True):
        stream, _ = block.look(stream, context, past)
    B, M, G = context.shape
    start_TE, query_times_T = context.each_moment(start_TE), context.query_times_T
    if G > 1:  # the last pending event speaks for the history
        last_R = torch.arange(B * M, device=start_TE.device) * G + pending.counts_B.repeat_interleave(M) - 1
        stream = Stream(*(None if x is None else x[last_R] for x in stream))
        start_TE, query_times_T = start_TE[last_R], query_times_T[last_R]
    return model.normalise(model.finish(stream, start_TE, query_times_T)).unflatten(0, (B, M))


def settle(
    model: SequentialRecommender,
    layers: tuple[KeysValues, ...],
    settled: Settled,
    pending: Pending,
    times_B: Tensor,
    speeds: Speeds,
) -> tuple[KeysValues, ...]:
    """Keys and values of the pending events, [B, H, G, D], once the next event's time is known: from it they look."""
    stream, _, context = _enter(model, settled, pending, times_B[:, None], speeds)
    kept = []
    for block, past in zip(model.blocks[:-1], layers[:-1], strict=True):
        stream, layer = block.look(stream, context, past)
        kept.append(layer)
    kept.append(model.blocks[-1].keys_values(stream, context))
    return _by_head(kept, context)


def _by_head(layers: list[KeysValues], context: Context) -> tuple[KeysValues, ...]:
    """Flat tokens [T, H, D] as [B, H, L, D]; views, which may keep the queries beside them alive."""
    return tuple(KeysValues(*(context.padded(x).transpose(1, 2) for x in layer)) for layer in layers)


def _enter(
    model: SequentialRecommender, settled: Settled, pending: Pending, moments_BM: Tensor, speeds: Speeds
) -> tuple[Stream, Tensor, LookContext]:
    """The stream of the pending events, once for all moments; what it began with; the context of all moments."""
    x_TE = model.embed(pending.items_BG, pending.index_BG).flatten(0, 1)
    return Stream(x_TE), x_TE, LookContext(settled, pending, moments_BM, x_TE, speeds)
