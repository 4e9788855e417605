"""The fused HSTU attention, forward: scores, bias, SiLU and the sum over values in tiles, never the [L, L] matrix.

Notable: one program owns a tile of queries of one head and walks over the keys before it. The bias is formed in tiles
from the weights and the times, and masks what a query must not see; there are two ways, with the same result:
- sheet: written once for all heads, as [B, L, L] in the scores' precision, where that fits a fixed budget (short
  sequences: a load is cheaper than a logarithm and two look-ups for every head and every pass). In bf16 it is added by
  the tensor cores, as a product with the unit matrix: exact, and it travels with the other operands, transposed if
  need be, instead of through registers;
- tile by tile inside every kernel where it does not fit, so that memory stays linear in the length.
SiLU uses the hardware's tanh where scores are bf16 (error 2^-11, below bf16's own).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention.reference import BUCKET_WIDTH
from trope.kernels.sequence_bounds import SequenceBounds

BLOCK = 64  # queries and keys of a tile, fewer for short sequences
_PER_BUCKET = tl.constexpr(1 / BUCKET_WIDTH)
HIDDEN = tl.constexpr(-16384.0)  # SiLU and its derivative are 0 there, in every precision


class Bias(NamedTuple):
    """The weights of both biases, the gaps between times, and the sheet made of them; each may be None."""

    position: Tensor | None
    time: Tensor | None
    gaps: Any
    sheet: Tensor | None = None

    def pointers(self, like: Tensor) -> tuple[Tensor, ...]:
        """What the kernels take; an absent one is any tensor, never read."""
        gaps = (
            (None, None, None) if self.gaps is None else (self.gaps.times_T, self.gaps.query_times_T, self.gaps.buckets)
        )
        return tuple(like if x is None else x for x in (self.position, self.time, *gaps, self.sheet))

    def constants(self) -> dict[str, Any]:
        """The compile-time side of it."""
        return {
            "HAS_POSITION": self.position is not None,
            "HAS_TIME": self.time is not None,
            "CACHED": self.gaps is not None and self.gaps.buckets is not None,
            "SHEET": self.sheet is not None,
        }


def tile(q: Tensor, bounds: SequenceBounds, wide_stages: int = 2) -> dict[str, Any]:
    """Block sizes and how exactly to compute, for all attention kernels; measured on an H200.

    Larger tiles and more warps were slower: the shared memory then holds one program where it holds three.
    wide_stages: of the pipeline for wide heads, whose tiles fill the shared memory.
    """
    D = q.shape[2]
    return {
        "BLOCK": block_of(bounds.max_len),
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "D": D,
        # In the interpreter there is no inline assembly, and in float32 no reason to approximate.
        "FAST": q.dtype != torch.float32 and os.environ.get("TRITON_INTERPRET") != "1",
        "num_warps": 4,
        "num_stages": 3 if D <= 64 else wide_stages,
    }


@triton.jit
def sigmoid(b_s, FAST: tl.constexpr):
    """Logistic function; by the hardware's tanh if FAST."""
    if FAST:
        b_t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [b_s * 0.5], dtype=tl.float32, is_pure=True, pack=1
        )
        b_sigmoid = 0.5 * b_t + 0.5
    else:
        b_sigmoid = 1.0 / (1.0 + tl.exp(-tl.maximum(b_s, -80.0)))  # exp(88) would be too large for float32
    return b_sigmoid


@triton.jit
def dot(b_x, b_y, FAST: tl.constexpr):
    """A product summed in float32; unless FAST, of operands in float32 (the interpreter cannot multiply bf16)."""
    if not FAST:
        b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
    return tl.dot(b_x, b_y, input_precision="ieee")


