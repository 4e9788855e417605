# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""SiLU and rotation of HSTU's v, q and k in one pass, and its backward with the frequencies' gradient inside.

Notable: a program takes one of v, q, k for a few tokens; u is left to the gate, forward and backward, and passes as a
view; cos and sin are formed in registers and serve all heads; the backward needs the projection and the gradients,
neither SiLU's output nor the angles; gradients may be strided views, and one that is missing is a masked load; each
program of q and k writes a partial row of the frequency gradient and rows are summed in a fixed order, so gradients are
deterministic; frequencies that are linear in their coefficients are formed, and their gradient carried on, inside these
kernels too.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, F = 4 H D, H heads, D head dim, P planes, C coordinates.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.rotary.triton import (
    _cos_sin,
    _cos_sin_quarters,
    _load_pair,
    _offsets,
    _store_frequency_row,
    _store_pair,
    _sum_rows_kernel,
)
from trope.kernels.silu import silu, silu_and_slope
from trope.kernels.silu_rotate.reference import Turns

ROWS = 1024  # partial rows of the frequency gradient per side, at most; fixed, so that sums do not depend on the GPU


@triton.jit
def _angles(p_coords, p_freqs, p_slopes, p_deltas, p_t0, p_betas, o_t, m_t, o_p, T,
            P: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr):  # fmt: skip
    """cos and sin [tokens, planes]; the frequency is freqs + slopes * deltas if LINEAR."""
    m_p = o_p < P
    if LINEAR:
        b_f = tl.load(p_freqs + o_p, mask=m_p, other=0.0)
        b_delta = tl.load(p_deltas + o_p, mask=m_p, other=0.0).to(tl.float64)
        b_f += tl.load(p_slopes + o_p, mask=m_p, other=0.0) * b_delta
        b_t = (tl.load(p_coords + o_t, mask=m_t, other=0) - tl.load(p_t0)).to(tl.float64)
        b_cos, b_sin = _cos_sin_quarters(b_t[:, None] * (4.0 * b_f)[None, :])
    else:
        b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, m_p, T, P, C, PAPER_FP32)
    return b_cos[:, None, :], b_sin[:, None, :]


@triton.jit
def _sum_coefficients_kernel(p_rows, p_slopes_q, p_slopes_k, p_sum, R, P, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """The gradient of the coefficients [side, P]: rows [side, R, P] summed in a fixed order, times the slope."""
    i_side = tl.program_id(1)
    o_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    m_p = o_p < P
    p_side = p_rows + i_side * R * P
    b_sum = tl.zeros((BLOCK_R, BLOCK_P), dtype=tl.float64)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_side + o_r[:, None] * P + o_p[None, :], mask=(o_r < R)[:, None] & m_p[None, :], other=0.0)
    if i_side == 0:
        b_slope = tl.load(p_slopes_q + o_p, mask=m_p, other=0.0)
    else:
        b_slope = tl.load(p_slopes_k + o_p, mask=m_p, other=0.0)
    tl.store(p_sum + i_side * P + o_p, (tl.sum(b_sum, axis=0) * b_slope).to(tl.float32), mask=m_p)


