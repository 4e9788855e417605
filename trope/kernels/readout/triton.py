# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The last residual sum with its turning dims turned: one pass over memory forward, one backward.

Notable: the backward of a turned plane needs its output and nothing of its inputs, since the cross product of output
and gradient is the same before and after the rotation; coordinates and frequencies are formed in registers, so nothing
is launched for them; the gradient of the stream's beginning is as wide as what was given of it; the coefficients'
gradient leaves the backward as partial rows, and one small launch sums them in a fixed order.

Names of the kernel arguments:

- p_x, p_delta: the residual stream and what the last block adds to it, [T, E], contiguous. p_start: what it began with,
  [T, W], rows s_start elements apart. HAS_DELTA, HAS_START: which of the last two exist. p_out: the result [T, E].
- p_g: its gradient, rows s_g elements apart. p_dx, p_ddelta [T, E], p_dstart [T, W]: the gradients of the three inputs,
  contiguous; in the backward HAS_DELTA and HAS_START say which of the last two are wanted.
- p_moments: [T]. p_freqs: float64 [P]. If LINEAR, p_slopes: float64 [P], p_deltas: coefficients [P]. If HELD, p_origin,
  p_earliest, p_latest: int64 scalars. See `Curve`.
- p_partial: partial rows of the frequency gradient, float64 [blocks, P]; written if FREQ_GRAD.
- TILES: tiles of BLOCK_T tokens that a program takes one after the other.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E width, W dims of the start that are given, P turning planes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.readout.reference import Curve
from trope.kernels.rotary.planes import (
    ROWS,
    SUM_TILE,
    cos_sin_quarters,
    frequencies,
    sum_coefficients_kernel,
    sum_rows_kernel,
)

# 128 dims of 8 tokens a program, two warps: the tile of rotary/triton.py, not tuned for this kernel.
TILE = {"BLOCK_T": 8, "BLOCK_P": 64, "num_warps": 2}
# Whether the partial rows are added up beside the backward pass where the caller says so.
SUMS_LATE = True

# The pointers of `Curve`, in the order of its fields.
POINTERS = ("p_freqs", "p_slopes", "p_deltas", "p_origin", "p_earliest", "p_latest")


@triton.jit
def _pairs(b_x):
    """The two components of each plane of a block [tokens, 2 planes]."""
    return tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))


@triton.jit
def _joined(b_0, b_1):
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@triton.jit
def _coordinates(p_moments, p_origin, p_earliest, p_latest, o_t, m_t, HELD: tl.constexpr):
    """Where each token stands on the curve, float64 [tokens]."""
    b_t = tl.load(p_moments + o_t, mask=m_t, other=0)
    if HELD:
        b_t = tl.minimum(tl.maximum(b_t - tl.load(p_origin), tl.load(p_earliest)), tl.load(p_latest))
    return b_t.to(tl.float64)


