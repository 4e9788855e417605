# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The norms of the blocks, forward and backward one launch each.

Notable: whole rows in registers, a row never leaves its warp, so no reduction goes through shared memory; mean and
reciprocal deviation are kept for the backward (8 bytes a row); dropout is drawn again there instead of being stored;
the gate applies SiLU to u itself, and its backward writes u's gradient where that of the whole projection will be.

Names of the kernel arguments:

- norm: p_x residual stream, p_delta what is added (read if HAS_DELTA) after dropout, p_new their sum, p_out its norm;
  all [T, E], contiguous. RMS: no mean is subtracted, and p_mean is neither written nor read. p_g_new, p_g_out:
  gradients of the two results, read if HAS_NEW and HAS_OUT. p_dx, p_ddelta: the inputs'.
- gate: p_y attention's output and p_u the projection's u, [T, F], rows s_y and s_u elements apart; p_out [T, F]. p_g:
  its gradient. p_dy: y's gradient; p_du: u's, rows s_du elements apart, because it may lie inside a wider tensor.
- both: p_mean, p_rstd: float32 [T]. p_seed, i_stream, THRESHOLD, SCALE: dropout (random/triton.py).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E width, F = H D, R rows of a program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.random.triton import dropout_arguments, dropped
from trope.kernels.silu import silu, silu_and_slope


@triton.jit
def _moments(b_x, m_x, eps, E: tl.constexpr):
    """Mean and reciprocal standard deviation of every row, two-pass."""
    b_mean = tl.sum(b_x, axis=1) / E
    b_centred = tl.where(m_x, b_x - b_mean[:, None], 0.0)
    return b_mean, tl.rsqrt(tl.sum(b_centred * b_centred, axis=1) / E + eps)


@triton.jit
def _norm_backward(b_g, b_normed, b_rstd, E: tl.constexpr):
    """From the gradient of a layer norm's output to that of its input. Columns past E are zero in both blocks."""
    b_shift = tl.sum(b_g, axis=1) / E
    b_scale = tl.sum(b_g * b_normed, axis=1) / E
    return (b_g - b_shift[:, None] - b_normed * b_scale[:, None]) * b_rstd[:, None]


@triton.jit(do_not_specialize=["i_stream"])
def _norm_forward_kernel(
    p_x, p_delta, p_new, p_out, p_mean, p_rstd, p_seed, i_stream, T, eps,
    E: tl.constexpr, RMS: tl.constexpr, HAS_DELTA: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK_R rows,), as all kernels here."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_e = tl.arange(0, BLOCK_E)
    m = (o_r < T)[:, None] & (o_e < E)[None, :]
    o_x = o_r.to(tl.int64)[:, None] * E + o_e[None, :]
    b_x = tl.load(p_x + o_x, mask=m, other=0.0)
    if HAS_DELTA:
        b_delta = tl.load(p_delta + o_x, mask=m, other=0.0).to(tl.float32)
        b_x += dropped(b_delta, p_seed, i_stream, o_r, THRESHOLD, SCALE)
        tl.store(p_new + o_x, b_x, mask=m)
    if RMS:
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / E + eps)
        b_out = b_x * b_rstd[:, None]
    else:
        b_mean, b_rstd = _moments(b_x, m, eps, E)
        b_out = (b_x - b_mean[:, None]) * b_rstd[:, None]
        tl.store(p_mean + o_r, b_mean, mask=o_r < T)
    tl.store(p_out + o_x, b_out.to(p_out.dtype.element_ty), mask=m)
    tl.store(p_rstd + o_r, b_rstd, mask=o_r < T)


