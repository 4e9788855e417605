# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""One of v, q and k for a few tokens: the device functions behind both silu_rotate kernels.

The names of the arguments are explained in silu_rotate/triton.py. `Phases` carries the pointers of one side, q or k,
down to where angles are formed.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, H heads, D head dim, P planes, C coordinates.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trope.kernels.rotary.planes import (
    cos_sin,
    cos_sin_quarters,
    frequencies,
    load_pair,
    offsets,
    store_frequency_row,
    store_pair,
)
from trope.kernels.silu import silu, silu_and_slope


class Phases(NamedTuple):
    """What the angles of q or of k are formed from."""

    p_coords: Any
    p_freqs: Any
    p_slopes: Any
    p_deltas: Any
    p_origin: Any
    p_betas: Any


@triton.jit
def angles(phases, o_t, m_t, o_p, T, P: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr):
    """cos and sin [tokens, 1, planes], the same for every head."""
    m_p = o_p < P
    if LINEAR:
        b_f = frequencies(phases.p_freqs, phases.p_slopes, phases.p_deltas, o_p, m_p, LINEAR=True)
        b_t = (tl.load(phases.p_coords + o_t, mask=m_t, other=0) - tl.load(phases.p_origin)).to(tl.float64)
        b_cos, b_sin = cos_sin_quarters(b_t[:, None] * (4.0 * b_f)[None, :])
    else:
        b_cos, b_sin = cos_sin(
            p_coords=phases.p_coords, p_freqs=phases.p_freqs, p_betas=phases.p_betas, o_t=o_t, m_t=m_t, o_p=o_p,
            m_p=m_p, T=T, P=P, C=C, PAPER_FP32=PAPER_FP32,
        )  # fmt: skip
    return b_cos[:, None, :], b_sin[:, None, :]


@triton.jit
def forward_part(
    p_pre, p_out, phases, i_part, o_t, T,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """SiLU, and if ROTATE the rotation, of v (i_part 0), q (1) or k (2) of the tokens o_t."""
    o_p = tl.arange(0, BLOCK_P)
    m_t = o_t < T
    o_row_x = o_t.to(tl.int64) * (4 * H * D) + (1 + i_part) * (H * D)
    o_row_y = o_t.to(tl.int64) * (3 * H * D) + i_part * (H * D)
    # As in rotary/triton.py: a group of heads is loaded before the group ahead of it is stored.
    o_x, m_h = offsets(o_row_x, D, 0, H, GROUP)
    b_next0, b_next1 = load_pair(p_pre, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
    if ROTATE:
        b_cos, b_sin = angles(phases, o_t, m_t, o_p, T, P=P, C=C, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR)
    for i_g in tl.static_range((H + GROUP - 1) // GROUP):
        o_x, m_h = offsets(o_row_x, D, i_g, H, GROUP)
        o_y, _ = offsets(o_row_y, D, i_g, H, GROUP)
        m = m_t[:, None, None] & m_h
        b_0, b_1 = silu(b_next0), silu(b_next1)
        if (i_g + 1) * GROUP < H:
            o_next, m_h = offsets(o_row_x, D, i_g + 1, H, GROUP)
            b_next0, b_next1 = load_pair(p_pre, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_0, b_1 = b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos
        store_pair(p_out, b_0, b_1, o_y, m, o_p, P, INTERLEAVED)
        if BLOCK_REST:
            o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
            b_y = silu(tl.load(p_pre + o_x + o_d, mask=m & (o_d < D), other=0.0))
            tl.store(p_out + o_y + o_d, b_y.to(p_out.dtype.element_ty), mask=m & (o_d < D))


@triton.jit
def backward_part(
    p_pre, p_g, p_dpre, p_partial, phases, i_part, i_block, T, TILES, s_g_t, s_g_h,
    HAS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of one part of TILES tiles, and if FREQ_GRAD one partial row of the frequency gradient.

    HAS: whether the part has a gradient p_g; its strides are s_g_t and s_g_h.
    """
    o_p = tl.arange(0, BLOCK_P)
    if ROTATE and FREQ_GRAD:
        # Sums of dPhi * coordinate, kept apart per token, head and plane until the end, as in rotary/triton.py.
        b_df0 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
        b_df1 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (i_block * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        m_g = m_t & HAS  # a gradient that is missing is zero, and not read
        o_row, o_row_g = o_t.to(tl.int64) * (4 * H * D) + (1 + i_part) * (H * D), o_t.to(tl.int64) * s_g_t
        o_x, m_h = offsets(o_row, D, 0, H, GROUP)
        o_g, _ = offsets(o_row_g, s_g_h, 0, H, GROUP)
        b_next_x0, b_next_x1 = load_pair(p_pre, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_next_g0, b_next_g1 = load_pair(p_g, o_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_cos, b_sin = angles(phases, o_t, m_t, o_p, T, P=P, C=C, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR)
            b_dphi = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float32)
        for i_g in tl.static_range((H + GROUP - 1) // GROUP):
            o_x, m_h = offsets(o_row, D, i_g, H, GROUP)
            o_g, _ = offsets(o_row_g, s_g_h, i_g, H, GROUP)
            m = m_t[:, None, None] & m_h
            m_here = m_g[:, None, None] & m_h
            b_y0, b_slope0 = silu_and_slope(b_next_x0)
            b_y1, b_slope1 = silu_and_slope(b_next_x1)
            b_g0, b_g1 = b_next_g0.to(tl.float32), b_next_g1.to(tl.float32)
            if (i_g + 1) * GROUP < H:
                o_next, m_h = offsets(o_row, D, i_g + 1, H, GROUP)
                o_next_g, _ = offsets(o_row_g, s_g_h, i_g + 1, H, GROUP)
                b_next_x0, b_next_x1 = load_pair(p_pre, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
                b_next_g0, b_next_g1 = load_pair(p_g, o_next_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
            if ROTATE:
                b_g0, b_g1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
                # Algorithm 3's dPhi, the cross product of output and gradient, with both turned back.
                b_dphi += b_y0 * b_g1 - b_y1 * b_g0
            store_pair(p_dpre, b_g0 * b_slope0, b_g1 * b_slope1, o_x, m, o_p, P, INTERLEAVED)
            if BLOCK_REST:
                o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
                _, b_slope = silu_and_slope(tl.load(p_pre + o_x + o_d, mask=m & (o_d < D), other=0.0))
                b_g = tl.load(p_g + o_g + o_d, mask=m_here & (o_d < D), other=0.0).to(tl.float32)
                tl.store(p_dpre + o_x + o_d, (b_g * b_slope).to(p_dpre.dtype.element_ty), mask=m & (o_d < D))
        if ROTATE and FREQ_GRAD:
            b_dphi64 = b_dphi.to(tl.float64)
            b_t = tl.load(phases.p_coords + o_t, mask=m_t, other=0)
            if LINEAR:
                b_t -= tl.load(phases.p_origin)
            b_df0 += b_dphi64 * b_t.to(tl.float64)[:, None, None]
            if C == 2:
                b_df1 += b_dphi64 * tl.load(phases.p_coords + T + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
    if ROTATE and FREQ_GRAD:
        p_row = p_partial + i_block * C * P
        store_frequency_row(p_row, b_df0, phases.p_betas, o_p, P, PAPER_FP32)
        if C == 2:
            store_frequency_row(p_row + P, b_df1, phases.p_betas, o_p, P, PAPER_FP32)