@triton.jit
def _forward_part(
    p_x, p_y, i_part, o_t, p_coords, p_freqs, p_slopes, p_deltas, p_t0, p_betas, T,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    o_p = tl.arange(0, BLOCK_P)
    m_t = o_t < T
    o_row_x = o_t.to(tl.int64) * (4 * H * D) + (1 + i_part) * (H * D)
    o_row_y = o_t.to(tl.int64) * (3 * H * D) + i_part * (H * D)
    # As in rotary_triton: a group of heads is loaded before the group ahead of it is stored.
    o_x, m_h = _offsets(o_row_x, D, 0, H, GROUP)
    b_next0, b_next1 = _load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
    if ROTATE:
        b_cos, b_sin = _angles(
            p_coords, p_freqs, p_slopes, p_deltas, p_t0, p_betas, o_t, m_t, o_p, T, P, C, PAPER_FP32, LINEAR
        )
    for i_g in tl.static_range((H + GROUP - 1) // GROUP):
        o_x, m_h = _offsets(o_row_x, D, i_g, H, GROUP)
        o_y, _ = _offsets(o_row_y, D, i_g, H, GROUP)
        m = m_t[:, None, None] & m_h
        b_0, b_1 = silu(b_next0), silu(b_next1)
        if (i_g + 1) * GROUP < H:
            o_next, m_h = _offsets(o_row_x, D, i_g + 1, H, GROUP)
            b_next0, b_next1 = _load_pair(p_x, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_0, b_1 = b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos
        _store_pair(p_y, b_0, b_1, o_y, m, o_p, P, INTERLEAVED)
        if BLOCK_REST:
            o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
            b_y = silu(tl.load(p_x + o_x + o_d, mask=m & (o_d < D), other=0.0))
            tl.store(p_y + o_y + o_d, b_y.to(p_y.dtype.element_ty), mask=m & (o_d < D))


@triton.jit
def _forward_kernel(
    p_x, p_y, p_cq, p_ck, p_fq, p_fk, p_sq, p_sk, p_aq, p_ak, p_t0, p_betas, T,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i_part = tl.program_id(0) % 3
    o_t = tl.program_id(0) // 3 * BLOCK_T + tl.arange(0, BLOCK_T)
    if ROTATE:
        if i_part == 1:
            _forward_part(p_x, p_y, i_part, o_t, p_cq, p_fq, p_sq, p_aq, p_t0, p_betas, T, H, D, P, C, True,
                          PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
        elif i_part == 2:
            _forward_part(p_x, p_y, i_part, o_t, p_ck, p_fk, p_sk, p_ak, p_t0, p_betas, T, H, D, P, C, True,
                          PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
        else:
            _forward_part(p_x, p_y, i_part, o_t, p_cq, p_fq, p_sq, p_aq, p_t0, p_betas, T, H, D, P, C, False,
                          PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
    else:
        _forward_part(p_x, p_y, i_part, o_t, p_cq, p_fq, p_sq, p_aq, p_t0, p_betas, T, H, D, P, C, False,
                      PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip


@triton.jit
def _backward_part(
    p_x, p_g, p_dx, p_partial, i_part, i_block, p_coords, p_freqs, p_slopes, p_deltas, p_t0, p_betas, T, TILES,
    s_gt, s_gh,
    HAS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    o_p = tl.arange(0, BLOCK_P)
    if ROTATE and FREQ_GRAD:
        # Sums of dPhi * coordinate, kept apart per token, head and plane until the end, as in rotary_triton.
        b_df0 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
        b_df1 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (i_block * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        m_g = m_t & HAS  # a gradient that is missing is zero, and not read
        o_row, o_row_g = o_t.to(tl.int64) * (4 * H * D) + (1 + i_part) * (H * D), o_t.to(tl.int64) * s_gt
        o_x, m_h = _offsets(o_row, D, 0, H, GROUP)
        o_g, _ = _offsets(o_row_g, s_gh, 0, H, GROUP)
        b_next_x0, b_next_x1 = _load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_next_g0, b_next_g1 = _load_pair(p_g, o_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_cos, b_sin = _angles(p_coords, p_freqs, p_slopes, p_deltas, p_t0, p_betas, o_t, m_t, o_p, T, P, C,
                                   PAPER_FP32, LINEAR)  # fmt: skip
            b_dphi = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float32)
        for i_g in tl.static_range((H + GROUP - 1) // GROUP):
            o_x, m_h = _offsets(o_row, D, i_g, H, GROUP)
            o_g, _ = _offsets(o_row_g, s_gh, i_g, H, GROUP)
            m = m_t[:, None, None] & m_h
            m_here = m_g[:, None, None] & m_h
            b_y0, b_slope0 = silu_and_slope(b_next_x0)
            b_y1, b_slope1 = silu_and_slope(b_next_x1)
            b_g0, b_g1 = b_next_g0.to(tl.float32), b_next_g1.to(tl.float32)
            if (i_g + 1) * GROUP < H:
                o_next, m_h = _offsets(o_row, D, i_g + 1, H, GROUP)
                o_next_g, _ = _offsets(o_row_g, s_gh, i_g + 1, H, GROUP)
                b_next_x0, b_next_x1 = _load_pair(p_x, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
                b_next_g0, b_next_g1 = _load_pair(p_g, o_next_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
            if ROTATE:
                b_g0, b_g1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
                # Algorithm 3's dPhi, the cross product of output and gradient, with both turned back.
                b_dphi += b_y0 * b_g1 - b_y1 * b_g0
            _store_pair(p_dx, b_g0 * b_slope0, b_g1 * b_slope1, o_x, m, o_p, P, INTERLEAVED)
            if BLOCK_REST:
                o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
                _, b_slope = silu_and_slope(tl.load(p_x + o_x + o_d, mask=m & (o_d < D), other=0.0))
                b_g = tl.load(p_g + o_g + o_d, mask=m_here & (o_d < D), other=0.0).to(tl.float32)
                tl.store(p_dx + o_x + o_d, (b_g * b_slope).to(p_dx.dtype.element_ty), mask=m & (o_d < D))
        if ROTATE and FREQ_GRAD:
            b_dphi64 = b_dphi.to(tl.float64)
            b_t = tl.load(p_coords + o_t, mask=m_t, other=0)
            if LINEAR:
                b_t -= tl.load(p_t0)
            b_df0 += b_dphi64 * b_t.to(tl.float64)[:, None, None]
            if C == 2:
                b_df1 += b_dphi64 * tl.load(p_coords + T + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
    if ROTATE and FREQ_GRAD:
        p_row = p_partial + i_block * C * P
        _store_frequency_row(p_row, b_df0, p_betas, o_p, P, PAPER_FP32)
        if C == 2:
            _store_frequency_row(p_row + P, b_df1, p_betas, o_p, P, PAPER_FP32)


@triton.jit(do_not_specialize=["BLOCKS"])
def _backward_kernel(
    p_x, p_gv, p_gq, p_gk, p_dx, p_partial, p_cq, p_ck, p_fq, p_fk, p_sq, p_sk, p_aq, p_ak, p_t0, p_betas,
    T, BLOCKS, TILES,
    s_vt, s_vh, s_qt, s_qh, s_kt, s_kh,
    HAS_V: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs of q and k may take several tiles and begin first; those of v, a tile each, fill what they leave idle.
    i_block = tl.program_id(0) // 2
    if tl.program_id(0) >= 2 * BLOCKS:
        i_tile = tl.program_id(0) - 2 * BLOCKS
        _backward_part(p_x, p_gv, p_dx, p_partial, 0, i_tile, p_cq, p_fq, p_sq, p_aq, p_t0, p_betas, T, 1,
                       s_vt, s_vh, HAS_V, H, D, P, C, False, FREQ_GRAD, PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_T,
                       BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        _backward_part(p_x, p_gq, p_dx, p_partial, 1, i_block, p_cq, p_fq, p_sq, p_aq, p_t0, p_betas, T, TILES,
                       s_qt, s_qh, HAS_Q, H, D, P, C, ROTATE, FREQ_GRAD, PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_T,
                       BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
    else:
        p_partial_k = p_partial + BLOCKS * C * P
        _backward_part(p_x, p_gk, p_dx, p_partial_k, 2, i_block, p_ck, p_fk, p_sk, p_ak, p_t0, p_betas, T, TILES,
                       s_kt, s_kh, HAS_K, H, D, P, C, ROTATE, FREQ_GRAD, PAPER_FP32, LINEAR, INTERLEAVED, BLOCK_T,
                       BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip


def _tile(planes: int, rest: int, heads: int, warps: int) -> dict[str, int]:
    """Block sizes: 32 planes in a row (128 bytes in bf16, a cache line), of several heads where heads are small, by 16
    tokens. Not more of a row: the heads that a thread meets one after the other share the angles it has computed."""
    block_p = triton.next_power_of_2(max(1, planes))
    group = min(max(1, 32 // block_p), triton.next_power_of_2(heads))
    return {
        "BLOCK_T": max(1, min(128, 512 // (block_p * group))),
        "BLOCK_P": block_p,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "GROUP": group,
        "num_warps": warps,
    }


def _strides(g_THD: Tensor) -> tuple[int, int]:
    """Of tokens and heads; of an axis of length one they mean nothing, so they get the ones of dense rows."""
    T, H, D = g_THD.shape
    return g_THD.stride(0) if T > 1 else H * D, g_THD.stride(1) if H > 1 else D


def _with_first_part(g_u: Tensor | None, pre_TF: Tensor, buffer: GradientBuffer | None) -> Tensor:
    """The projection's gradient with u's columns written: where the gate has put them, or in a tensor of its own."""
    dpre = None if buffer is None else buffer.take(g_u)
    if dpre is None:
        dpre = torch.empty_like(pre_TF)
        first = dpre[:, : dpre.shape[1] // 4]
        first.zero_() if g_u is None else first.copy_(g_u.flatten(1))
    assert dpre.shape == pre_TF.shape
    return dpre


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pre_TF: Tensor, heads: int, coords_q: Tensor | None, coords_k: Tensor | None, freqs_q: Tensor | None,
        freqs_k: Tensor | None, slopes_q: Tensor | None, slopes_k: Tensor | None, deltas_q: Tensor | None,
        deltas_k: Tensor | None, origin: Tensor | None, betas: Tensor | None, interleaved: bool,
        buffer: GradientBuffer | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        T, D = len(pre_TF), pre_TF.shape[1] // (4 * heads)
        C, P = (1, D // 2) if freqs_q is None else freqs_q.shape
        shape = {"H": heads, "D": D, "P": P, "C": C, "ROTATE": freqs_q is not None, "PAPER_FP32": betas is not None}
        shape |= {"LINEAR": slopes_q is not None, "INTERLEAVED": interleaved}
        tile = _tile(P, D - 2 * P, heads, warps=2)
        out = torch.empty((T, 3, heads, D), dtype=pre_TF.dtype, device=pre_TF.device)
        given = (coords_q, coords_k, freqs_q, freqs_k, slopes_q, slopes_k, deltas_q, deltas_k, origin, betas)
        pointers = [pre_TF if x is None else x for x in given]
        if T:
            _forward_kernel[(3 * triton.cdiv(T, tile["BLOCK_T"]),)](pre_TF, out, *pointers, T, **shape, **tile)
        ctx.save_for_backward(pre_TF, *pointers)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.buffer = shape, buffer
        return pre_TF.view(T, 4, heads, D)[:, 0], out[:, 0], out[:, 1], out[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_u: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pre_TF, *pointers = ctx.saved_tensors
        _, _, freqs_q, _, slopes_q, slopes_k, *_ = pointers
        shape = ctx.shape
        T, C, P = len(pre_TF), shape["C"], shape["P"]
        tile = _tile(P, shape["D"] - 2 * P, shape["H"], warps=4)
        freq_grad = any(ctx.needs_input_grad[4:6]) or any(ctx.needs_input_grad[8:10])
        dense = [g if g is None or g.stride(-1) == 1 else g.contiguous() for g in grads]
        strides = [s for g in dense for s in ((16, 16) if g is None else _strides(g))]
        dpre = _with_first_part(g_u, pre_TF, ctx.buffer)
        all_tiles = triton.cdiv(T, tile["BLOCK_T"])
        tiles = max(1, triton.cdiv(all_tiles, ROWS)) if freq_grad else 1  # of a program of q or k
        blocks = triton.cdiv(all_tiles, tiles)
        partial = torch.empty((2, blocks if freq_grad else 0, C, P), dtype=torch.float64, device=pre_TF.device)
        if T:
            _backward_kernel[(2 * blocks + all_tiles,)](
                pre_TF, *(pre_TF if g is None else g for g in dense), dpre, partial, *pointers, T, blocks, tiles,
                *strides, *(g is not None for g in dense), FREQ_GRAD=freq_grad, **shape, **tile,
            )  # fmt: skip
        nothing: list[Tensor | None] = [None] * 13
        if not freq_grad:
            return dpre, *nothing
        # The second stage of the reduction, in a fixed order.
        if shape["LINEAR"]:
            ddeltas = torch.empty((2, P), dtype=torch.float32, device=pre_TF.device)
            _sum_coefficients_kernel[(triton.cdiv(P, 4), 2)](
                partial, slopes_q, slopes_k, ddeltas, blocks, P, BLOCK_R=1024, BLOCK_P=4, num_warps=8
            )
            nothing[7:9] = ddeltas.unbind()
            return dpre, *nothing
        dfreqs = torch.empty((2, C, P), dtype=freqs_q.dtype, device=pre_TF.device)
        _sum_rows_kernel[(triton.cdiv(C * P, 4), 2)](
            partial, dfreqs, blocks, C * P, BLOCK_R=512, BLOCK_N=4, num_warps=4
        )
        nothing[3:5] = dfreqs.unbind()
        return dpre, *nothing


def silu_rotate(
    pre_TF: Tensor, heads: int, coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, turns: Turns | None,
    interleaved: bool, buffer: GradientBuffer | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u, a view of the projection, and v, q, k, views of one tensor [T, 3, H, D]."""
    pre_TF = pre_TF.contiguous()
    if turns is None:
        return _Activate.apply(pre_TF, heads, *[None] * 10, interleaved, buffer)
    assert coords_q_CT is not None and coords_k_CT is not None
    assert coords_q_CT.shape == coords_k_CT.shape == (len(turns.freqs_q), len(pre_TF))
    assert turns.freqs_q.shape == turns.freqs_k.shape
    assert (turns.origin is None) == (turns.slopes_q is None), "linear frequencies turn from an origin, others do not"
    tensors = [None if x is None else x.contiguous() for x in (coords_q_CT, coords_k_CT, *turns)]
    return _Activate.apply(pre_TF, heads, *tensors, interleaved, buffer)
