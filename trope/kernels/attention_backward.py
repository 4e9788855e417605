"""The fused HSTU attention, backward: scores are computed again in tiles, nothing of size [L, L] is kept.

Three kernels, all without atomics, so gradients are deterministic:
- dq: a tile of queries walks over the keys before it; dk and dv: a tile of keys walks over the queries after it, on
  transposed scores, so that no product waits for a transposition;
- the bias weights: a program owns one diagonal of tiles and some of its (sequence, tile) pairs. It sums the gradient
  of the scores over heads first, since heads share the bias. The position's gradient is then a running [64, 64] sum:
  one diagonal of tiles holds the same distances everywhere. For the time's, sorted times make a row's buckets runs, so
  the sum over buckets >= k is a row's prefix sum at the end of a run; unsorted times, and tiles with few buckets, take
  one masked sum per bucket. What the programs leave is small, and summed in a fixed order.
  The gradient of the scores comes from the dq kernel, which writes it down in bf16 (summed over the two heads that a
  program takes where heads are narrow) where that fits a fixed budget, and is computed once more where it does not.

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
    dot,
    load_buckets,
    load_tile,
    load_times,
    row_stride,
    score_tile,
    shared_arguments,
    sheet_strides,
    sigmoid,
    tile,
    unit_tile,
)
from trope.kernels.spans import Spans

PROGRAMS = 512  # of the bias kernel, about; fixed, so that sums do not depend on the GPU
GROUPS = 2  # narrow heads that a program of the dq kernel takes
FEW = tl.constexpr(6)  # buckets of a tile that are not worth a search for runs


@triton.jit
def _score_gradient(
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
def _store_tile(p_x, b_x, o_row, m_row, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    p = p_x + o_row[:, None] * s_row + o_d[None, :]
    tl.store(p, b_x.to(p_x.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def _query_kernel(
    p_q, p_k, p_v, p_dy, p_dq, p_ds, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet,
    p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_dq, s_qh, s_kh, s_vh, s_dyh, s_dqh, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, KEEP: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_g, i_b = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    i_h = i_g * GROUP
    b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
    b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
    b_dq = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    b_dq2 = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    if GROUP == 2:
        b_q2 = load_tile(p_q + (i_h + 1) * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
        b_dy2 = load_tile(p_dy + (i_h + 1) * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    p_tiles = p_ds + (i_b.to(tl.int64) * tl.num_programs(1) + i_g) * s_row * s_row
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
        b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
        _, b_ds = _score_gradient(
            b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
            o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST,
            False)  # fmt: skip
        b_dq += dot(b_ds.to(b_k.dtype), b_k, FAST)
        if GROUP == 2:
            b_k2 = load_tile(p_k + (i_h + 1) * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
            b_v2 = load_tile(p_v + (i_h + 1) * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
            _, b_ds2 = _score_gradient(
                b_q2, b_k2, b_v2, b_dy2, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b,
                start, o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET,
                FAST, False)  # fmt: skip
            b_dq2 += dot(b_ds2.to(b_k2.dtype), b_k2, FAST)
            b_ds += b_ds2
        if KEEP:
            tl.store(p_tiles + o_m[:, None] * s_row + o_n[None, :], b_ds.to(b_k.dtype))
    _store_tile(p_dq + i_h * s_dqh, b_dq * scale, start + o_m, m_m, s_dq, D, BLOCK_D)
    if GROUP == 2:
        _store_tile(p_dq + (i_h + 1) * s_dqh, b_dq2 * scale, start + o_m, m_m, s_dq, D, BLOCK_D)


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
    b_unit = unit_tile(p_sheet, BLOCK)
    b_dk = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    b_dv = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for i_m in range(i_n, tl.cdiv(length, BLOCK)):
        o_m = i_m * BLOCK + tl.arange(0, BLOCK)
        m_m = o_m < length
        b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
        b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
        b_a, b_ds = _score_gradient(
            b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
            o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST,
            True)  # fmt: skip
        b_dv += dot(b_a.to(b_dy.dtype), b_dy, FAST)
        b_dk += dot(b_ds.to(b_q.dtype), b_q, FAST)
    _store_tile(p_dk + i_h * s_dkh, b_dk * scale, start + o_n, m_n, s_dk, D, BLOCK_D)
    _store_tile(p_dv + i_h * s_dkh, b_dv * scale, start + o_n, m_n, s_dk, D, BLOCK_D)


@triton.jit
def _sum_runs(b_gradient, b_bucket, i_first, BLOCK: tl.constexpr):
    """Sums over all pairs in buckets >= k, for BLOCK buckets k from `i_first` on; a row's buckets must not rise."""
    o_k = i_first + tl.arange(0, BLOCK)
    b_count = tl.zeros((BLOCK, BLOCK), dtype=tl.int32)  # of row i's keys in buckets >= k: a binary search
    for i_step in tl.static_range(7):  # BLOCK is at most 64
        b_next = b_count + (BLOCK >> i_step)
        b_there = tl.gather(b_bucket, tl.maximum(tl.minimum(b_next, BLOCK) - 1, 0), axis=1)
        b_count = tl.where((b_next <= BLOCK) & (b_there >= o_k[None, :]), b_next, b_count)
    b_prefix = tl.gather(tl.cumsum(b_gradient, axis=1), tl.maximum(b_count - 1, 0), axis=1)
    return tl.sum(tl.where(b_count > 0, b_prefix, 0.0), axis=0)


