"""The fused HSTU attention, forward: scores, bias, SiLU and the sum over values in tiles, never the [L, L] matrix.

Notable: one program owns a tile of queries of one or a few heads and walks over the keys before it. The bias is formed
in tiles from the weights and the times, and it masks what a query must not see. There are two ways:

- A sheet: the bias is written once for all heads, as [B, L, L] in the scores' dtype, where that fits a budget
  (attention/op.py). A load is cheaper than a logarithm and two look-ups for every head and every pass. In bf16 the
  tensor cores add the sheet as a product with the unit matrix. The product changes no bit of the sheet, which then
  reaches the tensor cores like the other operands, transposed if need be, and not through registers.
- Tile by tile inside every kernel where the sheet does not fit, so that memory stays linear in the length.

attention/arguments.py explains every argument. The device functions are in attention/tiles.py.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention.arguments import Bias, block_of, bounds_pointers, heads_of, row_stride, strides, tile
from trope.kernels.attention.tiles import (
    HIDDEN,
    BiasInputs,
    Pairs,
    bias_tile,
    buckets_from_times,
    dot,
    form_bias,
    load_heads,
    score_tile,
    sigmoid,
    store_tile,
    unit_tile,
    with_one,
    zeros,
)
from trope.kernels.sequence_bounds import SequenceBounds

# Numbers of a token that a program has of all its heads together: two heads of 32 load the bias once. On an H200 that
# is 8 % faster than one; four are not faster (results/attention-h200.txt).
WIDTH = 64


@triton.jit
def _forward_kernel(
    p_q, p_k, p_v, p_y, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q_t, s_k_t, s_v_t, s_y_t, s_q_h, s_k_h, s_v_h, s_y_h, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, H / HEADS, B): writes y of one tile, of HEADS heads."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
    i_h, i_b = tl.program_id(1).to(tl.int64) * HEADS, tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    bias = BiasInputs(p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, s_row, s_sheet, L, centre, last)
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    b_q = load_heads(p_q, i_h, start + o_m, m_m, s_q_t, s_q_h, HEADS, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    b_y = zeros(HEADS, BLOCK, BLOCK_D)
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_heads(p_k, i_h, start + o_n, m_n, s_k_t, s_k_h, HEADS, D, BLOCK_D)
        b_v = load_heads(p_v, i_h, start + o_n, m_n, s_v_t, s_v_h, HEADS, D, BLOCK_D)
        b_bias = bias_tile(
            b_unit, bias, Pairs(i_b, start, o_m, o_n, m_m, m_n),
            HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED, SHEET=SHEET, FAST=FAST, TRANSPOSED=False,
        )  # fmt: skip
        b_sum = ()
        for i in tl.static_range(HEADS):
            b_s = score_tile(b_q[i], b_k[i], b_bias, FAST=FAST, TRANSPOSED=False, PRECISION=PRECISION)
            b_a = b_s * sigmoid(b_s, FAST)
            b_sum = with_one(b_sum, b_y[i] + dot(b_a.to(b_v[i].dtype), b_v[i], FAST, PRECISION))
        b_y = b_sum
    for i in tl.static_range(HEADS):
        store_tile(p_y + (i_h + i) * s_y_h, b_y[i] * scale, start + o_m, m_m, s_y_t, D, BLOCK_D)


@triton.jit
def _bucket_kernel(p_times, p_query_times, p_buckets, p_starts, p_lengths, s_row, L, last, BLOCK: tl.constexpr):
    """Grid (tiles of queries, tiles of keys, B): writes the buckets of one tile."""
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if (i_n > i_m) | (i_m * BLOCK >= length):
        return
    o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
    m_m, m_n = o_m < length, o_n < s_row
    b_bucket = buckets_from_times(p_times, p_query_times, last, Pairs(i_b, start, o_m, o_n, m_m, o_n < length))
    p_out = p_buckets + i_b.to(tl.int64) * L * s_row + o_m[:, None] * s_row + o_n[None, :]
    tl.store(p_out, b_bucket.to(tl.uint8), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _sheet_kernel(
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_row, s_sheet, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, tiles of keys, B or 1): writes the bias of one tile."""
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), L
    if HAS_TIME:  # else one sheet serves all sequences
        length = tl.load(p_lengths + i_b).to(tl.int32)
    if (i_n > i_m) | (i_m * BLOCK >= length):
        return
    o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    bias = BiasInputs(p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, s_row, s_sheet, L, centre, last)
    b_bias = form_bias(
        bias, Pairs(i_b, start, o_m, o_n, m_m, o_n < length),
        HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED,
    )  # fmt: skip
    b_bias = tl.where(m_m[:, None], b_bias, HIDDEN)
    p_out = p_sheet + i_b.to(tl.int64) * s_sheet + o_m[:, None] * s_row + o_n[None, :]
    tl.store(p_out, b_bias.to(p_sheet.dtype.element_ty))


