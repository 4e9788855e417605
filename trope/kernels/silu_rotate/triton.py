# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""SiLU and rotation of HSTU's v, q and k in one pass, and its backward with the frequencies' gradient inside.

Notable: a program takes one of v, q, k for a few tokens; u is left to the gate, forward and backward, and passes as a
view; cos and sin are formed in registers and serve all heads; the backward needs the projection and the gradients,
neither SiLU's output nor the angles; gradients may be strided views, and one that is missing is a masked load; each
program of q and k writes a partial row of the frequency gradient and rows are summed in a fixed order, so gradients are
deterministic; frequencies that are linear in their coefficients are formed, and their gradient carried on, inside these
kernels too.

Names of the kernel arguments:

- p_pre: the projection [T, 4 H D], contiguous, u, v, q and k in this order. p_out: v, q and k after SiLU and rotation,
  [T, 3, H, D]. p_dpre: the projection's gradient; u's quarter is written by the gate or by the host.
- p_g_v, p_g_q, p_g_k: gradients of v, q and k [T, H, D]; s_g_v_t and s_g_v_h are the strides of a token and of a head,
  in elements. HAS_V, HAS_Q, HAS_K: which of them exist; one that does not is never read.
- p_coords_q, p_coords_k: coordinates [C, T]. p_freqs_q, p_freqs_k: turns per unit, float64 [C, P].
- If LINEAR, p_slopes_q, p_slopes_k: float64 [P], p_deltas_q, p_deltas_k: coefficients [P], p_origin: int64 scalar. The
  frequency is freqs + slopes * deltas, and coordinates are counted from the origin.
- If PAPER_FP32, p_betas: float32 [P].
- p_partial: partial rows of the frequency gradient, float64 [2, BLOCKS, C, P]; written if FREQ_GRAD.
- BLOCKS: programs of q, and of k. TILES: tiles of BLOCK_T tokens that each takes one after the other.
- BLOCK_P: P rounded up. BLOCK_REST: the dims past 2P rounded up, 0 if there are none. GROUP: heads at once.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, F = 4 H D, H heads, D head dim, P planes, C coordinates.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.rotary.planes import SUM_TILE, sum_coefficients_kernel, sum_rows_kernel
from trope.kernels.silu_rotate.parts import Phases, backward_part, forward_part
from trope.kernels.silu_rotate.reference import Turns

# Partial rows of the frequency gradient per side, at most. Fixed, so that sums do not depend on the GPU; not tuned.
ROWS = 1024
# Whether they are added up beside the backward pass where the caller says so.
SUMS_LATE = True

# The optional pointers: coordinates of q and k, then the fields of `Turns`.
POINTERS = (
    "p_coords_q", "p_coords_k", "p_freqs_q", "p_freqs_k", "p_slopes_q", "p_slopes_k", "p_deltas_q", "p_deltas_k",
    "p_origin", "p_betas",
)  # fmt: skip


