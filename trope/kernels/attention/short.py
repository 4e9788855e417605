# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The fused HSTU attention, backward, for sequences of one tile: nothing is kept or computed twice.

All scores of a head lie in one tile, so the program that has them gives dq, dk and dv. It also writes the gradient of
the scores, from which attention/bias_gradient.py has the gradients of the bias weights. That is one launch where
attention/backward.py needs three. A program for all heads of a sequence, which sums that gradient in registers, takes
44 microseconds on an H200 beside the table's update (128 x 50, 4 heads of 128): half of the GPU is then idle.

Heads of 16 and 32 numbers take the three kernels: on an H200 Triton 3.6 makes code of this one that gives wrong
gradients for them, every time the same (results/short-h200.txt). Heads of 64 and 128 agree with the reference
(tests/test_gpu_attention.py).
float32 takes the three kernels too; on a GPU nobody has looked at it here.

attention/arguments.py explains the arguments; p_strips is as in attention/bias_gradient.py, a group for each head. dq,
dk and dv are views of one tensor and share the strides s_dq_t and s_dq_h.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention.arguments import block_of
from trope.kernels.attention.tiles import (
    BiasInputs,
    Pairs,
    bias_tile,
    dot,
    load_tile,
    score_gradient,
    store_tile,
    unit_tile,
)
from trope.kernels.sequence_bounds import SequenceBounds

# Numbers of a head. Narrower ones come out wrong, see above; q, k, v and dy of wider ones do not fit the shared memory
# of all GPUs beside the scores.
NARROWEST, WIDEST = 64, 128


@triton.jit
def short_kernel(
    p_q, p_k, p_v, p_dy, p_dq, p_dk, p_dv, p_strips,
    p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, p_starts, p_lengths,
    s_q_t, s_k_t, s_v_t, s_dy_t, s_dq_t, s_q_h, s_k_h, s_v_h, s_dy_h, s_dq_h, s_row, s_sheet, s_group,
    L, centre, last, scale, first,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr, SUM: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (H, sequences from `first` on): dq, dk and dv of one head of a sequence; if SUM also its strip."""
    i_h, i_unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = first + i_unit
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if length == 0:
        return
    bias = BiasInputs(p_position, p_time, p_times, p_query_times, p_buckets, p_sheet, s_row, s_sheet, L, centre, last)
    o = tl.arange(0, BLOCK)
    m, o_t = o < length, start + o
    b_bias = bias_tile(
        unit_tile(p_sheet, BLOCK), bias, Pairs(i_b, start, o, o, m, m),
        HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED, SHEET=SHEET, FAST=FAST, TRANSPOSED=False,
    )  # fmt: skip
    b_q = load_tile(p_q + i_h * s_q_h, o_t, m, s_q_t, D, BLOCK_D)
    b_k = load_tile(p_k + i_h * s_k_h, o_t, m, s_k_t, D, BLOCK_D)
    b_v = load_tile(p_v + i_h * s_v_h, o_t, m, s_v_t, D, BLOCK_D)
    b_dy = load_tile(p_dy + i_h * s_dy_h, o_t, m, s_dy_t, D, BLOCK_D)
    b_a, b_ds = score_gradient(b_q, b_k, b_v, b_dy, b_bias, FAST=FAST, TRANSPOSED=False)
    b_dv = dot(tl.trans(b_a.to(b_dy.dtype)), b_dy, FAST, "ieee")
    store_tile(p_dv + i_h * s_dq_h, b_dv * scale, o_t, m, s_dq_t, D, BLOCK_D)
    b_ds = b_ds.to(b_q.dtype)
    if SUM:
        p_strip = p_strips + i_h * s_group + i_unit.to(tl.int64) * BLOCK * s_row
        tl.store(p_strip + o[:, None] * s_row + o[None, :], b_ds)
    store_tile(p_dq + i_h * s_dq_h, dot(b_ds, b_k, FAST, "ieee") * scale, o_t, m, s_dq_t, D, BLOCK_D)
    b_dk = dot(tl.trans(b_ds), b_q, FAST, "ieee")
    store_tile(p_dk + i_h * s_dq_h, b_dk * scale, o_t, m, s_dq_t, D, BLOCK_D)


def is_short(q: Tensor, bounds: SequenceBounds) -> bool:
    """Whether every head of every sequence is one tile that this kernel takes."""
    width = max(16, triton.next_power_of_2(q.shape[2]))
    return bounds.max_len <= block_of(bounds.max_len) and q.element_size() == 2 and NARROWEST <= width <= WIDEST