def cache_buckets(times_T: Tensor, query_times_T: Tensor, bounds: SequenceBounds, last: int) -> Tensor:
    """Buckets of all pairs that attention looks at, uint8 [B, L, row_stride(L)]; the rest is not written."""
    B, L = len(bounds.lengths_B), bounds.max_len
    buckets = torch.empty((B, L, row_stride(L)), dtype=torch.uint8, device=times_T.device)
    tiles = triton.cdiv(L, block_of(L))
    if B * L:
        _bucket_kernel[(tiles, tiles, B)](
            p_times=times_T,
            p_query_times=query_times_T,
            p_buckets=buckets,
            **bounds_pointers(bounds),
            s_row=row_stride(L),
            L=L,
            last=last,
            BLOCK=block_of(L),
        )
    return buckets


def with_sheet(
    bias: Bias, bounds: SequenceBounds, like: Tensor, most_bytes: int,
    write: Callable[[Bias, SequenceBounds, Tensor], None] | None = None,
) -> Bias:  # fmt: skip
    """The bias with its sheet, if the sheet takes at most `most_bytes`, else the bias as it is.

    The sheet holds whole tiles, [B, S, S] with S = row_stride(L). Without a time bias all sequences share one.
    write: fills the empty sheet of a bias; None: `_write_sheet`.
    """
    if bias.position is None and bias.time is None:
        return bias
    S = row_stride(bounds.max_len)
    B = len(bounds.lengths_B) if bias.time is not None else 1
    if B * S**2 * like.element_size() > most_bytes or not len(bounds.lengths_B):
        return bias
    bias = bias._replace(sheet=torch.empty((B, S, S), dtype=like.dtype, device=like.device))
    (write or _write_sheet)(bias, bounds, like)
    return bias


def _write_sheet(bias: Bias, bounds: SequenceBounds, like: Tensor) -> None:
    assert bias.sheet is not None
    B, S, _ = bias.sheet.shape
    arguments = bias.arguments(like, bounds) | {"s_sheet": bias.sheet.stride(0)}
    del arguments["SHEET"]  # this kernel writes the sheet
    block = block_of(bounds.max_len)
    _sheet_kernel[(S // block, S // block, B)](**arguments, BLOCK=block)


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias, learns: bool) -> Tensor:
    """y [T, H, D], contiguous; zero outside of all sequences.

    learns: there will be a backward, whose products of float32 are exact. Without one they are made of three products
    of TF32, which tensor cores do, and which differ from float32 in the last bits.
    """
    T, H, D = q.shape
    y = (torch.empty if bounds.is_complete else torch.zeros)((T, H, D), dtype=q.dtype, device=q.device)
    constants = tile(q, bounds) | heads_of(q, WIDTH)
    if constants["HEADS"] > 1:
        constants["num_stages"] = 2  # more would leave room for two programs instead of three
    precision = "ieee"
    if q.dtype == torch.float32 and not learns:
        precision = "tf32x3"
        if D > 64:  # other tiles do not fit the registers; compiled, not timed
            constants |= {"num_warps": 8, "num_stages": 1}
    if T and len(bounds.lengths_B):
        grid = (triton.cdiv(bounds.max_len, constants["BLOCK"]), H // constants["HEADS"], len(bounds.lengths_B))
        _forward_kernel[grid](
            p_q=q,
            p_k=k,
            p_v=v,
            p_y=y,
            **strides(q=q, k=k, v=v, y=y),
            **bias.arguments(q, bounds),
            scale=1.0 / n,
            PRECISION=precision,
            **constants,
        )
    return y
