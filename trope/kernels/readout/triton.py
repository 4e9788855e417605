# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The last residual sum with its turning dims turned: one pass over memory forward, one backward.

Notable: the backward of a turned plane needs its output and nothing of its inputs, since the cross product of output
and gradient is the same before and after the rotation; frequency gradients are summed in a fixed order.

Names of the kernel arguments:

- p_x, p_delta, p_start: the residual stream, what the last block adds to it, what it began with, [T, E], contiguous.
  HAS_DELTA, HAS_START: which of the last two exist. p_out: the result [T, E].
- p_g: its gradient, rows s_g elements apart. p_dx, p_ddelta, p_dstart: the gradients of the three inputs, [T, E].
- p_coords: int64 [T]. p_freqs: float64 [P]. p_partial: partial rows of the frequency gradient, float64 [blocks, P].
- TILES: tiles of BLOCK_T tokens that a program takes one after the other.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E width, P turning planes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.rotary.planes import ROWS, SUM_TILE, cos_sin, sum_rows_kernel

# 128 dims of 8 tokens a program, two warps: the tile of rotary/triton.py, not tuned for this kernel.
TILE = {"BLOCK_T": 8, "BLOCK_P": 64, "num_warps": 2}


@triton.jit
def _pairs(b_x):
    """The two components of each plane of a block [tokens, 2 planes]."""
    return tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))


