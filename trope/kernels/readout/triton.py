# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The last residual sum with its turning dims turned: one pass over memory forward, one backward.

Notable: the backward of a turned plane needs its output and nothing of its inputs, since the cross product of output
and gradient is the same before and after the rotation; frequency gradients are summed in a fixed order.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E width, P turning planes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.rotary.triton import ROWS, _cos_sin, _sum_rows_kernel

BLOCK_T, BLOCK_P = 8, 64  # 128 dims of 8 tokens a program


@triton.jit
def _pairs(b_x):
    """The two components of each plane of a block [tokens, 2 planes]."""
    return tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))


@triton.jit
def _joined(b_0, b_1):
    return tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], 2 * b_0.shape[1]))


@triton.jit
def _forward_kernel(
    p_x, p_delta, p_start, p_out, p_coords, p_freqs, T, E, P, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr
):
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.program_id(1) * 2 * BLOCK_P + tl.arange(0, 2 * BLOCK_P)
    m = (o_t < T)[:, None] & (o_d < E)[None, :]
    o_x = o_t.to(tl.int64)[:, None] * E + o_d[None, :]
    b_y = tl.load(p_x + o_x, mask=m, other=0.0).to(tl.float32) + tl.load(p_delta + o_x, mask=m, other=0.0).to(
        tl.float32
    )
    if tl.program_id(1) * BLOCK_P < P:
        o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        b_y -= tl.load(p_start + o_x, mask=m & (o_d < 2 * P)[None, :], other=0.0).to(tl.float32)
        b_0, b_1 = _pairs(b_y)
        # A plane past the last has frequency 0 here, and does not turn.
        b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_freqs, o_t, o_t < T, o_p, o_p < P, T, P, 1, False)
        b_y = _joined(b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos)
    tl.store(p_out + o_x, b_y.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def _backward_kernel(
    p_g, p_out, p_dx, p_ddelta, p_dstart, p_partial, p_coords, p_freqs, T, E, P, TILES, s_g,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
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
            b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_freqs, o_t, o_t < T, o_p, o_p < P, T, P, 1, False)
            b_g = _joined(b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin)
            b_start = tl.where((o_d < 2 * P)[None, :], -b_g, 0.0)
        tl.store(p_dx + o_x, b_g.to(p_dx.dtype.element_ty), mask=m)
        tl.store(p_ddelta + o_x, b_g.to(p_ddelta.dtype.element_ty), mask=m)
        tl.store(p_dstart + o_x, b_start.to(p_dstart.dtype.element_ty), mask=m)
    if m_turns:
        b_row = tl.sum(b_df, axis=0) * 6.283185307179586
        tl.store(p_partial + tl.program_id(0) * P + o_p, b_row, mask=o_p < P)


class _AddTurned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, delta_TE: Tensor, start_TE: Tensor, coords_T: Tensor, freqs_P: Tensor
    ) -> Tensor:
        T, E = x_TE.shape
        out_TE = torch.empty((T, E), dtype=x_TE.dtype, device=x_TE.device)
        if T:
            _forward_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(E, 2 * BLOCK_P))](
                x_TE, delta_TE, start_TE, out_TE, coords_T, freqs_P, T, E, len(freqs_P),
                BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, num_warps=2,
            )  # fmt: skip
        ctx.save_for_backward(out_TE, coords_T, freqs_P)
        ctx.dtypes = x_TE.dtype, delta_TE.dtype, start_TE.dtype
        return out_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TE: Tensor) -> tuple[Tensor | None, ...]:
        out_TE, coords_T, freqs_P = ctx.saved_tensors
        (T, E), P = out_TE.shape, len(freqs_P)
        g_TE = g_TE if g_TE.stride(1) == 1 else g_TE.contiguous()
        grads = [torch.empty((T, E), dtype=dtype, device=g_TE.device) for dtype in ctx.dtypes]
        tiles = triton.cdiv(triton.cdiv(T, BLOCK_T), ROWS)
        blocks = triton.cdiv(T, tiles * BLOCK_T) if T else 0
        partial = torch.empty((1, blocks, P), dtype=torch.float64, device=g_TE.device)
        if T:
            _backward_kernel[(blocks, triton.cdiv(E, 2 * BLOCK_P))](
                g_TE, out_TE, *grads, partial, coords_T, freqs_P, T, E, P, tiles, g_TE.stride(0),
                BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, num_warps=2,
            )  # fmt: skip
        dfreqs = torch.empty((1, P), dtype=freqs_P.dtype, device=g_TE.device)
        _sum_rows_kernel[(triton.cdiv(P, 4), 1)](partial, dfreqs, blocks, P, BLOCK_R=512, BLOCK_N=4, num_warps=4)
        return (*grads, None, dfreqs[0])


def add_turned(x_TE: Tensor, delta_TE: Tensor, start_TE: Tensor, coords_T: Tensor, freqs_P: Tensor) -> Tensor:
    return _AddTurned.apply(
        x_TE.contiguous(), delta_TE.contiguous(), start_TE.contiguous(), coords_T.contiguous(), freqs_P.contiguous()
    )