@triton.jit
def _bias_kernel(
    p_q, p_k, p_v, p_dy, p_ds, p_by_distance, p_by_bucket,
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_qh, s_kh, s_vh, s_dyh, s_row, s_sheet, L, centre, last, scale, B, TILES,
    H: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    KEEP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    i_chunk, i_diagonal = tl.program_id(0), tl.program_id(1)
    tiles = TILES - i_diagonal  # of this diagonal in a sequence
    pairs = B * tiles
    size = tl.cdiv(pairs, tl.num_programs(0))
    o_k = tl.arange(0, BLOCK_K)
    b_distance = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    b_hist = tl.zeros((BLOCK_K,), dtype=tl.float32)
    # Sums over buckets >= k: for the first buckets, up to years with 64 of them, and for all others.
    b_runs = tl.zeros((BLOCK,), dtype=tl.float32)
    o_run = tl.arange(0, BLOCK)
    for i_pair in range(i_chunk * size, tl.minimum((i_chunk + 1) * size, pairs)):
        i_b, i_n = i_pair // tiles, i_pair % tiles
        i_m = i_n + i_diagonal
        start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
        if i_m * BLOCK < length:
            o_m, o_n = i_m * BLOCK + tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
            m_m, m_n = o_m < length, o_n < length
            b_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            if KEEP:
                p_tile = p_ds + i_b.to(tl.int64) * H * s_row * s_row + o_m[:, None] * s_row + o_n[None, :]
                for i_h in tl.static_range(H):
                    b_sum += tl.load(p_tile + i_h * s_row * s_row).to(tl.float32)
            else:
                b_unit = unit_tile(p_sheet, BLOCK)
                for i_h in range(H):
                    b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
                    b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
                    b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
                    b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
                    _, b_ds = _score_gradient(
                        b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet,
                        i_b, start, o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME,
                        CACHED, SHEET, FAST, False)  # fmt: skip
                    b_sum += b_ds
            if HAS_POSITION:
                b_distance += b_sum
            if HAS_TIME:
                b_bucket = load_buckets(p_times, p_query_times, p_buckets, i_b, start, o_m, o_n, m_m, m_n, s_row,
                                        L, last, CACHED)  # fmt: skip
                m = (o_m[:, None] >= o_n[None, :]) & m_m[:, None]
                b_bucket = tl.where(m, b_bucket, -1)  # such pairs have no gradient
                lowest = tl.min(tl.min(tl.where(m, b_bucket, 1 << 30), axis=1), axis=0)
                highest = tl.max(tl.max(b_bucket, axis=1), axis=0)
                t_first = tl.load(p_times + start)
                m_pair = (o_n + 1 < length) & (tl.arange(0, BLOCK) + 1 < BLOCK)
                b_rise = load_times(p_times, start + o_n + 1, m_pair, t_first)
                b_rise -= load_times(p_times, start + o_n, m_pair, t_first)
                is_sorted = tl.min(tl.where(m_pair, b_rise, 0), axis=0) >= 0
                if is_sorted & (highest - lowest >= FEW) & (highest < BLOCK):
                    b_runs += _sum_runs(b_sum, b_bucket, 0, BLOCK)
                else:
                    for i_k in range(lowest, highest + 1):
                        in_bucket = tl.sum(tl.sum(tl.where(b_bucket == i_k, b_sum, 0.0), axis=1), axis=0)
                        b_hist += tl.where(o_k == i_k, in_bucket, 0.0)
    i_program = i_diagonal * tl.num_programs(0) + i_chunk
    if HAS_POSITION:
        o_tile = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(p_by_distance + i_program.to(tl.int64) * BLOCK * BLOCK + o_tile, b_distance * scale)
    if HAS_TIME:
        tl.store(p_by_bucket + i_program * (BLOCK_K + BLOCK) + o_k, b_hist * scale)
        tl.store(p_by_bucket + i_program * (BLOCK_K + BLOCK) + BLOCK_K + o_run, b_runs * scale)


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
def _bucket_sum_kernel(p_rows, p_d_time, R, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr):
    """One bucket's sum over what all programs left, in a fixed order: what is in it, and what is in it or above it less
    what is above it."""
    i_k = tl.program_id(0)
    b_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    b_above = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        p = p_rows + o_r * (BLOCK_K + BLOCK) + i_k
        b_sum += tl.load(p, mask=o_r < R, other=0.0)
        b_sum += tl.load(p + BLOCK_K, mask=(o_r < R) & (i_k < BLOCK), other=0.0)
        b_above += tl.load(p + BLOCK_K + 1, mask=(o_r < R) & (i_k + 1 < BLOCK), other=0.0)
    tl.store(p_d_time + i_k, tl.sum(b_sum, axis=0) - tl.sum(b_above, axis=0))


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Spans, n: int, bias: Bias, most_bytes: int
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, views into one [T, 3, H, D], zero outside of all sequences; d position and d time, or None.

    most_bytes: for the gradient of the scores, if it is to be kept between kernels.
    """
    T, H, D = q.shape
    B, S = len(spans.lengths_B), row_stride(spans.max_len)
    joint = (torch.empty if spans.is_complete else torch.zeros)((T, 3, H, D), dtype=q.dtype, device=q.device)
    dq, dk, dv = joint.unbind(1)
    d_position, d_time = (None if w is None else torch.zeros_like(w) for w in (bias.position, bias.time))
    if not (T and B):
        return dq, dk, dv, d_position, d_time
    has_bias = d_position is not None or d_time is not None
    group = GROUPS if D <= 64 and H % 2 == 0 else 1
    keep = has_bias and B * (H // group) * S * S * q.element_size() <= most_bytes
    ds = torch.empty((B, H // group, S, S) if keep else (0,), dtype=q.dtype, device=q.device)
    inputs, rest = (q, k, v, dy), (*bias.pointers(q), spans.starts_B, spans.lengths_B)
    rows, heads = [x.stride(0) for x in (*inputs, dq)], [x.stride(1) for x in (*inputs, dq)]
    shared = (*sheet_strides(spans, bias), *shared_arguments(spans, n, bias))
    constants = tile(q, spans, wide_stages=1)
    grid = (S // constants["BLOCK"], H, B)
    _query_kernel[(grid[0], H // group, B)](
        *inputs, dq, ds, *rest, *rows, *heads, *shared, KEEP=keep, GROUP=group, **bias.constants(), **constants
    )
    _key_kernel[grid](*inputs, dk, dv, *rest, *rows, *heads, *shared, **bias.constants(), **constants)
    if has_bias:
        _backward_bias(dy, q, k, v, ds if keep else None, spans, n, bias, d_position, d_time)
    return dq, dk, dv, d_position, d_time


def _backward_bias(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, ds: Tensor | None, spans: Spans, n: int, bias: Bias,
    d_position: Tensor | None, d_time: Tensor | None,
) -> None:  # fmt: skip
    """Fill the gradients of the position and of the time weights."""
    B = len(spans.lengths_B)
    constants = tile(q, spans, warps=8)
    block = constants["BLOCK"]
    tiles = triton.cdiv(spans.max_len, block)
    chunks = min(B, max(1, PROGRAMS // tiles))
    by_distance = torch.empty((tiles * chunks if d_position is not None else 0, block, block), device=q.device)
    block_k = 0 if bias.time is None else triton.next_power_of_2(len(bias.time))
    by_bucket = torch.empty((tiles * chunks if d_time is not None else 0, block_k + block), device=q.device)
    inputs = (q, k, v, dy)
    _bias_kernel[(chunks, tiles)](
        *inputs, q if ds is None else ds, by_distance, by_bucket, *bias.pointers(q), spans.starts_B, spans.lengths_B,
        *(x.stride(0) for x in inputs), *(x.stride(1) for x in inputs),
        *sheet_strides(spans, bias), *shared_arguments(spans, n, bias), B, tiles,
        H=q.shape[1] if ds is None else ds.shape[1], KEEP=ds is not None, BLOCK_K=max(block_k, 1),
        **bias.constants(), **constants,
    )  # fmt: skip
    if d_position is not None:
        L, centre, *_ = shared_arguments(spans, n, bias)
        _distance_kernel[(L,)](by_distance, d_position, chunks, tiles, L, centre, BLOCK=block, BLOCK_C=16)
    if d_time is not None:
        _bucket_sum_kernel[(len(d_time),)](by_bucket, d_time, tiles * chunks, BLOCK_K=block_k, BLOCK=block, BLOCK_R=256)
