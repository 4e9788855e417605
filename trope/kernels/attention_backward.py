"""The fused HSTU attention, backward: scores are computed again in tiles, nothing of size [L, L] is kept.

Three kernels, all without atomics, so gradients are deterministic:
- dq: a tile of queries walks over the keys before it; dk and dv: a tile of keys walks over the queries after it;
- the bias weights: a program owns one diagonal of tiles and some of its (sequence, tile) pairs. It sums the gradient
  of the scores over heads first, since heads share the bias; then the position's gradient is a running [64, 64] sum
  (one diagonal of tiles holds the same distances everywhere), and the time's a sum for each bucket between the tile's
  lowest and highest, few where times are sorted. What the programs leave is small, and summed in a fixed order.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention_triton import (
    Bias,
    bias_tile,
    dot,
    load_buckets,
    load_tile,
    shared_arguments,
    sheet_strides,
    sigmoid,
    tile,
)
from trope.kernels.spans import Spans

PROGRAMS = 512  # of the bias kernel, about; fixed, so that sums do not depend on the GPU


@triton.jit
def _score_gradient(
    b_q, b_k, b_v, b_dy, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n, m_m, m_n,
    s_row, s_sheet, L, centre, last,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """silu(s) and the gradient of s, [queries, keys], both without the factor 1/n; zero for keys after their query."""
    b_s = dot(b_q, tl.trans(b_k), FAST) + bias_tile(
        p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n, m_m, m_n,
        s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET)  # fmt: skip
    b_dp = dot(b_dy, tl.trans(b_v), FAST)
    b_sig = sigmoid(b_s, FAST)
    b_a = b_s * b_sig
    return b_a, b_dp * (b_sig + b_a * (1.0 - b_sig))


@triton.jit
def _store_tile(p_x, b_x, o_row, m_row, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    p = p_x + o_row[:, None] * s_row + o_d[None, :]
    tl.store(p, b_x.to(p_x.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def _query_kernel(
    p_q, p_k, p_v, p_dy, p_dq, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_dq, s_qh, s_kh, s_vh, s_dyh, s_dqh, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
    b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
    b_dq = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
        b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
        _, b_ds = _score_gradient(
            b_q, b_k, b_v, b_dy, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n,
            m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST)  # fmt: skip
        b_dq += dot(b_ds.to(b_k.dtype), b_k, FAST)
    _store_tile(p_dq + i_h * s_dqh, b_dq * scale, start + o_m, m_m, s_dq, D, BLOCK_D)


@triton.jit
def _key_kernel(
    p_q, p_k, p_v, p_dy, p_dk, p_dv, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet,
    p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_dk, s_qh, s_kh, s_vh, s_dyh, s_dkh, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_n * BLOCK >= length:
        return
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < length
    b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
    b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
    b_dk = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    b_dv = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for i_m in range(i_n, tl.cdiv(length, BLOCK)):
        o_m = i_m * BLOCK + tl.arange(0, BLOCK)
        m_m = o_m < length
        b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
        b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
        b_a, b_ds = _score_gradient(
            b_q, b_k, b_v, b_dy, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start, o_m, o_n,
            m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST)  # fmt: skip
        b_dv += dot(tl.trans(b_a.to(b_dy.dtype)), b_dy, FAST)
        b_dk += dot(tl.trans(b_ds.to(b_q.dtype)), b_q, FAST)
    _store_tile(p_dk + i_h * s_dkh, b_dk * scale, start + o_n, m_n, s_dk, D, BLOCK_D)
    _store_tile(p_dv + i_h * s_dkh, b_dv * scale, start + o_n, m_n, s_dk, D, BLOCK_D)


@triton.jit
def _bias_kernel(
    p_q, p_k, p_v, p_dy, p_by_distance, p_by_bucket,
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_qh, s_kh, s_vh, s_dyh, s_row, s_sheet, L, centre, last, scale, H, B, TILES,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_chunk, i_diagonal = tl.program_id(0), tl.program_id(1)
    tiles = TILES - i_diagonal  # of this diagonal in a sequence
    pairs = B * tiles
    size = tl.cdiv(pairs, tl.num_programs(0))
    o_k = tl.arange(0, BLOCK_K)
    b_distance = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    b_hist = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for i_pair in range(i_chunk * size, tl.minimum((i_chunk + 1) * size, pairs)):
        i_b, i_n = i_pair // tiles, i_pair % tiles
        i_m = i_n + i_diagonal
        start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
        if i_m * BLOCK < length:
            o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
            m_m, m_n = o_m < length, o_n < length
            b_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for i_h in range(H):
                b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
                b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
                b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
                b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
                _, b_ds = _score_gradient(
                    b_q, b_k, b_v, b_dy, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
                    o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET,
                    FAST)  # fmt: skip
                b_sum += b_ds
            if HAS_POSITION:
                b_distance += b_sum
            if HAS_TIME:
                b_bucket = load_buckets(p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row,
                                        L, last, CACHED)  # fmt: skip
                m = (o_m[:, None] >= o_n[None, :]) & m_m[:, None]
                lowest = tl.min(tl.min(tl.where(m, b_bucket, 1 << 30), axis=1), axis=0)
                highest = tl.max(tl.max(tl.where(m, b_bucket, -1), axis=1), axis=0)
                for i_k in range(lowest, highest + 1):
                    # Masked pairs have no gradient, in whatever bucket they are.
                    in_bucket = tl.sum(tl.sum(tl.where(b_bucket == i_k, b_sum, 0.0), axis=1), axis=0)
                    b_hist += tl.where(o_k == i_k, in_bucket, 0.0)
    i_program = i_diagonal * tl.num_programs(0) + i_chunk
    if HAS_POSITION:
        o_tile = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(p_by_distance + i_program.to(tl.int64) * BLOCK * BLOCK + o_tile, b_distance * scale)
    if HAS_TIME:
        tl.store(p_by_bucket + i_program * BLOCK_K + o_k, b_hist * scale)


@triton.jit
def _distance_kernel(
    p_by_distance, p_d_position, CHUNKS, TILES, L, centre, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The sum over all pairs at one distance: it crosses the tiles of two neighbouring diagonals."""
    distance = tl.program_id(0)
    b_sum = tl.zeros((BLOCK_C, BLOCK), dtype=tl.float32)
    o_m = tl.arange(0, BLOCK)
    for i_side in tl.static_range(2):
        i_diagonal = distance // BLOCK + i_side
        o_n = o_m - (distance - i_diagonal * BLOCK)
        m = (o_n >= 0) & (o_n < BLOCK) & (i_diagonal < TILES)
        for i_c in range(0, CHUNKS, BLOCK_C):
            o_c = i_c + tl.arange(0, BLOCK_C)
            p = p_by_distance + (i_diagonal * CHUNKS + o_c).to(tl.int64)[:, None] * BLOCK * BLOCK
            b_sum += tl.load(p + (o_m * BLOCK + o_n)[None, :], mask=m[None, :] & (o_c < CHUNKS)[:, None], other=0.0)
    tl.store(p_d_position + centre - distance, tl.sum(tl.sum(b_sum, axis=1), axis=0))