@triton.jit
def _forward_kernel(
    p_pre, p_out, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_slopes_q, p_slopes_k, p_deltas_q, p_deltas_k,
    p_origin, p_betas, T,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (3 x tiles of tokens,): v, q and k of a tile are three programs next to each other."""
    i_part = tl.program_id(0) % 3
    o_t = tl.program_id(0) // 3 * BLOCK_T + tl.arange(0, BLOCK_T)
    phases_q = Phases(p_coords_q, p_freqs_q, p_slopes_q, p_deltas_q, p_origin, p_betas)
    phases_k = Phases(p_coords_k, p_freqs_k, p_slopes_k, p_deltas_k, p_origin, p_betas)
    if ROTATE:
        if i_part == 1:
            forward_part(
                p_pre=p_pre, p_out=p_out, phases=phases_q, i_part=i_part, o_t=o_t, T=T, H=H, D=D, P=P, C=C, ROTATE=True,
                PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST,
                GROUP=GROUP,
            )  # fmt: skip
        elif i_part == 2:
            forward_part(
                p_pre=p_pre, p_out=p_out, phases=phases_k, i_part=i_part, o_t=o_t, T=T, H=H, D=D, P=P, C=C, ROTATE=True,
                PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST,
                GROUP=GROUP,
            )  # fmt: skip
        else:
            forward_part(
                p_pre=p_pre, p_out=p_out, phases=phases_q, i_part=i_part, o_t=o_t, T=T, H=H, D=D, P=P, C=C,
                ROTATE=False, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P,
                BLOCK_REST=BLOCK_REST, GROUP=GROUP,
            )  # fmt: skip
    else:
        forward_part(
            p_pre=p_pre, p_out=p_out, phases=phases_q, i_part=i_part, o_t=o_t, T=T, H=H, D=D, P=P, C=C, ROTATE=False,
            PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST,
            GROUP=GROUP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["BLOCKS"])
def _backward_kernel(
    p_pre, p_g_v, p_g_q, p_g_k, p_dpre, p_partial, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_slopes_q, p_slopes_k,
    p_deltas_q, p_deltas_k, p_origin, p_betas, T, BLOCKS, TILES,
    s_g_v_t, s_g_v_h, s_g_q_t, s_g_q_h, s_g_k_t, s_g_k_h,
    HAS_V: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, ROTATE: tl.constexpr,
    FREQ_GRAD: tl.constexpr, PAPER_FP32: tl.constexpr, LINEAR: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (2 x BLOCKS + tiles of tokens,): q and k in turns, TILES tiles each; then v, one tile each."""
    # Programs of q and k may take several tiles and begin first; those of v fill what they leave idle.
    i_block = tl.program_id(0) // 2
    phases_q = Phases(p_coords_q, p_freqs_q, p_slopes_q, p_deltas_q, p_origin, p_betas)
    phases_k = Phases(p_coords_k, p_freqs_k, p_slopes_k, p_deltas_k, p_origin, p_betas)
    if tl.program_id(0) >= 2 * BLOCKS:
        i_tile = tl.program_id(0) - 2 * BLOCKS
        backward_part(
            p_pre=p_pre, p_g=p_g_v, p_dpre=p_dpre, p_partial=p_partial, phases=phases_q, i_part=0, i_block=i_tile, T=T,
            TILES=1, s_g_t=s_g_v_t, s_g_h=s_g_v_h, HAS=HAS_V, H=H, D=D, P=P, C=C, ROTATE=False, FREQ_GRAD=FREQ_GRAD,
            PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P,
            BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        backward_part(
            p_pre=p_pre, p_g=p_g_q, p_dpre=p_dpre, p_partial=p_partial, phases=phases_q, i_part=1, i_block=i_block, T=T,
            TILES=TILES, s_g_t=s_g_q_t, s_g_h=s_g_q_h, HAS=HAS_Q, H=H, D=D, P=P, C=C, ROTATE=ROTATE,
            FREQ_GRAD=FREQ_GRAD, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_T=BLOCK_T,
            BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    else:
        p_partial_k = p_partial + BLOCKS * C * P
        backward_part(
            p_pre=p_pre, p_g=p_g_k, p_dpre=p_dpre, p_partial=p_partial_k, phases=phases_k, i_part=2, i_block=i_block,
            T=T, TILES=TILES, s_g_t=s_g_k_t, s_g_h=s_g_k_h, HAS=HAS_K, H=H, D=D, P=P, C=C, ROTATE=ROTATE,
            FREQ_GRAD=FREQ_GRAD, PAPER_FP32=PAPER_FP32, LINEAR=LINEAR, INTERLEAVED=INTERLEAVED, BLOCK_T=BLOCK_T,
            BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip


def tile_of(planes: int, rest: int, heads: int, warps: int) -> dict[str, int]:
    """Block sizes: 32 planes in a row (128 bytes in bf16, a cache line), of several heads where heads are small, by 16
    tokens. Not more of a row: the heads that a thread meets one after the other share the angles it has computed. No
    file holds a comparison with other sizes."""
    block_p = triton.next_power_of_2(max(1, planes))
    group = min(max(1, 32 // block_p), triton.next_power_of_2(heads))
    return {
        "BLOCK_T": max(1, min(128, 512 // (block_p * group))),
        "BLOCK_P": block_p,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "GROUP": group,
        "num_warps": warps,
    }


def gradient_arguments(name: str, g_THD: Tensor | None, like: Tensor) -> dict[str, Any]:
    """p_g_x, s_g_x_t, s_g_x_h and HAS_X of the gradient of x; `like` stands in for one that is missing."""
    pointer, has = f"p_g_{name}", f"HAS_{name.upper()}"
    s_t, s_h = f"s_g_{name}_t", f"s_g_{name}_h"
    if g_THD is None:  # any strides that Triton treats like real ones
        return {pointer: like, s_t: 16, s_h: 16, has: False}
    T, H, D = g_THD.shape
    # The stride of an axis of length one means nothing: take the one of dense rows, so that no other kernel is
    # compiled.
    return {
        pointer: g_THD,
        s_t: g_THD.stride(0) if T > 1 else H * D,
        s_h: g_THD.stride(1) if H > 1 else D,
        has: True,
    }


def gradients(partial: Tensor, freqs: Tensor, slopes: tuple[Tensor, ...], late: Late) -> tuple[Tensor, ...]:
    """The second stage of a frequency gradient, in a fixed order: partial rows [2, R, C, P] summed over R.

    Returns the gradients of both frequencies [C, P] in their dtype; with slopes those of both coefficients [P].
    """
    late = late if SUMS_LATE else IN_PLACE
    with late.work(partial, *slopes):
        return tuple(late.gradient(each) for each in _summed(partial, freqs, *slopes).unbind())


def _summed(partial: Tensor, freqs: Tensor, slopes_q: Tensor | None = None, slopes_k: Tensor | None = None) -> Tensor:
    """What `gradients` returns, as one tensor."""
    _, R, C, P = partial.shape
    if slopes_q is None:
        dfreqs = torch.empty((2, C, P), dtype=freqs.dtype, device=partial.device)
        sum_rows_kernel[(triton.cdiv(C * P, SUM_TILE["BLOCK_N"]), 2)](
            p_rows=partial, p_sum=dfreqs, R=R, N=C * P, **SUM_TILE
        )
        return dfreqs
    ddeltas = torch.empty((2, P), dtype=torch.float32, device=partial.device)
    sum_coefficients_kernel[(triton.cdiv(P, 4), 2)](
        p_rows=partial,
        p_slopes_q=slopes_q,
        p_slopes_k=slopes_k,
        p_sum=ddeltas,
        R=R,
        N=P,
        BLOCK_R=1024,  # all partial rows at once
        BLOCK_N=4,
        num_warps=8,
    )
    return ddeltas


def learned(turns: Turns) -> tuple[Tensor | None, ...]:
    """What `gradients` gives the gradients of."""
    return (turns.freqs_q, turns.freqs_k) if turns.slopes_q is None else (turns.deltas_q, turns.deltas_k)


def _with_first_part(g_u: Tensor | None, pre_TF: Tensor, buffer: GradientBuffer | None) -> Tensor:
    """The projection's gradient with u's columns written: where the gate has put them, or in a tensor of its own."""
    dpre = None if buffer is None else buffer.take(g_u)
    if dpre is None:
        dpre = torch.empty_like(pre_TF)
        first = dpre[:, : dpre.shape[1] // 4]
        first.zero_() if g_u is None else first.copy_(g_u.flatten(1))
    assert dpre.shape == pre_TF.shape
    return dpre


class _SiluRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pre_TF: Tensor, heads: int, coords_q: Tensor | None, coords_k: Tensor | None, freqs_q: Tensor | None,
        freqs_k: Tensor | None, slopes_q: Tensor | None, slopes_k: Tensor | None, deltas_q: Tensor | None,
        deltas_k: Tensor | None, origin: Tensor | None, betas: Tensor | None, interleaved: bool,
        buffer: GradientBuffer | None, late: Late,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        T, D = len(pre_TF), pre_TF.shape[1] // (4 * heads)
        C, P = (1, D // 2) if freqs_q is None else freqs_q.shape
        shape = {"H": heads, "D": D, "P": P, "C": C, "ROTATE": freqs_q is not None, "PAPER_FP32": betas is not None}
        shape |= {"LINEAR": slopes_q is not None, "INTERLEAVED": interleaved}
        tile = tile_of(P, D - 2 * P, heads, warps=2)
        out = torch.empty((T, 3, heads, D), dtype=pre_TF.dtype, device=pre_TF.device)
        given = (coords_q, coords_k, freqs_q, freqs_k, slopes_q, slopes_k, deltas_q, deltas_k, origin, betas)
        pointers = [pre_TF if x is None else x for x in given]  # absent ones are never read
        if T:
            _forward_kernel[(3 * triton.cdiv(T, tile["BLOCK_T"]),)](
                p_pre=pre_TF, p_out=out, **dict(zip(POINTERS, pointers, strict=True)), T=T, **shape, **tile
            )
        ctx.save_for_backward(pre_TF, *pointers)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.buffer, ctx.late = shape, buffer, late
        return pre_TF.view(T, 4, heads, D)[:, 0], out[:, 0], out[:, 1], out[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_u: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pre_TF, *pointers = ctx.saved_tensors
        _, _, freqs_q, _, slopes_q, slopes_k, *_ = pointers
        shape = ctx.shape
        T, C, P = len(pre_TF), shape["C"], shape["P"]
        tile = tile_of(P, shape["D"] - 2 * P, shape["H"], warps=4)
        freq_grad = any(ctx.needs_input_grad[4:6]) or any(ctx.needs_input_grad[8:10])
        dense = [g if g is None or g.stride(-1) == 1 else g.contiguous() for g in grads]
        dpre = _with_first_part(g_u, pre_TF, ctx.buffer)
        all_tiles = triton.cdiv(T, tile["BLOCK_T"])
        tiles = max(1, triton.cdiv(all_tiles, ROWS)) if freq_grad else 1  # of a program of q or k
        blocks = triton.cdiv(all_tiles, tiles)
        partial = torch.empty((2, blocks if freq_grad else 0, C, P), dtype=torch.float64, device=pre_TF.device)
        if T:
            _backward_kernel[(2 * blocks + all_tiles,)](
                p_pre=pre_TF,
                p_dpre=dpre,
                p_partial=partial,
                **dict(zip(POINTERS, pointers, strict=True)),
                T=T,
                BLOCKS=blocks,
                TILES=tiles,
                **gradient_arguments("v", dense[0], pre_TF),
                **gradient_arguments("q", dense[1], pre_TF),
                **gradient_arguments("k", dense[2], pre_TF),
                FREQ_GRAD=freq_grad,
                **shape,
                **tile,
            )
        nothing: list[Tensor | None] = [None] * 14
        if not freq_grad:
            return dpre, *nothing
        where = slice(7, 9) if shape["LINEAR"] else slice(3, 5)
        slopes = (slopes_q, slopes_k) if shape["LINEAR"] else ()
        nothing[where] = gradients(partial, freqs_q, slopes, ctx.late)
        return dpre, *nothing


def silu_rotate(
    pre_TF: Tensor, heads: int, coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, turns: Turns | None,
    interleaved: bool, buffer: GradientBuffer | None, late: Late,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u, a view of the projection, and v, q, k, views of one tensor [T, 3, H, D]."""
    pre_TF = pre_TF.contiguous()
    if turns is None:
        return _SiluRotate.apply(pre_TF, heads, *[None] * 10, interleaved, buffer, IN_PLACE)
    assert coords_q_CT is not None and coords_k_CT is not None
    assert coords_q_CT.shape == coords_k_CT.shape == (len(turns.freqs_q), len(pre_TF))
    assert turns.freqs_q.shape == turns.freqs_k.shape
    assert (turns.origin is None) == (turns.slopes_q is None), "linear frequencies turn from an origin, others do not"
    tensors = [None if x is None else x.contiguous() for x in (coords_q_CT, coords_k_CT, *turns)]
    late = late.to(*learned(turns))
    return _SiluRotate.apply(pre_TF, heads, *tensors, interleaved, buffer, late)
