"""The three blocks that the six models are made of: HSTU, and a Transformer block with plain or interval attention.

Every block is causal by construction and right-padding needs no mask: a valid position only looks at earlier ones, and
what padding computes is never read. `Context` holds what all blocks of a forward share, computed once.

Shape letters: B batch, L positions, H heads, D head dim, E width, K intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.bias import RelativeBias
from trope.config import Config, ModelConfig, RotaryConfig
from trope.rotary import IndexRoPE, TORoPE, TRoPE


@dataclass(frozen=True)
class Context:
    """When events happened and from when queries look; what is derived of that, if the model uses it."""

    times_BL: Tensor
    lengths_B: Tensor
    t_now_B: Tensor | None
    buckets_BLL: Tensor | None = None
    intervals_BLL: Tensor | None = None


def make_rotary(config: RotaryConfig, head_dim: int, time_span: tuple[int, int]) -> TRoPE | TORoPE | IndexRoPE | None:
    """The rotary encoding of one layer. Values are not checked again: the data were, when they were prepared."""
    if config.kind == "trope":
        return TRoPE(
            head_dim, time_span=time_span if config.conditioning == "span" and config.position == "times" else None,
            position=config.position, learnable=config.learnable, multiscale=config.multiscale, shifted=config.shifted,
            conjugate=config.conjugate, rotate_query=config.rotate_query, rotate_key=config.rotate_key,
            share_alpha=config.share_alpha, alpha_init=config.alpha_init, bank=config.bank,
            conditioning=config.conditioning, phase=config.phase, check_values=False,
        )  # fmt: skip
    if config.kind == "torope":
        return TORoPE(
            head_dim, fusion=config.fusion, time_share=config.time_share, unit=config.unit, learnable=config.learnable,
            check_values=False,
        )  # fmt: skip
    return IndexRoPE(head_dim) if config.kind == "index" else None


class HSTUBlock(nn.Module):
    """Hierarchical sequential transduction unit: SiLU attention without softmax, gated, no feed-forward.

    n, which divides the attention, is the constant `max_len`, as in Meta's public code: an output must not depend on
    how long the other sequences of a batch are.
    """

    def __init__(self, config: ModelConfig, rotary: nn.Module | None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.max_len = config.heads, config.head_dim, config.max_len
        inner = config.heads * config.head_dim
        self.uvqk = nn.Parameter(torch.empty(config.width, 4 * inner).normal_(0, 0.02))
        self.bias = RelativeBias(
            config.max_len, config.time_buckets, position=config.position_bias, time=config.time_bias
        )
        self.rotary = rotary
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(inner, config.width)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x_BLE: Tensor, context: Context) -> Tensor:
        B, L, E = x_BLE.shape
        normed = F.layer_norm(x_BLE, (E,), eps=1e-6)
        u, v, q, k = (
            part.view(B, L, self.heads, self.head_dim) for part in F.silu(normed @ self.uvqk).chunk(4, dim=-1)
        )
        if self.rotary is not None:  # q and k have been through SiLU when they are rotated
            q, k = self.rotary(q, k, context.times_BL, context.lengths_B, context.t_now_B)
        scores_BHLL = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        bias = self.bias(L, context.buckets_BLL)
        if bias is not None:
            scores_BHLL = scores_BHLL + (bias if bias.dim() == 2 else bias[:, None])
        causal = torch.ones(L, L, dtype=torch.bool, device=x_BLE.device).tril()
        attention = (F.silu(scores_BHLL) / self.max_len).masked_fill(~causal, 0.0)
        y_BLE = (attention.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2).reshape(B, L, -1)
        gated = F.layer_norm(y_BLE, (y_BLE.shape[-1],), eps=1e-6) * u.reshape(B, L, -1)
        return x_BLE + self.out(self.dropout(gated))


class TransformerBlock(nn.Module):
    """SASRec's block: attention and a pointwise feed-forward of the same width, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, config.width), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.width, config.width), nn.Dropout(config.dropout),
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLE: Tensor, context: Context) -> Tensor:
        x_BLE = x_BLE + self.dropout(self.attention(self.norm1(x_BLE), context))
        return x_BLE + self.feed_forward(self.norm2(x_BLE))


