"""The three blocks that the six models are made of: HSTU, and a Transformer block with plain or interval attention.

Every block works on flat tokens [T, E] and the `Context` that all blocks of a forward share, computed once. HSTU takes
any bounds, padded or jagged; the Transformer blocks pad for attention alone. Every block is causal by construction, and
right-padding needs no mask: a valid position only looks at earlier ones, and what padding computes is never read.

Shape letters: B batch, L positions, T tokens, H heads, D head dim, E width, K intervals, C coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config, ModelConfig, RotaryConfig
from trope.kernels.attention import Gaps, hstu_attention
from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.norm import EPS, gate, norm
from trope.kernels.project import project
from trope.kernels.sequence_bounds import SequenceBounds
from trope.kernels.silu_rotate import silu_rotate
from trope.rotary.trope import IndexRoPE, TORoPE, TRoPE

Rotation = TRoPE | TORoPE | IndexRoPE


@dataclass(frozen=True)
class Context:
    """What all blocks of a forward share.

    bounds: where the sequences lie. coords: where queries and keys stand for the rotary encoding, two of [C, T].
    gaps: between times, for HSTU's time bias. intervals_BLL: TiSASRec's. seed: of dropout inside kernels, int64 [1].
    dtype: of the products. slots_T: where each token lies in a padded batch, flattened; None where tokens are one.
    """

    bounds: SequenceBounds
    coords: tuple[Tensor, Tensor] | None
    gaps: Gaps | None
    intervals_BLL: Tensor | None
    seed: Tensor | None
    dtype: torch.dtype
    slots_T: Tensor | None = None

    def padded(self, x_T: Tensor) -> Tensor:
        """Flat tokens [T, ..] as a batch [B, L, ..]; what lies behind a row's last token is zero where it was none."""
        shape = (len(self.bounds.starts_B), self.bounds.max_len)
        if self.slots_T is not None:
            # Each token has a slot of its own, so the gradient is a selection too, with nothing to add up.
            x_T = x_T.new_zeros((shape[0] * shape[1], *x_T.shape[1:])).index_copy(0, self.slots_T, x_T)
        return x_T.unflatten(0, shape)

    def flat(self, x_BL: Tensor) -> Tensor:
        """The tokens [T, ..] of a batch [B, L, ..]."""
        x_T = x_BL.flatten(0, 1)
        return x_T if self.slots_T is None else x_T.index_select(0, self.slots_T)


