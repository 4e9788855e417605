"""The fused HSTU attention, backward: scores are computed again in tiles, none of them are kept from the forward.

A tile of keys walks over the queries after it for dk and dv, on transposed scores, so that no product waits for a
transposition. It also writes the gradient of the scores in the scores' dtype, where that fits a budget. dq is then a
product of that gradient with the keys (attention/kept.py), and the gradients of the bias weights are sums of it
(attention/bias_gradient.py). Where it does not fit, a tile of queries walks over the keys before it, computes the
gradient of the scores once more, and writes its sum over the heads that the program has. Sequences of one tile need
none of that (attention/short.py). No atomics, so gradients are deterministic.

attention/arguments.py explains the arguments. p_ds is the kept gradient of the scores [B, H, S keys, S queries],
without the factor 1 / n; dq, dk and dv are views of one tensor and share the strides s_dq_t and s_dq_h.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, S = row_stride(L), T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.attention import bias_gradient, kept
from trope.kernels.attention.arguments import Bias, heads_of, kept_bytes, row_stride, strides, tile
from trope.kernels.attention.short import is_short, short_kernel
from trope.kernels.attention.tiles import (
    BiasInputs,
    Pairs,
    bias_tile,
    dot,
    load_heads,
    score_gradient,
    store_tile,
    unit_tile,
    with_one,
    zeros,
)
from trope.kernels.limits import shared_memory
from trope.kernels.sequence_bounds import SequenceBounds

# Numbers of a token that a program has of all its heads together, where the gradient of the scores is not kept. On an
# H200 (results/attention-h200.txt) two heads of 32 are faster than one; four spill registers.
SHARED_WIDTH = 64


@triton.jit
def _query_kernel(
    p_q, p_k, p_v, p_dy, p_dq, p_strips,
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q_t, s_k_t, s_v_t, s_dy_t, s_dq_t, s_q_h, s_k_h, s_v_h, s_dy_h, s_dq_h, s_row, s_sheet, s_group,
    L, centre, last, scale, first, TILES,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, SUM: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (H / HEADS, units): dq of one tile, from scores computed once more; if SUM also a strip of their gradient,
    summed over the heads."""
    i_group, i_unit = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)  # longest walks first
    i_b, i_m = (first + i_unit) // TILES, (first + i_unit) % TILES
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    bias = BiasInputs(p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, s_row, s_sheet, L, centre, last)
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < length
    i_h = i_group * HEADS
    b_q = load_heads(p_q, i_h, start + o_m, m_m, s_q_t, s_q_h, HEADS, D, BLOCK_D)
    b_dy = load_heads(p_dy, i_h, start + o_m, m_m, s_dy_t, s_dy_h, HEADS, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    b_dq = zeros(HEADS, BLOCK, BLOCK_D)
    p_strip = p_strips + i_group * s_group + i_unit.to(tl.int64) * BLOCK * s_row
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_k = load_heads(p_k, i_h, start + o_n, m_n, s_k_t, s_k_h, HEADS, D, BLOCK_D)
        b_v = load_heads(p_v, i_h, start + o_n, m_n, s_v_t, s_v_h, HEADS, D, BLOCK_D)
        b_bias = bias_tile(
            b_unit, bias, Pairs(i_b, start, o_m, o_n, m_m, m_n),
            HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED, SHEET=SHEET, FAST=FAST, TRANSPOSED=False,
        )  # fmt: skip
        b_next = ()
        b_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for i in tl.static_range(HEADS):
            _, b_ds = score_gradient(b_q[i], b_k[i], b_v[i], b_dy[i], b_bias, FAST=FAST, TRANSPOSED=False)
            b_sum += b_ds
            b_next = with_one(b_next, b_dq[i] + dot(b_ds.to(b_k[i].dtype), b_k[i], FAST, "ieee"))
        b_dq = b_next
        if SUM:
            p_tile = p_strip + tl.arange(0, BLOCK)[:, None] * s_row + o_n[None, :]
            tl.store(p_tile, b_sum.to(p_strips.dtype.element_ty))
    for i in tl.static_range(HEADS):
        store_tile(p_dq + (i_h + i) * s_dq_h, b_dq[i] * scale, start + o_m, m_m, s_dq_t, D, BLOCK_D)


@triton.jit
def _key_kernel(
    p_q, p_k, p_v, p_dy, p_dk, p_dv, p_ds, p_position, p_time, p_times, p_query_times, p_buckets, p_sheet,
    p_starts, p_lengths,
    s_q_t, s_k_t, s_v_t, s_dy_t, s_dq_t, s_q_h, s_k_h, s_v_h, s_dy_h, s_dq_h, s_row, s_sheet, L, centre, last, scale,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, KEEP: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, H / HEADS, B): dk and dv of one tile, of HEADS heads; if KEEP also the gradient of its
    scores."""
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64) * HEADS, tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_n * BLOCK >= length:
        return
    bias = BiasInputs(p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, s_row, s_sheet, L, centre, last)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < length
    b_k = load_heads(p_k, i_h, start + o_n, m_n, s_k_t, s_k_h, HEADS, D, BLOCK_D)
    b_v = load_heads(p_v, i_h, start + o_n, m_n, s_v_t, s_v_h, HEADS, D, BLOCK_D)
    b_unit = unit_tile(p_sheet, BLOCK)
    b_dk, b_dv = zeros(HEADS, BLOCK, BLOCK_D), zeros(HEADS, BLOCK, BLOCK_D)
    p_tiles = p_ds + (i_b.to(tl.int64) * tl.num_programs(1) * HEADS + i_h) * s_row * s_row
    for i_m in range(i_n, tl.cdiv(length, BLOCK)):
        o_m = i_m * BLOCK + tl.arange(0, BLOCK)
        m_m = o_m < length
        b_q = load_heads(p_q, i_h, start + o_m, m_m, s_q_t, s_q_h, HEADS, D, BLOCK_D)
        b_dy = load_heads(p_dy, i_h, start + o_m, m_m, s_dy_t, s_dy_h, HEADS, D, BLOCK_D)
        b_bias = bias_tile(
            b_unit, bias, Pairs(i_b, start, o_m, o_n, m_m, m_n),
            HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED, SHEET=SHEET, FAST=FAST, TRANSPOSED=True,
        )  # fmt: skip
        b_next_dk, b_next_dv = (), ()
        for i in tl.static_range(HEADS):
            b_a, b_ds = score_gradient(b_q[i], b_k[i], b_v[i], b_dy[i], b_bias, FAST=FAST, TRANSPOSED=True)
            b_ds = b_ds.to(b_q[i].dtype)
            if KEEP:
                tl.store(p_tiles + i * s_row * s_row + o_n[:, None] * s_row + o_m[None, :], b_ds)
            b_next_dv = with_one(b_next_dv, b_dv[i] + dot(b_a.to(b_dy[i].dtype), b_dy[i], FAST, "ieee"))
            b_next_dk = with_one(b_next_dk, b_dk[i] + dot(b_ds, b_q[i], FAST, "ieee"))
        b_dk, b_dv = b_next_dk, b_next_dv
    for i in tl.static_range(HEADS):
        store_tile(p_dk + (i_h + i) * s_dq_h, b_dk[i] * scale, start + o_n, m_n, s_dq_t, D, BLOCK_D)
        store_tile(p_dv + (i_h + i) * s_dq_h, b_dv[i] * scale, start + o_n, m_n, s_dq_t, D, BLOCK_D)


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias, most_bytes: int,
    late: Late = IN_PLACE,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk and dv, views into one [T, 3, H, D], zero outside of all sequences; d position and d time, or None.

    most_bytes: for the gradient of the scores, if it is to be kept between kernels.
    late: where the gradients of the bias weights may be added up.
    """
    T, H, D = q.shape
    B, S = len(bounds.lengths_B), row_stride(bounds.max_len)
    joint = (torch.empty if bounds.is_complete else torch.zeros)((T, 3, H, D), dtype=q.dtype, device=q.device)
    dq, dk, dv = joint.unbind(1)
    has_bias = bias.position is not None or bias.time is not None
    if not (T and B):
        return dq, dk, dv, *(None if w is None else torch.zeros_like(w) for w in (bias.position, bias.time))
    shared = {
        "p_q": q,
        "p_k": k,
        "p_v": v,
        "p_dy": dy,
        **strides(q=q, k=k, v=v, dy=dy, dq=dq),
        **bias.arguments(q, bounds),
        "scale": 1.0 / n,
        # One stage for wide heads, whose tiles fill the shared memory; no file holds a comparison.
        **tile(q, bounds, wide_stages=1),
    }
    if is_short(q, bounds):
        alone = {**shared, "p_dq": dq, "p_dk": dk, "p_dv": dv, "SUM": has_bias, "num_stages": 1}

        def fill_short(strips: Tensor, first: int, units: int, tiles: int) -> None:
            short_kernel[(H, units)](p_strips=strips, s_group=strips.stride(0), first=first, **alone)

        return dq, dk, dv, *bias_gradient.sum_strips(fill_short, H, q.dtype, bounds, n, bias, late)
    keep = kept_bytes(q.shape[1], q, bounds) <= most_bytes
    ds = torch.empty((B, H, S, S) if keep else (0,), dtype=q.dtype, device=q.device)
    together = heads_of(q, 0 if keep else SHARED_WIDTH)
    groups = H // together["HEADS"]
    _key_kernel[(S // shared["BLOCK"], groups, B)](p_dk=dk, p_dv=dv, p_ds=ds, KEEP=keep, **shared, **together)
    if keep and has_bias and kept.is_joint(q, S // shared["BLOCK"], shared_memory(q.device)):
        fill_both = kept.query_and_sum(ds, k, dq, bounds, n)
        return dq, dk, dv, *bias_gradient.sum_strips(fill_both, 1, torch.float32, bounds, n, bias, late)
    if keep:
        kept.query_from_kept(ds, k, dq, bounds, n)
        return dq, dk, dv, *(bias_gradient.from_kept(ds, bounds, n, bias, late) if has_bias else (None, None))

    def fill(strips: Tensor, first: int, units: int, tiles: int) -> None:
        _query_kernel[(groups, units)](
            p_dq=dq,
            p_strips=strips,
            s_group=strips.stride(0),
            first=first,
            TILES=tiles,
            SUM=has_bias,
            **shared,
            **together,
        )

    return dq, dk, dv, *bias_gradient.sum_strips(fill, groups, q.dtype, bounds, n, bias, late)
