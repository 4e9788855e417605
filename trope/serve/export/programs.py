"""The programs of a model: tensors in, tensors out, any batch, length and number of moments.

    encode(table, items, times, lengths, t_now)                     -> vectors, one for each history
    remember(table, items, times, lengths)                          -> kept
    look(table, kept, items, times, lengths, pending, moments)      -> vectors, one for each history and moment

`encode` answers one moment, for less than `remember` and `look` together. Models that cannot remember have no others.

table: the item table, which lies beside the programs; no program holds it.
items, times, lengths: right-padded histories, as in `SequentialRecommender.encode`. L is at least 2.
kept: keys and values of every layer.
pending: places of the events that look from the moment: the last one, or with `model.predicts="next-moment"` all events
    of the last time, right-padded with the last place.
moments, t_now: Unix seconds.
vectors: unit vectors; a score is the dot product with an item's unit vector.

Shape letters: B histories, L events, G pending events, M moments, E width, V items, H heads, D head dim, K = L + G
keys, Z = 2 N keys and values of N layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.kernels.look import KeysValues
from trope.models.block import Block
from trope.models.context import Stream
from trope.models.hstu import LAST_BUCKET
from trope.models.look_context import Pending
from trope.models.pulse.head import in_last_year
from trope.models.recommender import SequentialRecommender
from trope.models.transformer import TiSASRecBlock
from trope.rotary import query_times
from trope.serve.export.contexts import ProgramContext, ProgramLookContext, bucket_edges
from trope.serve.export.frozen import Turning, freeze, rotaries_of
from trope.serve.export.last_block import intervals_from_last, look_from_last, rows_of

INT, FLOAT = "int64", "float32"
# Upper ends of dims that only memory bounds: far beyond any use, and products of them still fit 64 bits.
_MOST = 1 << 20
_MOST_ROWS = 1 << 31
# Dims of the example that a program is traced with. All differ, and none is 1, which tracing takes for a constant.
_EXAMPLE = {"B": 3, "L": 5, "M": 4, "G": 2, "rows": 7}


class Value(NamedTuple):
    """An input or output of a program. shape: names of dims that may change, numbers for those that never do."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


class Program(nn.Module, ABC):
    """What the programs share. model: frozen (`trope.serve.export.frozen.freeze`)."""

    edges: Tensor | None

    def __init__(self, model: SequentialRecommender) -> None:
        super().__init__()
        self.config, self.width = model.config.model, model.items.width
        self.blocks, self.norm, self.readout, self.positions = model.blocks, model.norm, model.readout, model.positions
        self.scale, self.looks_later = model.whole_items.scale, model.looks_later
        pulse = model.pulse
        self.trained_until = model.time_span[1]
        self.year_after = int(pulse.get_buffer("age_unit")) if pulse is not None and pulse.knows_year else 0
        has_time = any(name.endswith("bias.time") for name, _ in model.blocks.named_parameters())
        self.register_buffer("edges", bucket_edges(LAST_BUCKET) if has_time else None)

    @property
    @abstractmethod
    def inputs(self) -> tuple[Value, ...]:
        """In the order of the arguments."""

    @property
    @abstractmethod
    def output(self) -> Value:
        """The one tensor that the program returns."""

    @property
    def history(self) -> tuple[Value, ...]:
        """The inputs that every program begins with, or has among its first."""
        return Value("items", INT, ("B", "L")), Value("times", INT, ("B", "L")), Value("lengths", INT, ("B",))

    @property
    def table(self) -> Value:
        """The item table as an input."""
        return Value("table", FLOAT, ("rows", self.width))

    @property
    def kept(self) -> Value:
        """What `remember` returns and `look` takes."""
        model = self.config
        return Value("kept", FLOAT, (2 * model.blocks, "B", model.heads, "L", model.head_dim))

    def example(self) -> tuple[Tensor, ...]:
        """Inputs to trace the program with; only their shapes matter."""
        sizes = {**_EXAMPLE, "L": min(_EXAMPLE["L"], self.config.max_len)}
        dtypes = {INT: torch.int64, FLOAT: torch.float32}
        return tuple(
            torch.zeros([sizes[dim] if isinstance(dim, str) else dim for dim in value.shape], dtype=dtypes[value.dtype])
            for value in self.inputs
        )

    def embed(self, table_VE: Tensor, items: Tensor, index: Tensor) -> Tensor:
        """`SequentialRecommender.embed` with the table given."""
        x = F.embedding(items, table_VE) * self.scale
        return x if self.positions is None else x + F.embedding(index, self.positions.weight)

    def finish(self, stream: Stream, x_TE: Tensor, looking_from_T: Tensor) -> Tensor:
        """Unit vectors behind the last block, [T, E]; arguments as in `SequentialRecommender.finish`."""
        model: Any = self  # it has the `norm` and the `readout` that the model's code reads
        return SequentialRecommender.normalise(SequentialRecommender.finish(model, stream, x_TE, looking_from_T))

    def _readout_times(self, query_times_T: Tensor) -> Tensor:
        """`SequentialRecommender.finish` asks for it: `Pulse.known_times`, without the pulse's counts."""
        return in_last_year(query_times_T, self.trained_until, self.year_after) if self.year_after else query_times_T

    @property
    def layers(self) -> list[Block]:
        """The blocks, with their type."""
        return cast(list[Block], list(self.blocks))