def make_rotary(config: RotaryConfig, head_dim: int, time_span: tuple[int, int]) -> Rotation | None:
    """The rotary encoding of one layer. Values are not checked again: the data were, when they were prepared."""
    if config.kind == "trope":
        return TRoPE(
            head_dim, time_span=time_span if config.conditioning == "span" and config.position == "times" else None,
            position=config.position, learnable=config.learnable, multiscale=config.multiscale, shifted=config.shifted,
            conjugate=config.conjugate, rotate_query=config.rotate_query, rotate_key=config.rotate_key,
            share_alpha=config.share_alpha, alpha_init=config.alpha_init, bank=config.bank,
            stationary=config.stationary, stationary_planes=config.stationary_planes,
            step=config.step, beta_min=config.beta_min, beta_max=config.beta_max,
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

    def __init__(self, config: ModelConfig, rotary: Rotation | None, stream: int) -> None:
        super().__init__()
        self.heads, self.max_len, self.stream = config.heads, config.max_len, stream
        # The floor is that of the sum, which attention divides by n.
        self.gate_eps = EPS if config.floor is None else (config.floor / config.max_len) ** 2
        inner = config.heads * config.head_dim
        self.uvqk = nn.Parameter(torch.empty(config.width, 4 * inner).normal_(0, 0.02))
        self.bias = RelativeBias(config)
        self.rotary = rotary
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(inner, config.width)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x_TE: Tensor, delta_TE: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """The residual stream with the previous block's `delta_TE` added, and this block's own: still apart, because
        the next norm adds them on its way."""
        x_TE, normed_TE = norm(x_TE, delta_TE, out_dtype=context.dtype)
        pre_TF = project(normed_TE, self.uvqk)
        buffer = GradientBuffer(pre_TF.shape[1])
        u, v, q, k = self._silu_rotate(pre_TF, context, buffer)
        gaps = None if self.bias.time is None else context.gaps
        y_THD = hstu_attention(q, k, v, context.bounds, self.max_len, self.bias.position, self.bias.time, gaps)
        dropout = self.dropout.p if self.training else 0.0
        gated_TF = gate(y_THD.flatten(1), u.flatten(1), dropout, context.seed, self.stream, self.gate_eps, buffer)
        if context.seed is None:  # the kernel did not
            gated_TF = self.dropout(gated_TF)
        return x_TE, project(gated_TF, self.out.weight.t(), self.out.bias)

    def _silu_rotate(
        self, pre_TF: Tensor, context: Context, buffer: GradientBuffer | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u as it was projected, and v, q, k; q and k have been through SiLU when they are rotated."""
        if self.rotary is None or context.coords is None:
            return silu_rotate(pre_TF, self.heads, buffer=buffer)
        if isinstance(self.rotary, TORoPE) and self.rotary.fusion == "head":  # heads turn differently
            u, v, q, k = silu_rotate(pre_TF, self.heads, buffer=buffer)
            coords_q, coords_k = (coords[:, None] for coords in context.coords)
            q, k = self.rotary.rotate(q[None], k[None], coords_q, coords_k)
            return u, v, q[0], k[0]
        interleaved = self.rotary.layout == "interleaved"
        return silu_rotate(pre_TF, self.heads, *context.coords, self.rotary.turns(), interleaved, buffer)


class RelativeBias(nn.Module):
    """A learned number for each distance in positions and each bucket of time, per layer, shared by heads.

    The query's moment is the next event's time, as everywhere here: the bias was shifted before T-RoPE was.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        distances = 2 * config.max_len - 1
        # One bucket more, for everything longer.
        buckets = config.time_buckets + 1
        self.position = nn.Parameter(torch.empty(distances).normal_(0, 0.02)) if config.position_bias else None
        self.time = nn.Parameter(torch.empty(buckets).normal_(0, 0.02)) if config.time_bias else None


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

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        x_TE = x_TE + self.dropout(self.attention(self.norm1(x_TE), context))
        return x_TE + self.feed_forward(self.norm2(x_TE))


class CausalAttention(nn.Module):
    """Softmax attention; with a rotary encoding it is the same drop-in as anywhere else."""

    def __init__(self, config: ModelConfig, rotary: Rotation | None) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.rotary = rotary

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        q, k, v = context.padded(self.qkv(x_TE)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.rotary is not None and context.coords is not None:
            coords_q, coords_k = (context.padded(coords.T).movedim(-1, 0) for coords in context.coords)
            q, k = self.rotary.rotate(q, k, coords_q, coords_k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(context.flat(y.transpose(1, 2).flatten(2)))


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

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        assert context.intervals_BLL is not None
        q, k, v = context.padded(self.qkv(x_TE)).chunk(3, dim=-1)
        B, L, E = q.shape
        k, v = k + self.tables.position_keys[:L], v + self.tables.position_values[:L]
        q, k, v = (part.view(B, L, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        r_keys, r_values = (
            table.view(table.shape[0], self.heads, -1).transpose(0, 1)
            for table in (self.tables.interval_keys, self.tables.interval_values)
        )  # [H, K + 1, D]
        index_BHLL = context.intervals_BLL[:, None].expand(B, self.heads, L, L)
        scores = q @ k.transpose(-1, -2) + (q @ r_keys.transpose(-1, -2)).gather(-1, index_BHLL)
        causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
        scores = (scores.float() / math.sqrt(E // self.heads)).masked_fill(~causal, -torch.inf)
        attention = self.dropout(scores.softmax(dim=-1)).to(v.dtype)
        by_interval = attention.new_zeros(B, self.heads, L, r_values.shape[1]).scatter_add(-1, index_BHLL, attention)
        y = attention @ v + by_interval @ r_values.to(v.dtype)
        return self.out(context.flat(y.transpose(1, 2).flatten(2)))


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
        return nn.ModuleList(HSTUBlock(model, rotary, stream) for stream, rotary in enumerate(rotaries, start=1))
    if model.block == "sasrec":
        return nn.ModuleList(TransformerBlock(model, CausalAttention(model, rotary)) for rotary in rotaries)
    tables = IntervalTables(model)
    return nn.ModuleList(TransformerBlock(model, IntervalAttention(model, tables)) for _ in rotaries)


def first_rotary(blocks: nn.ModuleList) -> Rotation | None:
    """The first block's rotary encoding; all blocks have tokens stand at the same coordinates."""
    return next((module for module in blocks.modules() if isinstance(module, Rotation)), None)