@triton.jit
def _joined(b_0, b_1):
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@triton.jit
def _forward_kernel(
    p_x, p_delta, p_start, p_out, p_coords, p_freqs, T, E, P,
    HAS_DELTA: tl.constexpr, HAS_START: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
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
            b_y -= tl.load(p_start + o_x, mask=m & (o_d < 2 * P)[None, :], other=0.0).to(tl.float32)
        b_0, b_1 = _pairs(b_y)
        # A plane past the last has frequency 0 here, and does not turn.
        b_cos, b_sin = cos_sin(
            p_coords=p_coords, p_freqs=p_freqs, p_betas=p_freqs, o_t=o_t, m_t=o_t < T, o_p=o_p, m_p=o_p < P, T=T, P=P,
            C=1, PAPER_FP32=False,
        )  # fmt: skip
        b_y = _joined(b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos)
    tl.store(p_out + o_x, b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def _backward_kernel(
    p_g, p_out, p_dx, p_ddelta, p_dstart, p_partial, p_coords, p_freqs, T, E, P, TILES, s_g,
    HAS_DELTA: tl.constexpr, HAS_START: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of TILES tiles, blocks of 2 BLOCK_P dims)."""
    o_d = tl.program_id(1) * 2 * BLOCK_P + tl.arange(0, 2 * BLOCK_P)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    m_turns = tl.program_id(1) * BLOCK_P < P
    b_df = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (tl.program_id(0) * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m = (o_t < T)[:, None] & (o_d < E)[None, :]
        o_x = o_t.to(tl.int64)[:, None] * E + o_d[None, :]
        b_g = tl.load(p_g + o_t.to(tl.int64)[:, None] * s_g + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_start = tl.zeros((BLOCK_T, 2 * BLOCK_P), dtype=tl.float32)
        if m_turns:
            b_y0, b_y1 = _pairs(tl.load(p_out + o_x, mask=m, other=0.0).to(tl.float32))
            b_g0, b_g1 = _pairs(b_g)
            b_coords = tl.load(p_coords + o_t, mask=o_t < T, other=0).to(tl.float64)
            b_df += (b_y0 * b_g1 - b_y1 * b_g0).to(tl.float64) * b_coords[:, None]
            b_cos, b_sin = cos_sin(
                p_coords=p_coords, p_freqs=p_freqs, p_betas=p_freqs, o_t=o_t, m_t=o_t < T, o_p=o_p, m_p=o_p < P, T=T,
                P=P, C=1, PAPER_FP32=False,
            )  # fmt: skip
            b_g = _joined(b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin)
            b_start = tl.where((o_d < 2 * P)[None, :], -b_g, 0.0)
        tl.store(p_dx + o_x, b_g.to(p_dx.dtype.element_ty), mask=m)
        if HAS_DELTA:
            tl.store(p_ddelta + o_x, b_g.to(p_ddelta.dtype.element_ty), mask=m)
        if HAS_START:
            tl.store(p_dstart + o_x, b_start.to(p_dstart.dtype.element_ty), mask=m)
    if m_turns:
        b_row = tl.sum(b_df, axis=0) * 6.283185307179586
        tl.store(p_partial + tl.program_id(0) * P + o_p, b_row, mask=o_p < P)


class _AddTurned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, start_TE: Tensor | None, coords_T: Tensor, freqs_P: Tensor
    ) -> Tensor:
        T, E = x_TE.shape
        out_TE = torch.empty((T, E), dtype=x_TE.dtype, device=x_TE.device)
        if T:
            _forward_kernel[(triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(E, 2 * TILE["BLOCK_P"]))](
                p_x=x_TE,
                p_delta=x_TE if delta_TE is None else delta_TE,
                p_start=x_TE if start_TE is None else start_TE,
                p_out=out_TE,
                p_coords=coords_T,
                p_freqs=freqs_P,
                T=T,
                E=E,
                P=len(freqs_P),
                HAS_DELTA=delta_TE is not None,
                HAS_START=start_TE is not None,
                **TILE,
            )
        ctx.save_for_backward(out_TE, coords_T, freqs_P)
        ctx.dtypes = [None if x is None else x.dtype for x in (x_TE, delta_TE, start_TE)]
        return out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TE: Tensor) -> tuple[Tensor | None, ...]:
        out_TE, coords_T, freqs_P = ctx.saved_tensors
        (T, E), P = out_TE.shape, len(freqs_P)
        g_TE = g_TE if g_TE.stride(1) == 1 else g_TE.contiguous()
        dx, ddelta, dstart = (
            None if dtype is None else torch.empty((T, E), dtype=dtype, device=g_TE.device) for dtype in ctx.dtypes
        )
        tiles = triton.cdiv(triton.cdiv(T, TILE["BLOCK_T"]), ROWS)
        blocks = triton.cdiv(T, tiles * TILE["BLOCK_T"]) if T else 0
        partial = torch.empty((1, blocks, P), dtype=torch.float64, device=g_TE.device)
        if T:
            _backward_kernel[(blocks, triton.cdiv(E, 2 * TILE["BLOCK_P"]))](
                p_g=g_TE,
                p_out=out_TE,
                p_dx=dx,
                p_ddelta=dx if ddelta is None else ddelta,
                p_dstart=dx if dstart is None else dstart,
                p_partial=partial,
                p_coords=coords_T,
                p_freqs=freqs_P,
                T=T,
                E=E,
                P=P,
                TILES=tiles,
                s_g=g_TE.stride(0),
                HAS_DELTA=ddelta is not None,
                HAS_START=dstart is not None,
                **TILE,
            )
        dfreqs = torch.empty((1, P), dtype=freqs_P.dtype, device=g_TE.device)
        sum_rows_kernel[(triton.cdiv(P, SUM_TILE["BLOCK_N"]), 1)](
            p_rows=partial, p_sum=dfreqs, R=blocks, N=P, **SUM_TILE
        )
        return dx, ddelta, dstart, None, dfreqs[0]


def add_turned(
    x_TE: Tensor, delta_TE: Tensor | None, start_TE: Tensor | None, coords_T: Tensor, freqs_P: Tensor
) -> Tensor:
    """See `trope.kernels.readout.add_turned`."""
    given = (None if x is None else x.contiguous() for x in (x_TE, delta_TE, start_TE, coords_T, freqs_P))
    return _AddTurned.apply(*given)
