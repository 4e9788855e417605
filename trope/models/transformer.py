"""Transformer blocks: SASRec's, with softmax attention, and TiSASRec's, whose attention knows intervals of time.

Both take flat tokens and pad for attention alone.

Shape letters: B batch, L positions, T tokens, H heads, D head dim, E width, K intervals.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config, ModelConfig
from trope.kernels.look import KeysValues
from trope.models.block import Block, make_rotary, rotated
from trope.models.context import Context, Rotation, Stream
from trope.models.look_context import LookContext
from trope.models.softmax_attention import SoftmaxAttention

MOST_INTERVALS = 256  # TiSASRec clips intervals here, in both public implementations


class TransformerBlock(Block):
    """Attention and a pointwise feed-forward of the same width, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, config.width), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.width, config.width), nn.Dropout(config.dropout),
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)

    @classmethod
    def final_norm(cls, config: Config) -> nn.Module:
        return FinalNorm(config.model.width)

    def forward(self, stream: Stream, context: Context) -> Stream:
        x_TE = stream.sum()
        return self._behind(x_TE, self.attention(self.norm1(x_TE), context))

    def remember(self, stream: Stream, context: Context) -> tuple[Stream, KeysValues]:
        x_TE = stream.sum()
        attended_TE, kept = self._causal().remember(self.norm1(x_TE), context)
        return self._behind(x_TE, attended_TE), kept

    def look(self, stream: Stream, context: LookContext, past: KeysValues) -> tuple[Stream, KeysValues]:
        x_TE = stream.sum()
        attended_TE, own = self._causal().look(self.norm1(x_TE), context, past)
        return self._behind(context.each_moment(x_TE), attended_TE), own

    def keys_values(self, stream: Stream, context: Context | LookContext) -> KeysValues:
        return self._causal().keys_values(self.norm1(stream.sum()), context)

    def _behind(self, x_TE: Tensor, attended_TE: Tensor) -> Stream:
        """The residual stream from what attention was given, before its norm, and what it gave."""
        x_TE = x_TE + self.dropout(attended_TE)
        return Stream(x_TE + self.feed_forward(self.norm2(x_TE)))

    def _causal(self) -> CausalAttention:
        if not isinstance(self.attention, CausalAttention):
            raise ValueError(self.refusal())
        return self.attention


class FinalNorm(nn.LayerNorm):
    """The layer norm of a residual stream's sum."""

    def forward(self, stream: Stream) -> Tensor:  # type: ignore[override]
        return super().forward(stream.sum())


class SASRecBlock(TransformerBlock):
    """Causal softmax attention, rotated where the config has a rotary encoding."""

    can_remember: ClassVar[bool] = True

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        model = config.model
        rotaries = [make_rotary(config.rotary, model.head_dim, time_span) for _ in range(model.blocks)]
        return [cls(model, CausalAttention(model, rotary, number)) for number, rotary in enumerate(rotaries, start=1)]


class TiSASRecBlock(TransformerBlock):
    """Attention with intervals of time; its positions are inside the attention."""

    adds_positions: ClassVar[bool] = False

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        tables = IntervalTables(config.model)
        return [cls(config.model, IntervalAttention(config.model, tables)) for _ in range(config.model.blocks)]


class CausalAttention(SoftmaxAttention):
    """With biases; a rotary encoding is the same drop-in as anywhere else."""

    qkv: nn.Linear

    def __init__(self, config: ModelConfig, rotary: Rotation | None, number: int) -> None:
        qkv, out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        super().__init__(config.heads, config.dropout, rotary, number, qkv, out)

    def split(self, x_TE: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = context.padded(self.qkv(x_TE)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return *rotated(self.rotary, q, k, context), v

    def keys_values(self, x_TE: Tensor, context: Context | LookContext) -> KeysValues:
        width = x_TE.shape[-1]
        kv = F.linear(x_TE, self.qkv.weight[width:], self.qkv.bias[width:]).unflatten(1, (2, self.heads, -1))
        return KeysValues(context.rotated_keys(self.rotary, kv[:, 0]), kv[:, 1])


class IntervalTables(nn.Module):
    """TiSASRec's tables of relative intervals and absolute positions, for keys and for values, shared by its blocks."""

    def __init__(self, config: ModelConfig, most: int = MOST_INTERVALS) -> None:
        super().__init__()
        rows, positions = (most + 1, config.width), (config.max_len, config.width)
        self.interval_keys, self.interval_values = (nn.Parameter(torch.empty(rows).normal_(0, 0.02)) for _ in range(2))
        self.position_keys, self.position_values = (
            nn.Parameter(torch.empty(positions).normal_(0, 0.02)) for _ in range(2)
        )


class IntervalAttention(nn.Module):
    """TiSASRec: score q_i (k_j + r_ij + p_j) / sqrt(d), output the attention-weighted v_j + r_ij + p_j.

    r_ij has one row for each of the K + 1 intervals, so q r^T is formed once over these and picked by interval, and
    attention is summed by interval before it meets the values: the [B, L, L, E] tensor never exists.
    """

    def __init__(self, config: ModelConfig, tables: IntervalTables) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, nn.Dropout(config.dropout)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.tables = tables

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        q, k, v = context.padded(self.qkv(x_TE)).chunk(3, dim=-1)
        B, L, E = q.shape
        k, v = k + self.tables.position_keys[:L], v + self.tables.position_values[:L]
        q, k, v = (part.unflatten(-1, (self.heads, E // self.heads)).transpose(1, 2) for part in (q, k, v))
        r_keys, r_values = (
            table.view(table.shape[0], self.heads, -1).transpose(0, 1)
            for table in (self.tables.interval_keys, self.tables.interval_values)
        )  # [H, K + 1, D]
        intervals_BLL = context.intervals(r_keys.shape[1] - 1)
        index_BHLL = intervals_BLL[:, None].expand(B, self.heads, L, L)
        scores = q @ k.transpose(-1, -2) + (q @ r_keys.transpose(-1, -2)).gather(-1, index_BHLL)
        causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
        scores = (scores.float() / math.sqrt(E // self.heads)).masked_fill(~causal, -torch.inf)
        attention = self.dropout(scores.softmax(dim=-1)).to(v.dtype)
        by_interval = attention.new_zeros(B, self.heads, L, r_values.shape[1]).scatter_add(-1, index_BHLL, attention)
        y = attention @ v + by_interval @ r_values.to(v.dtype)
        return self.out(context.flat(y.transpose(1, 2).flatten(2)))