class CausalAttention(nn.Module):
    """Softmax attention; with a rotary encoding it is the same drop-in as anywhere else."""

    def __init__(self, config: ModelConfig, rotary: nn.Module | None) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.rotary = rotary

    def forward(self, x_BLE: Tensor, context: Context) -> Tensor:
        B, L, E = x_BLE.shape
        q, k, v = self.qkv(x_BLE).view(B, L, 3, self.heads, -1).unbind(2)
        if self.rotary is not None:
            q, k = self.rotary(q, k, context.times_BL, context.lengths_B, context.t_now_B)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, L, E))


class IntervalTables(nn.Module):
    """TiSASRec's tables of relative intervals and absolute positions, for keys and for values, shared by its blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rows, positions = (config.intervals + 1, config.width), (config.max_len, config.width)
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

    def forward(self, x_BLE: Tensor, context: Context) -> Tensor:
        B, L, E = x_BLE.shape
        assert context.intervals_BLL is not None
        q, k, v = self.qkv(x_BLE).chunk(3, dim=-1)
        k, v = k + self.tables.position_keys[:L], v + self.tables.position_values[:L]
        q, k, v = (part.view(B, L, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        r_keys, r_values = (
            table.view(table.shape[0], self.heads, -1).transpose(0, 1)
            for table in (self.tables.interval_keys, self.tables.interval_values)
        )  # [H, K + 1, D]
        index_BHLL = context.intervals_BLL[:, None].expand(B, self.heads, L, L)
        scores = q @ k.transpose(-1, -2) + (q @ r_keys.transpose(-1, -2)).gather(-1, index_BHLL)
        causal = torch.ones(L, L, dtype=torch.bool, device=x_BLE.device).tril()
        scores = (scores.float() / math.sqrt(E // self.heads)).masked_fill(~causal, -torch.inf)
        attention = self.dropout(scores.softmax(dim=-1)).to(v.dtype)
        by_interval = attention.new_zeros(B, self.heads, L, r_values.shape[1]).scatter_add(-1, index_BHLL, attention)
        y = attention @ v + by_interval @ r_values.to(v.dtype)
        return self.out(y.transpose(1, 2).reshape(B, L, E))


def relative_intervals(times_BL: Tensor, most: int) -> Tensor:
    """TiSASRec's personalised intervals |t_i - t_j| / r_min, rounded and clipped at `most`, int64 [B, L, L].

    r_min is the smallest gap above zero between consecutive events *up to position i*; the original takes it from
    the user's whole sequence, which tells every position about later ones.
    """
    gaps = times_BL.diff(dim=1)
    unknown = torch.iinfo(torch.int64).max
    gaps = torch.where(gaps > 0, gaps, unknown)
    smallest = F.pad(gaps.cummin(dim=1).values, (1, 0), value=unknown) if gaps.shape[1] else times_BL * 0 + unknown
    apart = (times_BL[:, :, None] - times_BL[:, None, :]).abs().double()
    return (apart / smallest[:, :, None]).round().clamp(max=most).long()


def make_blocks(config: Config, time_span: tuple[int, int]) -> nn.ModuleList:
    """The blocks of a model, each with its own rotary encoding."""
    model = config.model
    rotaries = [make_rotary(config.rotary, model.head_dim, time_span) for _ in range(model.blocks)]
    if model.block == "hstu":
        return nn.ModuleList(HSTUBlock(model, rotary) for rotary in rotaries)
    if model.block == "sasrec":
        return nn.ModuleList(TransformerBlock(model, CausalAttention(model, rotary)) for rotary in rotaries)
    tables = IntervalTables(model)
    return nn.ModuleList(TransformerBlock(model, IntervalAttention(model, tables)) for _ in rotaries)