@triton.jit
def _forward_kernel(
    p_x, p_delta, p_start, p_out, p_moments, p_freqs, p_slopes, p_deltas, p_origin, p_earliest, p_latest, T, E, P,
    s_start, HAS_DELTA: tl.constexpr, HAS_START: tl.constexpr, LINEAR: tl.constexpr, HELD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, blocks of 2 BLOCK_P dims)."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.program_id(1) * 2 * BLOCK_P + tl.arange(0, 2 * BLOCK_P)
    m = (o_t < T)[:, None] & (o_d < E)[None, :]
    o_x = o_t.to(tl.int64)[:, None] * E + o_d[None, :]
    b_y = tl.load(p_x + o_x, mask=m, other=0.0).to(tl.float32)
    if HAS_DELTA:
        b_y += tl.load(p_delta + o_x, mask=m, other=0.0).to(tl.float32)
    if tl.program_id(1) * BLOCK_P < P:
        o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        if HAS_START:
            o_start = o_t.to(tl.int64)[:, None] * s_start + o_d[None, :]
            b_y -= tl.load(p_start + o_start, mask=m & (o_d < 2 * P)[None, :], other=0.0).to(tl.float32)
        b_0, b_1 = _pairs(b_y)
        # A plane past the last has frequency 0 here, and does not turn.
        b_f = 4.0 * frequencies(p_freqs, p_slopes, p_deltas, o_p, o_p < P, LINEAR)
        b_t = _coordinates(p_moments, p_origin, p_earliest, p_latest, o_t, o_t < T, HELD)
        b_cos, b_sin = cos_sin_quarters(b_t[:, None] * b_f[None, :])
        b_y = _joined(b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos)
    tl.store(p_out + o_x, b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def _backward_kernel(
    p_g, p_out, p_dx, p_ddelta, p_dstart, p_partial, p_moments, p_freqs, p_slopes, p_deltas, p_origin, p_earliest,
    p_latest, T, E, W, P, TILES, s_g, HAS_DELTA: tl.constexpr, HAS_START: tl.constexpr, FREQ_GRAD: tl.constexpr,
    LINEAR: tl.constexpr, HELD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of TILES tiles, blocks of 2 BLOCK_P dims)."""
    o_d = tl.program_id(1) * 2 * BLOCK_P + tl.arange(0, 2 * BLOCK_P)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    m_turns = tl.program_id(1) * BLOCK_P < P
    b_f = 4.0 * frequencies(p_freqs, p_slopes, p_deltas, o_p, o_p < P, LINEAR)
    b_df = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (tl.program_id(0) * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m = (o_t < T)[:, None] & (o_d < E)[None, :]
        o_x = o_t.to(tl.int64)[:, None] * E + o_d[None, :]
        b_g = tl.load(p_g + o_t.to(tl.int64)[:, None] * s_g + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_start = tl.zeros((BLOCK_T, 2 * BLOCK_P), dtype=tl.float32)
        if m_turns:
            b_g0, b_g1 = _pairs(b_g)
            b_t = _coordinates(p_moments, p_origin, p_earliest, p_latest, o_t, o_t < T, HELD)
            if FREQ_GRAD:
                b_y0, b_y1 = _pairs(tl.load(p_out + o_x, mask=m, other=0.0).to(tl.float32))
                b_df += (b_y0 * b_g1 - b_y1 * b_g0).to(tl.float64) * b_t[:, None]
            b_cos, b_sin = cos_sin_quarters(b_t[:, None] * b_f[None, :])
            b_g = _joined(b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin)
            b_start = tl.where((o_d < 2 * P)[None, :], -b_g, 0.0)
        tl.store(p_dx + o_x, b_g.to(p_dx.dtype.element_ty), mask=m)
        if HAS_DELTA:
            tl.store(p_ddelta + o_x, b_g.to(p_ddelta.dtype.element_ty), mask=m)
        if HAS_START:
            o_start = o_t.to(tl.int64)[:, None] * W + o_d[None, :]
            tl.store(p_dstart + o_start, b_start.to(p_dstart.dtype.element_ty), mask=m & (o_d < W)[None, :])
    if m_turns and FREQ_GRAD:
        b_row = tl.sum(b_df, axis=0) * 6.283185307179586
        tl.store(p_partial + tl.program_id(0) * P + o_p, b_row, mask=o_p < P)


class _AddTurned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, start_TW: Tensor | None, moments_T: Tensor, late: Late,
        *curve: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """curve: in the order of POINTERS."""
        freqs_P, slopes_P, _, origin, *_ = curve
        assert freqs_P is not None
        T, E = x_TE.shape
        out_TE = torch.empty((T, E), dtype=x_TE.dtype, device=x_TE.device)
        shape = {"P": len(freqs_P), "LINEAR": slopes_P is not None, "HELD": origin is not None}
        pointers = [moments_T if x is None else x for x in curve]  # absent ones are never read
        if T:
            _forward_kernel[(triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(E, 2 * TILE["BLOCK_P"]))](
                p_x=x_TE,
                p_delta=x_TE if delta_TE is None else delta_TE,
                p_start=x_TE if start_TW is None else start_TW,
                p_out=out_TE,
                p_moments=moments_T,
                **dict(zip(POINTERS, pointers, strict=True)),
                T=T,
                E=E,
                s_start=E if start_TW is None else start_TW.stride(0),
                HAS_DELTA=delta_TE is not None,
                HAS_START=start_TW is not None,
                **shape,
                **TILE,
            )
        ctx.save_for_backward(out_TE, moments_T, *pointers)
        ctx.shape, ctx.late = shape, late
        ctx.inputs = [None if x is None else (x.shape, x.dtype) for x in (x_TE, delta_TE, start_TW)]
        return out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TE: Tensor) -> tuple[Tensor | None, ...]:
        out_TE, moments_T, *pointers = ctx.saved_tensors
        (T, E), device = out_TE.shape, g_TE.device
        _, *wanted, _, _, of_freqs, _, of_deltas, _, _, _ = ctx.needs_input_grad
        freq_grad = of_freqs or of_deltas
        g_TE = g_TE if g_TE.stride(1) == 1 else g_TE.contiguous()
        dx, ddelta, dstart = (
            torch.empty(given[0], dtype=given[1], device=device) if is_wanted else None
            for given, is_wanted in zip(ctx.inputs, (True, *wanted), strict=True)
        )
        all_tiles = triton.cdiv(T, TILE["BLOCK_T"])
        tiles = max(1, triton.cdiv(all_tiles, ROWS)) if freq_grad else 1
        blocks = triton.cdiv(all_tiles, tiles)
        partial = torch.empty((blocks if freq_grad else 0, ctx.shape["P"]), dtype=torch.float64, device=device)
        if T:
            _backward_kernel[(blocks, triton.cdiv(E, 2 * TILE["BLOCK_P"]))](
                p_g=g_TE,
                p_out=out_TE,
                p_dx=dx,
                p_ddelta=dx if ddelta is None else ddelta,
                p_dstart=dx if dstart is None else dstart,
                p_partial=partial,
                p_moments=moments_T,
                **dict(zip(POINTERS, pointers, strict=True)),
                T=T,
                E=E,
                W=E if dstart is None else dstart.shape[1],
                TILES=tiles,
                s_g=g_TE.stride(0),
                HAS_DELTA=ddelta is not None,
                HAS_START=dstart is not None,
                FREQ_GRAD=freq_grad,
                **ctx.shape,
                **TILE,
            )
        freqs_P, slopes_P, deltas_P, *_ = pointers
        late = ctx.late if SUMS_LATE else IN_PLACE
        with late.work(partial, slopes_P):
            dfreqs = late.gradient(_summed(partial, freqs_P)) if of_freqs else None
            ddeltas = late.gradient(_summed(partial, deltas_P, slopes_P)) if of_deltas else None
        return dx, ddelta, dstart, None, None, dfreqs, None, ddeltas, None, None, None


def _summed(partial_RP: Tensor, like_P: Tensor, slopes_P: Tensor | None = None) -> Tensor:
    """The gradient of `like_P`, frequencies or with slopes their coefficients: partial rows summed in a fixed order."""
    R, P = partial_RP.shape
    gradient_P = torch.empty_like(like_P)
    grid, sums = (triton.cdiv(P, SUM_TILE["BLOCK_N"]), 1), {"p_rows": partial_RP, "p_sum": gradient_P, "R": R, "N": P}
    if slopes_P is None:
        sum_rows_kernel[grid](**sums, **SUM_TILE)
    else:
        sum_coefficients_kernel[grid](p_slopes_q=slopes_P, p_slopes_k=slopes_P, **sums, **SUM_TILE)
    return gradient_P


def add_turned(
    x_TE: Tensor, delta_TE: Tensor | None, start_TW: Tensor | None, moments_T: Tensor, curve: Curve, late: Late
) -> Tensor:
    """See `trope.kernels.readout.add_turned`."""
    if start_TW is not None and start_TW.stride(1) != 1:
        start_TW = start_TW.contiguous()
    dense_TE, dense_delta_TE, dense_moments_T, *dense_curve = (
        None if x is None else x.contiguous() for x in (x_TE, delta_TE, moments_T, *curve)
    )
    late = late.to(curve.freqs_P if curve.deltas_P is None else curve.deltas_P)
    return _AddTurned.apply(dense_TE, dense_delta_TE, start_TW, dense_moments_T, late, *dense_curve)