@triton.jit
def _sum_kernel(p_rows, p_sum, R, N, s_row, BLOCK_R: tl.constexpr):
    """One column's sum over rows, in a fixed order."""
    i_n = tl.program_id(0)
    b_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_rows + o_r * s_row + i_n, mask=o_r < R, other=0.0)
    tl.store(p_sum + i_n, tl.sum(b_sum, axis=0))


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Spans, n: int, bias: Bias
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv: views into one [T, 3, H, D]; zero outside of all sequences."""
    T, H, D = q.shape
    joint = (torch.empty if spans.is_complete else torch.zeros)((T, 3, H, D), dtype=q.dtype, device=q.device)
    dq, dk, dv = joint.unbind(1)
    constants = tile(q, spans, warps=4 if D <= 64 else 8)  # as many registers as a wide head's sums need
    if T and len(spans.lengths_B):
        grid = (triton.cdiv(spans.max_len, constants["BLOCK"]), H, len(spans.lengths_B))
        rest = (*bias.pointers(q), spans.starts_B, spans.lengths_B)
        inputs = (q, k, v, dy)
        rows, heads = [x.stride(0) for x in (*inputs, dq)], [x.stride(1) for x in (*inputs, dq)]
        shared = (*sheet_strides(spans, bias), *shared_arguments(spans, n, bias))
        _query_kernel[grid](*inputs, dq, *rest, *rows, *heads, *shared, **bias.constants(), **constants)
        _key_kernel[grid](*inputs, dk, dv, *rest, *rows, *heads, *shared, **bias.constants(), **constants)
    return dq, dk, dv


def backward_bias(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Spans, n: int, bias: Bias
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the position and of the time weights, where there are any."""
    d_position = None if bias.position is None else torch.zeros_like(bias.position)
    d_time = None if bias.time is None else torch.zeros_like(bias.time)
    B = len(spans.lengths_B)
    if (d_position is None and d_time is None) or not (B and len(q)):
        return d_position, d_time
    constants = tile(q, spans, warps=8)
    block = constants["BLOCK"]
    tiles = triton.cdiv(spans.max_len, block)
    chunks = min(B, max(1, PROGRAMS // tiles))
    by_distance = torch.empty((tiles * chunks if d_position is not None else 0, block, block), device=q.device)
    block_k = 0 if bias.time is None else triton.next_power_of_2(len(bias.time))
    by_bucket = torch.empty((tiles * chunks if d_time is not None else 0, block_k), device=q.device)
    inputs = (q, k, v, dy)
    shared = (*sheet_strides(spans, bias), *shared_arguments(spans, n, bias))
    _bias_kernel[(chunks, tiles)](
        *inputs, by_distance, by_bucket, *bias.pointers(q), spans.starts_B, spans.lengths_B,
        *(x.stride(0) for x in inputs), *(x.stride(1) for x in inputs), *shared, q.shape[1], B, tiles,
        BLOCK_K=max(block_k, 1), **bias.constants(), **constants,
    )  # fmt: skip
    if d_position is not None:
        _, _, L, centre, *_ = shared
        _distance_kernel[(L,)](by_distance, d_position, chunks, tiles, L, centre, BLOCK=block, BLOCK_C=16)
    if d_time is not None:
        _sum_kernel[(len(d_time),)](by_bucket, d_time, tiles * chunks, len(d_time), block_k, BLOCK_R=256)
    return d_position, d_time