class Remember(Program):
    """Keys and values of all events, [Z, B, H, L, D]."""

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.table, *self.history

    @property
    def output(self) -> Value:
        return self.kept

    def forward(self, table: Tensor, items: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        B, L = items.shape
        index_BL = torch.arange(L, device=items.device).expand(B, L)
        looking_from_BL = query_times(times, lengths, check_values=False, later=self.looks_later)
        x_TE = self.embed(table, items, index_BL).flatten(0, 1)
        context = ProgramContext(lengths, times, looking_from_BL, index_BL, x_TE, self.edges)
        *blocks, last = self.layers
        stream = Stream(x_TE)
        kept: list[Tensor] = []
        for block in blocks:
            stream, layer = block.remember(stream, context)
            kept.extend(layer)
        kept.extend(last.keys_values(stream, context))
        return torch.stack(kept).unflatten(1, (B, L)).transpose(2, 3).contiguous()


class Encode(Program):
    """Unit vectors of each history's last event at its moment, [B, E]. The last block computes no other query."""

    def __init__(self, model: SequentialRecommender) -> None:
        super().__init__(model)
        self.turning = Turning(rotaries) if (rotaries := rotaries_of(model)) else None

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.table, *self.history, Value("t_now", INT, ("B",))

    @property
    def output(self) -> Value:
        return Value("vectors", FLOAT, ("B", self.width))

    def forward(self, table: Tensor, items: Tensor, times: Tensor, lengths: Tensor, t_now: Tensor) -> Tensor:
        B, L = items.shape
        index_BL = torch.arange(L, device=items.device).expand(B, L)
        looking_from_BL = query_times(times, lengths, t_now, check_values=False, later=self.looks_later)
        x_TE = self.embed(table, items, index_BL).flatten(0, 1)
        context = ProgramContext(lengths, times, looking_from_BL, index_BL, x_TE, self.edges)
        last_B = torch.arange(B, device=items.device) * L + lengths - 1
        *blocks, last = self.layers
        stream = Stream(x_TE)
        for block in blocks:
            stream = block(stream, context)
        if isinstance(last, TiSASRecBlock):
            stream = intervals_from_last(last, stream, last_B, context)
        else:
            pending = pending_events(items, times, lengths, (lengths - 1)[:, None])
            look = ProgramLookContext(pending, t_now[:, None], x_TE, self.turning, self.edges)
            stream = look_from_last(last, stream, last_B, context, look)
        return self.finish(stream, x_TE[last_B], t_now)


class Look(Program):
    """Unit vectors of remembered histories at their moments, [B, M, E]."""

    def __init__(self, model: SequentialRecommender) -> None:
        super().__init__(model)
        self.turning = Turning(rotaries) if (rotaries := rotaries_of(model)) else None

    @property
    def inputs(self) -> tuple[Value, ...]:
        pending = Value("pending", INT, ("B", "G" if self.looks_later else 1))
        return self.table, self.kept, *self.history, pending, Value("moments", INT, ("B", "M"))

    @property
    def output(self) -> Value:
        return Value("vectors", FLOAT, ("B", "M", self.width))

    def forward(
        self, table: Tensor, kept: Tensor, items: Tensor, times: Tensor, lengths: Tensor, pending: Tensor,
        moments: Tensor,
    ) -> Tensor:  # fmt: skip
        B, M, G = len(items), moments.shape[1], pending.shape[1]
        moments = moments.expand(B, M)  # tells the exporter that histories and moments have one B, also where M is 1
        events = pending_events(items, times, lengths, pending)
        x_TE = self.embed(table, events.items_BG, pending).flatten(0, 1)
        context = ProgramLookContext(events, moments, x_TE, self.turning, self.edges)
        stream = Stream(x_TE)
        for number, block in enumerate(self.layers):
            stream, _ = block.look(stream, context, KeysValues(kept[2 * number], kept[2 * number + 1]))
        start_TE = context.each_moment(x_TE)
        if self.looks_later:  # the last pending event speaks for the history
            counts_T = events.counts_B[:, None].expand(B, M).reshape(-1)
            last_T = torch.arange(B * M, device=x_TE.device) * G + counts_T - 1
            stream, start_TE = rows_of(stream, last_T), start_TE[last_T]
        return self.finish(stream, start_TE, moments.reshape(-1)).view(B, M, -1)


def pending_events(items: Tensor, times: Tensor, lengths: Tensor, pending: Tensor) -> Pending:
    """The events at the places `pending` [B, G] of right-padded histories; keys are all places, then these."""
    (B, L), G = items.shape, pending.shape[1]
    settled_B = pending[:, 0]
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
    return Pending(items_BG, times_BG, pending, lengths - settled_B, key_times_BK, distances_BGK, seen_BGK)


def programs_of(model: SequentialRecommender) -> dict[str, Program]:
    """The programs of a model, by name. The model stays as it is."""
    if model.config.model.max_len < 2:
        raise ValueError("an exported model needs model.max_len of at least 2, got 1; train one with longer histories")
    frozen = freeze(model)
    programs: dict[str, Program] = {"encode": Encode(frozen)}
    if model.can_remember:
        programs.update(remember=Remember(frozen), look=Look(frozen))
    return programs


def limits(max_len: int) -> dict[str, tuple[int, int]]:
    """Smallest and largest size of each dim that may change."""
    return {"B": (1, _MOST), "M": (1, _MOST), "L": (2, max_len), "G": (1, max_len), "rows": (2, _MOST_ROWS)}
