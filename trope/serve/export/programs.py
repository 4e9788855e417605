"""The programs of a model: tensors in, tensors out, any batch, length and number of moments.

    remember(table, items, times, lengths)                             -> kept
    look(table, kept, items, times, lengths[, pending], moments)       -> vectors
    encode(table, items, times, lengths, t_now)                        -> vectors     models that cannot remember

`table` is the item table, which lies beside the programs; no program holds it. `kept` has the keys and values of every
layer. A history is encoded by `remember` once and looked at from any moment. With `model.predicts="next-moment"` all
events of the last time look from the moment, so `look` also takes their places, `pending`.

Shape letters: B histories, L events, G pending events, M moments, E width, V items, Z = 2 N keys and values of N layers,
H heads, D head dim, K = L + G keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.models.context import Stream
from trope.models.hstu import LAST_BUCKET
from trope.kernels.look import KeysValues
from trope.models.look_context import Pending
from trope.models.recommender import SequentialRecommender
from trope.models.remember import blocks_of
from trope.rotary import query_times
from trope.serve.export.contexts import ProgramContext, ProgramLookContext, bucket_edges
from trope.serve.export.frozen import Turning, rotaries_of

# Upper ends of dynamic dims: above any use, and small enough that products of three stay whole numbers of 64 bits.
MOST = {"B": 1 << 20, "M": 1 << 20, "V": 1 << 31}


class Program(nn.Module):
    """What the programs share. model: frozen (`trope.serve.export.frozen.freeze`).

    inputs: names and dims of the inputs, in order; a number is a dim that never changes. outputs: likewise.
    """

    inputs: ClassVar[dict[str, tuple[str | int, ...]]]
    outputs: ClassVar[dict[str, tuple[str | int, ...]]]

    def __init__(self, model: SequentialRecommender) -> None:
        super().__init__()
        self.blocks, self.norm, self.readout, self.positions = model.blocks, model.norm, model.readout, model.positions
        self.scale, self.looks_later = model.items.scale, model.looks_later
        has_time = any(name.endswith("bias.time") for name, _ in model.blocks.named_parameters())
        self.register_buffer("edges", bucket_edges(LAST_BUCKET) if has_time else None)

    def embed(self, table_VE: Tensor, items: Tensor, index: Tensor) -> Tensor:
        """`SequentialRecommender.embed` with the table given."""
        x = F.embedding(items, table_VE) * self.scale
        return x if self.positions is None else x + F.embedding(index, self.positions.weight)

    # The model's own code behind the last block; it reads `norm` and `readout`.
    finish = SequentialRecommender.finish
    normalise = staticmethod(SequentialRecommender.normalise)


class Remember(Program):
    """Keys and values of all events, [Z, B, H, L, D]."""

    def forward(self, table: Tensor, items: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        B, L = items.shape
        index_BL = torch.arange(L, device=items.device).expand(B, L)
        looking_from_BL = query_times(times, lengths, check_values=False, later=self.looks_later)
        x_TE = self.embed(table, items, index_BL).flatten(0, 1)
        context = ProgramContext(lengths, times, looking_from_BL, index_BL, x_TE, self.edges)
        *blocks, last = self.blocks
        stream, kept = Stream(x_TE), []
        for block in blocks:
            stream, layer = block.remember(stream, context)
            kept.extend(layer)
        kept.extend(last.keys_values(stream, context))
        return torch.stack(kept).unflatten(1, (B, L)).transpose(2, 3).contiguous()


class Encode(Program):
    """Unit vectors of each history's last event at its moment, [B, E]."""

    def forward(self, table: Tensor, items: Tensor, times: Tensor, lengths: Tensor, t_now: Tensor) -> Tensor:
        B, L = items.shape
        index_BL = torch.arange(L, device=items.device).expand(B, L)
        looking_from_BL = query_times(times, lengths, t_now, check_values=False, later=self.looks_later)
        x_TE = self.embed(table, items, index_BL).flatten(0, 1)
        context = ProgramContext(lengths, times, looking_from_BL, index_BL, x_TE, self.edges)
        stream = Stream(x_TE)
        for block in self.blocks:
            stream = block(stream, context)
        last_B = torch.arange(B, device=items.device) * L + lengths - 1
        stream = Stream(stream.x_TE[last_B], None if stream.delta_TE is None else stream.delta_TE[last_B])
        return self.normalise(self.finish(stream, x_TE[last_B], t_now))


class Look(Program):
    """Unit vectors of remembered histories at their moments, [B, M, E]."""

    def __init__(self, model: SequentialRecommender) -> None:
        super().__init__(model)
        rotaries = rotaries_of(model)
        self.turning = Turning(rotaries) if rotaries else None

    def forward(
        self, table: Tensor, kept: Tensor, items: Tensor, times: Tensor, lengths: Tensor, pending: Tensor,
        moments: Tensor,
    ) -> Tensor:  # fmt: skip
        (B, M), G, L = moments.shape, pending.shape[1], items.shape[1]
        settled_B = pending[:, 0]
        counts_B = lengths - settled_B
        items_BG, times_BG = items.gather(1, pending), times.gather(1, pending)
        places, group = torch.arange(L, device=items.device), torch.arange(G, device=items.device)
        seen_BGK = torch.cat(
            (
                (places < settled_B[:, None])[:, None].expand(B, G, L),
                (group <= group[:, None])[None].expand(B, G, G),
            ),
            dim=2,
        )
        key_index_BK = torch.cat((places.expand(B, L), pending), dim=1)
        key_times_BK = torch.cat((times, times_BG), dim=1)
        distances_BGK = key_index_BK[:, None] - pending[:, :, None]
        events = Pending(items_BG, times_BG, pending, counts_B, key_times_BK, distances_BGK, seen_BGK)
        x_TE = self.embed(table, items_BG, pending).flatten(0, 1)
        context = ProgramLookContext(events, moments, x_TE, self.turning, self.edges)
        stream = Stream(x_TE)
        for number, block in enumerate(self.blocks):
            stream, _ = block.look(stream, context, KeysValues(kept[2 * number], kept[2 * number + 1]))
        start_TE = context.each_moment(x_TE)
        if G > 1:
            last_T = torch.arange(B * M, device=x_TE.device) * G + counts_B[:, None].expand(B, M).reshape(-1) - 1
            stream = Stream(stream.x_TE[last_T], None if stream.delta_TE is None else stream.delta_TE[last_T])
            start_TE = start_TE[last_T]
        out_TE = self.finish(stream, start_TE, moments.reshape(-1))
        return self.normalise(out_TE).view(B, M, -1)
