# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""silu(gate) * value, forward and backward one launch each.

Notable: the backward needs the projection and the gradient, not SiLU's output; it writes the gradients of gate and
value side by side into one tensor, which is the projection's gradient without a further copy.

Names of the kernel arguments: p_pre the projection [T, 2 F], gate and value side by side, and p_out the result [T, F];
p_g the result's gradient [T, F], p_dpre the projection's [T, 2 F]. All are contiguous.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, F inner width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.silu import silu, silu_and_slope


@triton.jit
def _places(T, F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Where a program's gates lie in [T, 2 F], where its results lie in [T, F], and which of them exist."""
    o_t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    o_f = (tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    return o_t * (2 * F) + o_f, o_t * F + o_f, (o_t < T) & (o_f < F)


@triton.jit
def _forward_kernel(p_pre, p_out, T, F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Grid (blocks of tokens, blocks of columns), as the backward."""
    o_gate, o_out, m = _places(T, F, BLOCK_T, BLOCK_F)
    b_gate = tl.load(p_pre + o_gate, mask=m, other=0.0)
    b_value = tl.load(p_pre + o_gate + F, mask=m, other=0.0)
    b_out = silu(b_gate) * b_value.to(tl.float32)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def _backward_kernel(p_pre, p_g, p_dpre, T, F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    o_gate, o_out, m = _places(T, F, BLOCK_T, BLOCK_F)
    b_gate = tl.load(p_pre + o_gate, mask=m, other=0.0)
    b_value = tl.load(p_pre + o_gate + F, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + o_out, mask=m, other=0.0).to(tl.float32)
    b_silu, b_slope = silu_and_slope(b_gate)
    tl.store(p_dpre + o_gate, (b_g * b_value * b_slope).to(p_dpre.dtype.element_ty), mask=m)
    tl.store(p_dpre + o_gate + F, (b_g * b_silu).to(p_dpre.dtype.element_ty), mask=m)


def _tile(width: int) -> dict[str, int]:
    """Block sizes: 256 columns (512 bytes in bf16) of 8 tokens, so that a thread of four warps moves 16 bytes twice.
    Not tuned."""
    block = min(256, triton.next_power_of_2(width))
    return {"BLOCK_T": 2048 // block, "BLOCK_F": block, "num_warps": 4}


def _grid(T: int, F: int, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(T, tile["BLOCK_T"]), triton.cdiv(F, tile["BLOCK_F"])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre_TG: Tensor) -> Tensor:
        T, F = len(pre_TG), pre_TG.shape[1] // 2
        out = torch.empty((T, F), dtype=pre_TG.dtype, device=pre_TG.device)
        tile = _tile(F)
        if T:
            _forward_kernel[_grid(T, F, tile)](p_pre=pre_TG, p_out=out, T=T, F=F, **tile)
        ctx.save_for_backward(pre_TG)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (pre_TG,) = ctx.saved_tensors
        T, F = len(pre_TG), pre_TG.shape[1] // 2
        dpre = torch.empty_like(pre_TG)
        tile = _tile(F)
        if T:
            g_TF = gradients[0].contiguous()
            _backward_kernel[_grid(T, F, tile)](p_pre=pre_TG, p_g=g_TF, p_dpre=dpre, T=T, F=F, **tile)
        return dpre


def swiglu(pre_TG: Tensor) -> Tensor:
    """See `trope.kernels.swiglu.swiglu`."""
    return _SwiGLU.apply(pre_TG.contiguous())