@triton.jit(do_not_specialize=["i_stream"])
def _norm_backward_kernel(
    p_g_new, p_g_out, p_new, p_mean, p_rstd, p_dx, p_ddelta, p_seed, i_stream, T,
    E: tl.constexpr, RMS: tl.constexpr, HAS_NEW: tl.constexpr, HAS_OUT: tl.constexpr, HAS_DELTA: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_e = tl.arange(0, BLOCK_E)
    m = (o_r < T)[:, None] & (o_e < E)[None, :]
    o_x = o_r.to(tl.int64)[:, None] * E + o_e[None, :]
    b_dx = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    if HAS_NEW:
        b_dx += tl.load(p_g_new + o_x, mask=m, other=0.0)
    if HAS_OUT:
        b_g = tl.load(p_g_out + o_x, mask=m, other=0.0).to(tl.float32)
        b_x = tl.load(p_new + o_x, mask=m, other=0.0)
        b_rstd = tl.load(p_rstd + o_r, mask=o_r < T, other=0.0)
        if RMS:
            b_normed = b_x * b_rstd[:, None]
            b_scale = tl.sum(b_g * b_normed, axis=1) / E
            b_dx += (b_g - b_normed * b_scale[:, None]) * b_rstd[:, None]
        else:
            b_mean = tl.load(p_mean + o_r, mask=o_r < T, other=0.0)
            b_normed = tl.where(m, (b_x - b_mean[:, None]) * b_rstd[:, None], 0.0)
            b_dx += _norm_backward(b_g, b_normed, b_rstd, E)
    tl.store(p_dx + o_x, b_dx, mask=m)
    if HAS_DELTA:
        b_dx = dropped(b_dx, p_seed, i_stream, o_r, THRESHOLD, SCALE)
        tl.store(p_ddelta + o_x, b_dx.to(p_ddelta.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["i_stream"])
def _gate_forward_kernel(
    p_y, p_u, p_out, p_mean, p_rstd, p_seed, i_stream, T, eps, s_y, s_u,
    F: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_f = tl.arange(0, BLOCK_E)[None, :]
    o_row = o_r.to(tl.int64)[:, None]
    m = (o_r < T)[:, None] & (o_f < F)
    b_y = tl.load(p_y + o_row * s_y + o_f, mask=m, other=0.0).to(tl.float32)
    b_gate = silu(tl.load(p_u + o_row * s_u + o_f, mask=m, other=0.0))
    b_mean, b_rstd = _moments(b_y, m, eps, F)
    b_out = dropped((b_y - b_mean[:, None]) * b_rstd[:, None] * b_gate, p_seed, i_stream, o_r, THRESHOLD, SCALE)
    tl.store(p_out + o_row * F + o_f, b_out.to(p_out.dtype.element_ty), mask=m)
    tl.store(p_mean + o_r, b_mean, mask=o_r < T)
    tl.store(p_rstd + o_r, b_rstd, mask=o_r < T)


@triton.jit(do_not_specialize=["i_stream"])
def _gate_backward_kernel(
    p_g, p_y, p_u, p_mean, p_rstd, p_dy, p_du, p_seed, i_stream, T, s_y, s_u, s_du,
    F: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_f = tl.arange(0, BLOCK_E)[None, :]
    o_row = o_r.to(tl.int64)[:, None]
    m = (o_r < T)[:, None] & (o_f < F)
    b_g = tl.load(p_g + o_row * F + o_f, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(p_y + o_row * s_y + o_f, mask=m, other=0.0).to(tl.float32)
    b_gate, b_slope = silu_and_slope(tl.load(p_u + o_row * s_u + o_f, mask=m, other=0.0))
    b_mean = tl.load(p_mean + o_r, mask=o_r < T, other=0.0)
    b_rstd = tl.load(p_rstd + o_r, mask=o_r < T, other=0.0)
    b_g = dropped(b_g, p_seed, i_stream, o_r, THRESHOLD, SCALE)
    b_normed = tl.where(m, (b_y - b_mean[:, None]) * b_rstd[:, None], 0.0)
    tl.store(p_du + o_row * s_du + o_f, (b_g * b_normed * b_slope).to(p_du.dtype.element_ty), mask=m)
    b_dy = _norm_backward(b_g * b_gate, b_normed, b_rstd, F)
    tl.store(p_dy + o_row * F + o_f, b_dy.to(p_dy.dtype.element_ty), mask=m)


def row_tile(width: int) -> dict[str, int]:
    """Block sizes of kernels that hold whole rows: 1024 elements a warp, short rows several at a time.

    1024 is 32 registers a thread for each block that a kernel holds. No file holds a comparison with other sizes; the
    norms run at about the speed of memory (docs/speed.md).
    """
    block = max(8, triton.next_power_of_2(width))
    return {"BLOCK_R": max(1, 1024 // block), "BLOCK_E": block, "num_warps": max(1, block // 1024)}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, eps: float, out_dtype: torch.dtype, rms: bool, dropout: float,
        seed: Tensor | None, stream: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        T, E = x_TE.shape
        p_seed, constants = dropout_arguments(dropout, seed, fallback=x_TE)
        new = x_TE if delta_TE is None else torch.empty_like(x_TE)
        out = torch.empty((T, E), dtype=out_dtype, device=x_TE.device)
        mean, rstd = torch.empty((2, T), dtype=torch.float32, device=x_TE.device)
        tile = row_tile(E)
        if T:
            _norm_forward_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
                p_x=x_TE,
                p_delta=x_TE if delta_TE is None else delta_TE,
                p_new=new,
                p_out=out,
                p_mean=mean,
                p_rstd=rstd,
                p_seed=p_seed,
                i_stream=stream,
                T=T,
                eps=eps,
                E=E,
                RMS=rms,
                HAS_DELTA=delta_TE is not None,
                **constants,
                **tile,
            )
        ctx.save_for_backward(new, mean, rstd, p_seed)
        ctx.set_materialize_grads(False)
        ctx.delta_dtype = None if delta_TE is None else delta_TE.dtype
        ctx.rms, ctx.stream, ctx.constants = rms, stream, constants
        return new, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_new: Tensor | None, g_out: Tensor | None) -> tuple[Tensor | None, ...]:
        new, mean, rstd, p_seed = ctx.saved_tensors
        T, E = new.shape
        dx = torch.empty_like(new)
        ddelta = None if ctx.delta_dtype is None else torch.empty_like(new, dtype=ctx.delta_dtype)
        tile = row_tile(E)
        if T:
            _norm_backward_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
                p_g_new=new if g_new is None else g_new.contiguous(),
                p_g_out=new if g_out is None else g_out.contiguous(),
                p_new=new,
                p_mean=mean,
                p_rstd=rstd,
                p_dx=dx,
                p_ddelta=dx if ddelta is None else ddelta,
                p_seed=p_seed,
                i_stream=ctx.stream,
                T=T,
                E=E,
                RMS=ctx.rms,
                HAS_NEW=g_new is not None,
                HAS_OUT=g_out is not None,
                HAS_DELTA=ddelta is not None,
                **ctx.constants,
                **tile,
            )
        return dx, ddelta, None, None, None, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_TF: Tensor, u_TF: Tensor, dropout: float, seed: Tensor | None, stream: int, eps: float,
        buffer: GradientBuffer | None,
    ) -> Tensor:  # fmt: skip
        T, F = y_TF.shape
        out = torch.empty((T, F), dtype=y_TF.dtype, device=y_TF.device)
        mean, rstd = torch.empty((2, T), dtype=torch.float32, device=y_TF.device)
        p_seed, constants = dropout_arguments(dropout, seed, fallback=y_TF)
        tile = row_tile(F)
        if T:
            _gate_forward_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
                p_y=y_TF,
                p_u=u_TF,
                p_out=out,
                p_mean=mean,
                p_rstd=rstd,
                p_seed=p_seed,
                i_stream=stream,
                T=T,
                eps=eps,
                s_y=y_TF.stride(0),
                s_u=u_TF.stride(0),
                F=F,
                **constants,
                **tile,
            )
        ctx.save_for_backward(y_TF, u_TF, mean, rstd, p_seed)
        ctx.stream, ctx.constants, ctx.buffer = stream, constants, buffer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TF: Tensor) -> tuple[Tensor | None, ...]:
        y_TF, u_TF, mean, rstd, p_seed = ctx.saved_tensors
        T, F = y_TF.shape
        dy = torch.empty((T, F), dtype=y_TF.dtype, device=y_TF.device)
        du = torch.empty_like(dy, dtype=u_TF.dtype) if ctx.buffer is None else ctx.buffer.first_columns(u_TF)
        tile = row_tile(F)
        if T:
            _gate_backward_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
                p_g=g_TF.contiguous(),
                p_y=y_TF,
                p_u=u_TF,
                p_mean=mean,
                p_rstd=rstd,
                p_dy=dy,
                p_du=du,
                p_seed=p_seed,
                i_stream=ctx.stream,
                T=T,
                s_y=y_TF.stride(0),
                s_u=u_TF.stride(0),
                s_du=du.stride(0),
                F=F,
                **ctx.constants,
                **tile,
            )
        return dy, du, None, None, None, None, None


def norm(
    x_TE: Tensor, delta_TE: Tensor | None, eps: float, out_dtype: torch.dtype, rms: bool, dropout: float,
    seed: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert x_TE.dtype == torch.float32, "the residual stream is float32"
    assert delta_TE is None or delta_TE.shape == x_TE.shape
    delta_TE = None if delta_TE is None else delta_TE.contiguous()
    return _Norm.apply(x_TE.contiguous(), delta_TE, eps, out_dtype, rms, dropout, seed, stream)


def gate(
    y_TF: Tensor, u_TF: Tensor, dropout: float, seed: Tensor | None, stream: int, eps: float,
    buffer: GradientBuffer | None,
) -> Tensor:  # fmt: skip
    assert y_TF.shape == u_TF.shape
    y_TF, u_TF = (x if x.stride(1) == 1 else x.contiguous() for x in (y_TF, u_TF))
    return _Gate.apply(y_TF, u_TF, dropout, seed, stream, eps, buffer)
