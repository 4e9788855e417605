# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""q, k and v of a Transformer's projection, rotated and padded in one pass, and its backward in one.

Notable: a program takes one of q, k, v for a few tokens; v is not touched in the forward unless it is padded; cos and
sin are formed in registers and serve all heads; the backward reads the gradients as attention left them, in any
strides, and writes them side by side as the projection's gradient; frequency gradients are summed in a fixed order.

Names of the kernel arguments, beyond those of silu_rotate/triton.py, which has the same for coordinates, frequencies,
partial rows and tiles:

- p_pre: the projection [T, 3 H D], contiguous, q, k and v in this order. p_dpre: its gradient.
- p_out: the results [R, PARTS, H, D]: q and k (PARTS = 2), or q, k and v (PARTS = 3).
- p_slots: int64 [T], the row of each token in p_out and in the gradients; read if PADDED, else token t is row t.
- p_g_q, p_g_k, p_g_v: gradients of q, k and v [R, H, D]; s_g_q_t and s_g_q_h are the strides of a row and of a head.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, F = 3 H D, H heads, D head dim, P planes, C coordinates, R rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.aside import Late
from trope.kernels.rotary.planes import load_pair, offsets, store_frequency_row, store_pair
from trope.kernels.silu_rotate.parts import Phases, angles
from trope.kernels.silu_rotate.reference import Turns
from trope.kernels.silu_rotate.triton import POINTERS, ROWS, gradient_arguments, gradients, learned, tile_of


@triton.jit
def _rows_of(p_slots, o_t, m_t, PADDED: tl.constexpr):
    """The row of each token, int64."""
    return tl.load(p_slots + o_t, mask=m_t, other=0) if PADDED else o_t.to(tl.int64)