@triton.jit
def load_tile(p_x, o_row, m_row, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, zero where masked."""
    o_d = tl.arange(0, BLOCK_D)
    m = m_row[:, None] if D == BLOCK_D else m_row[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + o_row[:, None] * s_row + o_d[None, :], mask=m, other=0.0)


@triton.jit
def buckets_of(b_tq, b_tk, last):
    """Buckets [queries, keys] of int32 seconds since the sequence began."""
    b_gap = tl.maximum(tl.abs(b_tq[:, None] - b_tk[None, :]), 1)
    return tl.minimum((tl.log(b_gap.to(tl.float32)) * _PER_BUCKET).to(tl.int32), last)


@triton.jit
def load_times(p_times, o_token, m, t_first):
    """Seconds since the sequence's first event, int32: 68 years are enough."""
    b_t = tl.load(p_times + o_token, mask=m, other=0) - t_first
    return tl.minimum(tl.maximum(b_t, -(1 << 30)), 1 << 30).to(tl.int32)


@triton.jit
def load_buckets(
    p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row, L, last, CACHED: tl.constexpr
):
    """Buckets [queries, keys] of a tile, from the cache or from the times."""
    if CACHED:
        p_row = p_buckets + i_b.to(tl.int64) * L * s_row + o_m[:, None] * s_row + o_n[None, :]
        b_bucket = tl.load(p_row, mask=m_m[:, None], other=0).to(tl.int32)
    else:
        t_first = tl.load(p_times + start)
        b_tq = load_times(p_query_times, start + o_m, m_m, t_first)
        b_tk = load_times(p_times, start + o_n, m_n, t_first)
        b_bucket = buckets_of(b_tq, b_tk, last)
    return b_bucket


@triton.jit
def form_bias(
    p_position, p_time, p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Both biases of a tile, float32; HIDDEN for keys after their query."""
    o_distance = o_n[None, :] - o_m[:, None]
    b_bias = tl.zeros(o_distance.shape, dtype=tl.float32)
    if HAS_POSITION:
        # Rows beyond a sequence may be further apart than the weights reach.
        b_bias += tl.load(p_position + centre + tl.maximum(tl.minimum(o_distance, 0), -centre))
    if HAS_TIME:
        b_bucket = load_buckets(
            p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row, L, last, CACHED
        )
        # Places beyond a sequence were never written.
        b_bias += tl.load(p_time + tl.minimum(b_bucket, last))
    return tl.where(o_distance <= 0, b_bias, HIDDEN)


@triton.jit
def unit_tile(p_sheet, BLOCK: tl.constexpr):
    """The unit matrix by which the sheet is added."""
    o = tl.arange(0, BLOCK)
    return tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(p_sheet.dtype.element_ty)


@triton.jit
def score_tile(
    b_q, b_k, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n, m_m, m_n,
    s_row, s_sheet, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, FAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scores with bias [queries, keys], or [keys, queries] if TRANSPOSED; HIDDEN for keys after their query."""
    if SHEET:
        # Rows of a tile that are beyond the sequence are written too: nothing needs a mask.
        b_bias = tl.load(p_sheet + i_b.to(tl.int64) * s_sheet + o_m[:, None] * s_row + o_n[None, :])
    else:
        b_bias = form_bias(p_position, p_time, p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row,
                           L, centre, last, HAS_POSITION, HAS_TIME, CACHED)  # fmt: skip
    if SHEET and FAST:
        if TRANSPOSED:
            b_s = tl.dot(b_k, tl.trans(b_q), tl.dot(tl.trans(b_bias), b_unit))
        else:
            b_s = tl.dot(b_q, tl.trans(b_k), tl.dot(b_bias, b_unit))
    elif TRANSPOSED:
        b_s = dot(b_k, tl.trans(b_q), FAST) + tl.trans(b_bias).to(tl.float32)
    else:
        b_s = dot(b_q, tl.trans(b_k), FAST) + b_bias.to(tl.float32)
    return b_s


@triton.jit
def score_gradient(
    b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n,
    m_m, m_n, s_row, s_sheet, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, FAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """silu(s) and the gradient of s, both without the factor 1/n, [queries, keys] or TRANSPOSED; zero where hidden."""
    b_s = score_tile(b_q, b_k, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
                     o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST,
                     TRANSPOSED)  # fmt: skip
    b_dp = dot(b_v, tl.trans(b_dy), FAST) if TRANSPOSED else dot(b_dy, tl.trans(b_v), FAST)
    b_sig = sigmoid(b_s, FAST)
    b_a = b_s * b_sig
    return b_a, b_dp * (b_sig + b_a * (1.0 - b_sig))


@triton.jit
def _forward_kernel(
    p_q, p_k, p_v, p_y, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q, s_k, s_v, s_y, s_qh, s_kh, s_vh, s_yh, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    b_y = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
        b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
        b_s = score_tile(
            b_q, b_k, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n,
            m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST, False)  # fmt: skip
        b_a = b_s * sigmoid(b_s, FAST)
        b_y += dot(b_a.to(b_v.dtype), b_v, FAST)
    o_d = tl.arange(0, BLOCK_D)
    p_out = p_y + i_h * s_yh + (start + o_m)[:, None] * s_y + o_d[None, :]
    tl.store(p_out, (b_y * scale).to(p_y.dtype.element_ty), mask=m_m[:, None] & (o_d < D)[None, :])


@triton.jit
def _bucket_kernel(p_times, p_query_times, p_buckets, p_starts, p_lengths, s_row, L, last, BLOCK: tl.constexpr):
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if (i_n > i_m) | (i_m * BLOCK >= length):
        return
    o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
    m_m, m_n = o_m < length, o_n < s_row
    b_bucket = load_buckets(p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, o_n < length, s_row, L, last,
                            False)  # fmt: skip
    p_out = p_buckets + i_b.to(tl.int64) * L * s_row + o_m[:, None] * s_row + o_n[None, :]
    tl.store(p_out, b_bucket.to(tl.uint8), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _sheet_kernel(
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_row, s_sheet, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), L
    if HAS_TIME:  # else one sheet serves all sequences
        length = tl.load(p_lengths + i_b).to(tl.int32)
    if (i_n > i_m) | (i_m * BLOCK >= length):
        return
    o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    b_bias = form_bias(p_position, p_time, p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, o_n < length,
                       s_row, L, centre, last, HAS_POSITION, HAS_TIME, CACHED)  # fmt: skip
    b_bias = tl.where(m_m[:, None], b_bias, HIDDEN)
    p_out = p_sheet + i_b.to(tl.int64) * s_sheet + o_m[:, None] * s_row + o_n[None, :]
    tl.store(p_out, b_bias.to(p_sheet.dtype.element_ty))


def row_stride(L: int) -> int:
    """Of buckets and sheets: rows begin at 16 bytes, and a tile never reaches beyond a row."""
    return triton.cdiv(L, block_of(L)) * block_of(L)


def cache_buckets(times_T: Tensor, query_times_T: Tensor, bounds: SequenceBounds, last: int) -> Tensor:
    """Buckets of all pairs that attention looks at, uint8 [B, L, row_stride(L)]; the rest is not written."""
    B, L = len(bounds.lengths_B), bounds.max_len
    buckets = torch.empty((B, L, row_stride(L)), dtype=torch.uint8, device=times_T.device)
    if B * L:
        _bucket_kernel[(triton.cdiv(L, block_of(L)), triton.cdiv(L, block_of(L)), B)](
            times_T,
            query_times_T,
            buckets,
            bounds.starts_B,
            bounds.lengths_B,
            row_stride(L),
            L,
            last,
            BLOCK=block_of(L),
        )
    return buckets


def with_sheet(bias: Bias, bounds: SequenceBounds, like: Tensor, most_bytes: int) -> Bias:
    """The bias with its sheet, if that is small enough: whole tiles [B, S, S] with S = row_stride(L); without a time
    bias one for all sequences."""
    if bias.position is None and bias.time is None:
        return bias
    L = bounds.max_len
    B = len(bounds.lengths_B) if bias.time is not None else 1
    if B * row_stride(L) ** 2 * like.element_size() > most_bytes or not len(bounds.lengths_B):
        return bias
    sheet = torch.empty((B, row_stride(L), row_stride(L)), dtype=like.dtype, device=like.device)
    L_, centre, last, _ = shared_arguments(bounds, 1, bias)
    constants = {name: value for name, value in bias.constants().items() if name != "SHEET"}
    tiles = row_stride(L) // block_of(L)
    pointers = bias._replace(sheet=sheet).pointers(like)
    _sheet_kernel[(tiles, tiles, B)](
        *pointers, bounds.starts_B, bounds.lengths_B, row_stride(L), sheet.stride(0), L_, centre, last,
        BLOCK=block_of(L), **constants,
    )  # fmt: skip
    return bias._replace(sheet=sheet)


def block_of(L: int) -> int:
    """Queries and keys of a tile."""
    return min(BLOCK, max(16, triton.next_power_of_2(L)))


def shared_arguments(bounds: SequenceBounds, n: int, bias: Bias) -> tuple[int, int, int, float]:
    """L, the middle of the position weights, the last bucket, and one over n."""
    centre = 0 if bias.position is None else (len(bias.position) - 1) // 2
    assert bias.position is None or bounds.max_len <= centre + 1, "sequences are longer than the position weights"
    return bounds.max_len, centre, 0 if bias.gaps is None else bias.gaps.last, 1.0 / n


def sheet_strides(bounds: SequenceBounds, bias: Bias) -> tuple[int, int]:
    """Of a row of buckets and sheet, and of a sequence's sheet (0 where all share one)."""
    shared = bias.sheet is None or len(bias.sheet) == 1
    return row_stride(bounds.max_len), 0 if shared else bias.sheet.stride(0)  # type: ignore[union-attr]


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias) -> Tensor:
    """y [T, H, D], contiguous; zero outside of all sequences."""
    T, H, D = q.shape
    y = (torch.empty if bounds.is_complete else torch.zeros)((T, H, D), dtype=q.dtype, device=q.device)
    constants = tile(q, bounds)
    if T and len(bounds.lengths_B):
        _forward_kernel[(triton.cdiv(bounds.max_len, constants["BLOCK"]), H, len(bounds.lengths_B))](
            q, k, v, y, *bias.pointers(q), bounds.starts_B, bounds.lengths_B,
            *(x.stride(0) for x in (q, k, v, y)), *(x.stride(1) for x in (q, k, v, y)),
            *sheet_strides(bounds, bias), *shared_arguments(bounds, n, bias), **bias.constants(), **constants,
        )  # fmt: skip
    return y
