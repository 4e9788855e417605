"""The fused HSTU attention, backward: scores are computed again in tiles, none of them are kept from the forward.

A tile of keys walks over the queries after it for dk and dv, on transposed scores, so that no product waits for a
transposition; it writes down the gradient of the scores in bf16, where that fits a fixed budget. dq is then a product
of that with the keys, and the gradients of the bias weights are sums of it (attention/bias_gradient.py). Where it does
not fit, a tile of queries walks over the keys before it and computes the gradient of the scores once more. No atomics,
so gradients are deterministic.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention import bias_gradient as attention_bias_gradient
from trope.kernels.attention.triton import (
    Bias,
    dot,
    load_tile,
    row_stride,
    score_gradient,
    shared_arguments,
    sheet_strides,
    tile,
    unit_tile,
)
from trope.kernels.sequence_bounds import SequenceBounds


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
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
    b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    b_dq = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_tile(p_k + i_h * s_kh, start + o_n, m_n, s_k, D, BLOCK_D)
        b_v = load_tile(p_v + i_h * s_vh, start + o_n, m_n, s_v, D, BLOCK_D)
        _, b_ds = score_gradient(
            b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
            o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST,
            False)  # fmt: skip
        b_dq += dot(b_ds.to(b_k.dtype), b_k, FAST)
    _store_tile(p_dq + i_h * s_dqh, b_dq * scale, start + o_m, m_m, s_dq, D, BLOCK_D)


@triton.jit
def _query_from_kept_kernel(
    p_ds, p_k, p_dq, p_starts, p_lengths, s_k, s_dq, s_kh, s_dqh, s_row, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dq from the gradient of the scores that the key kernel kept, [keys, queries]."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    b_dq = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    p_tiles = p_ds + (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * s_row * s_row
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        b_ds = tl.load(p_tiles + o_n[:, None] * s_row + o_m[None, :])
        b_k = load_tile(p_k + i_h * s_kh, start + o_n, o_n < length, s_k, D, BLOCK_D)
        b_dq += dot(tl.trans(b_ds), b_k, FAST)
    _store_tile(p_dq + i_h * s_dqh, b_dq * scale, start + o_m, o_m < length, s_dq, D, BLOCK_D)


@triton.jit
def _key_kernel(
    p_q, p_k, p_v, p_dy, p_dk, p_dv, p_ds, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet,
    p_starts, p_lengths,
    s_q, s_k, s_v, s_dy, s_dk, s_qh, s_kh, s_vh, s_dyh, s_dkh, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, KEEP: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
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
    p_tiles = p_ds + (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * s_row * s_row
    for i_m in range(i_n, tl.cdiv(length, BLOCK)):
        o_m = i_m * BLOCK + tl.arange(0, BLOCK)
        m_m = o_m < length
        b_q = load_tile(p_q + i_h * s_qh, start + o_m, m_m, s_q, D, BLOCK_D)
        b_dy = load_tile(p_dy + i_h * s_dyh, start + o_m, m_m, s_dy, D, BLOCK_D)
        b_a, b_ds = score_gradient(
            b_q, b_k, b_v, b_dy, b_unit, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, i_b, start,
            o_m, o_n, m_m, m_n, s_row, s_sheet, L, centre, last, HAS_POSITION, HAS_TIME, CACHED, SHEET, FAST,
            True)  # fmt: skip
        b_ds = b_ds.to(b_q.dtype)
        if KEEP:
            tl.store(p_tiles + o_n[:, None] * s_row + o_m[None, :], b_ds)
        b_dv += dot(b_a.to(b_dy.dtype), b_dy, FAST)
        b_dk += dot(b_ds, b_q, FAST)
    _store_tile(p_dk + i_h * s_dkh, b_dk * scale, start + o_n, m_n, s_dk, D, BLOCK_D)
    _store_tile(p_dv + i_h * s_dkh, b_dv * scale, start + o_n, m_n, s_dk, D, BLOCK_D)


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias, most_bytes: int
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, views into one [T, 3, H, D], zero outside of all sequences; d position and d time, or None.

    most_bytes: for the gradient of the scores, if it is to be kept between kernels.
    """
    T, H, D = q.shape
    B, S = len(bounds.lengths_B), row_stride(bounds.max_len)
    joint = (torch.empty if bounds.is_complete else torch.zeros)((T, 3, H, D), dtype=q.dtype, device=q.device)
    dq, dk, dv = joint.unbind(1)
    d_position, d_time = (None if w is None else torch.zeros_like(w) for w in (bias.position, bias.time))
    if not (T and B):
        return dq, dk, dv, d_position, d_time
    has_bias = d_position is not None or d_time is not None
    keep = B * H * S * S * q.element_size() <= most_bytes
    ds = torch.empty((B, H, S, S) if keep else (0,), dtype=q.dtype, device=q.device)
    inputs, rest = (q, k, v, dy), (*bias.pointers(q), bounds.starts_B, bounds.lengths_B)
    rows, heads = [x.stride(0) for x in (*inputs, dq)], [x.stride(1) for x in (*inputs, dq)]
    shared = (*sheet_strides(bounds, bias), *shared_arguments(bounds, n, bias))
    constants = tile(q, bounds, wide_stages=1)
    grid = (S // constants["BLOCK"], H, B)
    _key_kernel[grid](*inputs, dk, dv, ds, *rest, *rows, *heads, *shared, KEEP=keep, **bias.constants(), **constants)
    if not keep:
        _query_kernel[grid](*inputs, dq, *rest, *rows, *heads, *shared, **bias.constants(), **constants)
        if has_bias:
            attention_bias_gradient.from_inputs(dy, q, k, v, bounds, n, bias, d_position, d_time)
        return dq, dk, dv, d_position, d_time
    strides = (k.stride(0), dq.stride(0), k.stride(1), dq.stride(1), S, 1.0 / n)
    _query_from_kept_kernel[grid](
        ds, k, dq, bounds.starts_B, bounds.lengths_B, *strides, **constants | {"num_stages": 3}
    )
    if has_bias:
        attention_bias_gradient.from_kept(ds, bounds, n, bias, d_position, d_time)
    return dq, dk, dv, d_position, d_time