@triton.jit
def _forward_part(
    p_pre, p_out, p_slots, phases, i_part, o_t, T,
    PARTS: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ROTATE: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """q (i_part 0), k (1) or v (2) of the tokens o_t, rotated if ROTATE."""
    o_p = tl.arange(0, BLOCK_P)
    m_t = o_t < T
    o_row_x = o_t.to(tl.int64) * (3 * H * D) + i_part * (H * D)
    o_row_y = _rows_of(p_slots, o_t, m_t, PADDED) * (PARTS * H * D) + i_part * (H * D)
    # As in rotary/triton.py: a group of heads is loaded before the group ahead of it is stored.
    o_x, m_h = offsets(o_row_x, D, 0, H, GROUP)
    b_next0, b_next1 = load_pair(p_pre, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
    if ROTATE:
        b_cos, b_sin = angles(phases, o_t, m_t, o_p, T, P=P, C=C, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR)
    for i_g in tl.static_range((H + GROUP - 1) // GROUP):
        o_x, m_h = offsets(o_row_x, D, i_g, H, GROUP)
        o_y, _ = offsets(o_row_y, D, i_g, H, GROUP)
        m = m_t[:, None, None] & m_h
        b_0, b_1 = b_next0.to(tl.float32), b_next1.to(tl.float32)
        if (i_g + 1) * GROUP < H:
            o_next, m_h = offsets(o_row_x, D, i_g + 1, H, GROUP)
            b_next0, b_next1 = load_pair(p_pre, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_0, b_1 = b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos
        store_pair(p_out, b_0, b_1, o_y, m, o_p, P, INTERLEAVED)
        if BLOCK_REST:
            o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
            tl.store(p_out + o_y + o_d, tl.load(p_pre + o_x + o_d, mask=m & (o_d < D)), mask=m & (o_d < D))


@triton.jit
def _backward_part(
    p_pre, p_g, p_dpre, p_partial, p_slots, phases, i_part, i_block, T, TILES, s_g_t, s_g_h,
    HAS: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ROTATE: tl.constexpr, FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    GROUP: tl.constexpr,
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
        o_row = o_t.to(tl.int64) * (3 * H * D) + i_part * (H * D)
        o_row_g = _rows_of(p_slots, o_t, m_t, PADDED) * s_g_t
        o_g, m_h = offsets(o_row_g, s_g_h, 0, H, GROUP)
        b_next_g0, b_next_g1 = load_pair(p_g, o_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
        if ROTATE:
            b_cos, b_sin = angles(phases, o_t, m_t, o_p, T, P=P, C=C, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR)
            b_dphi = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float32)
        for i_g in tl.static_range((H + GROUP - 1) // GROUP):
            o_x, m_h = offsets(o_row, D, i_g, H, GROUP)
            o_g, _ = offsets(o_row_g, s_g_h, i_g, H, GROUP)
            m = m_t[:, None, None] & m_h
            m_here = m_g[:, None, None] & m_h
            b_g0, b_g1 = b_next_g0.to(tl.float32), b_next_g1.to(tl.float32)
            if ROTATE and FREQ_GRAD:
                b_x0, b_x1 = load_pair(p_pre, o_x, m, o_p, P, INTERLEAVED)
            if (i_g + 1) * GROUP < H:
                o_next_g, m_h = offsets(o_row_g, s_g_h, i_g + 1, H, GROUP)
                b_next_g0, b_next_g1 = load_pair(p_g, o_next_g, m_g[:, None, None] & m_h, o_p, P, INTERLEAVED)
            if ROTATE:
                b_g0, b_g1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
                if FREQ_GRAD:
                    # Algorithm 3's dPhi, the cross product of output and gradient, with both turned back.
                    b_dphi += b_x0.to(tl.float32) * b_g1 - b_x1.to(tl.float32) * b_g0
            store_pair(p_dpre, b_g0, b_g1, o_x, m, o_p, P, INTERLEAVED)
            if BLOCK_REST:
                o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
                b_g = tl.load(p_g + o_g + o_d, mask=m_here & (o_d < D), other=0.0)
                tl.store(p_dpre + o_x + o_d, b_g, mask=m & (o_d < D))
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


@triton.jit
def _forward_kernel(
    p_pre, p_out, p_slots, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_slopes_q, p_slopes_k, p_deltas_q, p_deltas_k,
    p_origin, p_betas, T,
    PARTS: tl.constexpr, PADDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ROTATE: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS x tiles of tokens,): the parts of a tile are programs next to each other."""
    i_part = tl.program_id(0) % PARTS
    o_t = tl.program_id(0) // PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    phases_q = Phases(p_coords_q, p_freqs_q, p_slopes_q, p_deltas_q, p_origin, p_betas)
    phases_k = Phases(p_coords_k, p_freqs_k, p_slopes_k, p_deltas_k, p_origin, p_betas)
    if i_part == 0:
        _forward_part(
            p_pre=p_pre, p_out=p_out, p_slots=p_slots, phases=phases_q, i_part=i_part, o_t=o_t, T=T, PARTS=PARTS,
            PADDED=PADDED, H=H, D=D, P=P, C=C, ROTATE=ROTATE, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR,
            INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    elif i_part == 1:
        _forward_part(
            p_pre=p_pre, p_out=p_out, p_slots=p_slots, phases=phases_k, i_part=i_part, o_t=o_t, T=T, PARTS=PARTS,
            PADDED=PADDED, H=H, D=D, P=P, C=C, ROTATE=ROTATE, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR,
            INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    else:
        _forward_part(
            p_pre=p_pre, p_out=p_out, p_slots=p_slots, phases=phases_q, i_part=i_part, o_t=o_t, T=T, PARTS=PARTS,
            PADDED=PADDED, H=H, D=D, P=P, C=C, ROTATE=False, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR,
            INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["BLOCKS"])
def _backward_kernel(
    p_pre, p_g_q, p_g_k, p_g_v, p_dpre, p_partial, p_slots, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_slopes_q,
    p_slopes_k, p_deltas_q, p_deltas_k, p_origin, p_betas, T, BLOCKS, TILES,
    s_g_q_t, s_g_q_h, s_g_k_t, s_g_k_h, s_g_v_t, s_g_v_h,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, PADDED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (2 x BLOCKS + tiles of tokens,): q and k in turns, TILES tiles each; then v, one tile each."""
    # As in silu_rotate: programs of q and k may take several tiles and begin first; those of v fill what is idle.
    i_block = tl.program_id(0) // 2
    phases_q = Phases(p_coords_q, p_freqs_q, p_slopes_q, p_deltas_q, p_origin, p_betas)
    phases_k = Phases(p_coords_k, p_freqs_k, p_slopes_k, p_deltas_k, p_origin, p_betas)
    if tl.program_id(0) >= 2 * BLOCKS:
        i_tile = tl.program_id(0) - 2 * BLOCKS
        _backward_part(
            p_pre=p_pre, p_g=p_g_v, p_dpre=p_dpre, p_partial=p_partial, p_slots=p_slots, phases=phases_q, i_part=2,
            i_block=i_tile, T=T, TILES=1, s_g_t=s_g_v_t, s_g_h=s_g_v_h, HAS=HAS_V, PADDED=PADDED, H=H, D=D, P=P, C=C,
            ROTATE=False, FREQ_GRAD=FREQ_GRAD, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        _backward_part(
            p_pre=p_pre, p_g=p_g_q, p_dpre=p_dpre, p_partial=p_partial, p_slots=p_slots, phases=phases_q, i_part=0,
            i_block=i_block, T=T, TILES=TILES, s_g_t=s_g_q_t, s_g_h=s_g_q_h, HAS=HAS_Q, PADDED=PADDED, H=H, D=D, P=P,
            C=C, ROTATE=ROTATE, FREQ_GRAD=FREQ_GRAD, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    else:
        p_partial_k = p_partial + BLOCKS * C * P
        _backward_part(
            p_pre=p_pre, p_g=p_g_k, p_dpre=p_dpre, p_partial=p_partial_k, p_slots=p_slots, phases=phases_k, i_part=1,
            i_block=i_block, T=T, TILES=TILES, s_g_t=s_g_k_t, s_g_h=s_g_k_h, HAS=HAS_K, PADDED=PADDED, H=H, D=D, P=P,
            C=C, ROTATE=ROTATE, FREQ_GRAD=FREQ_GRAD, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pre_TF: Tensor, heads: int, interleaved: bool, slots_T: Tensor | None, rows: int | None, late: Late,
        *given: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """given: in the order of POINTERS."""
        _, _, freqs_q, _, slopes_q, *_, betas = given
        T, D = len(pre_TF), pre_TF.shape[1] // (3 * heads)
        C, P = (1, D // 2) if freqs_q is None else freqs_q.shape
        shape = {"H": heads, "D": D, "P": P, "C": C, "ROTATE": freqs_q is not None, "PAPER_FP32": betas is not None}
        shape |= {"LINEAR": slopes_q is not None, "INTERLEAVED": interleaved, "PADDED": slots_T is not None}
        pointers = [pre_TF if x is None else x for x in (slots_T, *given)]  # absent ones are never read
        ctx.save_for_backward(pre_TF, *pointers)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.late = shape, late
        views = pre_TF.view(T, 3, heads, D)
        if freqs_q is None and slots_T is None:
            return views[:, 0], views[:, 1], views[:, 2]
        # Rows without a token are zero: no token looks at them, but a NaN would pass through attention's backward.
        make, parts = (torch.empty, 2) if slots_T is None else (torch.zeros, 3)
        out = make((T if rows is None else rows, parts, heads, D), dtype=pre_TF.dtype, device=pre_TF.device)
        tile = tile_of(P, D - 2 * P, heads, warps=2)
        if T:
            _forward_kernel[(parts * triton.cdiv(T, tile["BLOCK_T"]),)](
                p_pre=pre_TF,
                p_out=out,
                **dict(zip(("p_slots", *POINTERS), pointers, strict=True)),
                T=T,
                PARTS=parts,
                **shape,
                **tile,
            )
        return out[:, 0], out[:, 1], views[:, 2] if slots_T is None else out[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pre_TF, *pointers = ctx.saved_tensors
        _, _, _, freqs_q, _, slopes_q, slopes_k, *_ = pointers
        shape = ctx.shape
        T, C, P = len(pre_TF), shape["C"], shape["P"]
        tile = tile_of(P, shape["D"] - 2 * P, shape["H"], warps=4)
        needed = ctx.needs_input_grad[6:]
        freq_grad = any(needed[2:4]) or any(needed[6:8])
        dense = [g if g is None or g.stride(-1) == 1 else g.contiguous() for g in grads]
        dpre = torch.empty_like(pre_TF)
        all_tiles = triton.cdiv(T, tile["BLOCK_T"])
        tiles = max(1, triton.cdiv(all_tiles, ROWS)) if freq_grad else 1  # of a program of q or k
        blocks = triton.cdiv(all_tiles, tiles)
        partial = torch.empty((2, blocks if freq_grad else 0, C, P), dtype=torch.float64, device=pre_TF.device)
        if T:
            _backward_kernel[(2 * blocks + all_tiles,)](
                p_pre=pre_TF,
                p_dpre=dpre,
                p_partial=partial,
                **dict(zip(("p_slots", *POINTERS), pointers, strict=True)),
                T=T,
                BLOCKS=blocks,
                TILES=tiles,
                **gradient_arguments("q", dense[0], pre_TF),
                **gradient_arguments("k", dense[1], pre_TF),
                **gradient_arguments("v", dense[2], pre_TF),
                FREQ_GRAD=freq_grad,
                **shape,
                **tile,
            )
        of_given: list[Tensor | None] = [None] * len(POINTERS)
        if freq_grad:
            where = slice(6, 8) if shape["LINEAR"] else slice(2, 4)
            slopes = (slopes_q, slopes_k) if shape["LINEAR"] else ()
            of_given[where] = gradients(partial, freqs_q, slopes, ctx.late)
        return dpre, None, None, None, None, None, *of_given


def split_rotate(
    pre_TF: Tensor, heads: int, coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, turns: Turns | None,
    interleaved: bool, slots_T: Tensor | None, rows: int | None, late: Late,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v: views of the projection where nothing turns and nothing is padded, else of one tensor."""
    given: list[Tensor | None] = [None] * len(POINTERS)
    if turns is not None:
        assert coords_q_CT is not None and coords_k_CT is not None
        assert coords_q_CT.shape == coords_k_CT.shape == (len(turns.freqs_q), len(pre_TF))
        assert (turns.origin is None) == (turns.slopes_q is None), "linear frequencies turn from an origin"
        given = [None if x is None else x.contiguous() for x in (coords_q_CT, coords_k_CT, *turns)]
        late = late.to(*learned(turns))
    return _SplitRotate.apply(pre_TF.contiguous(), heads, interleaved, slots_T, rows, late, *given)
