# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Causal softmax attention of short sequences: one program has a head of a sequence, forward and backward.

Nothing is kept but the inputs: the backward computes the softmax and its dropout mask again.

Names of the kernel arguments: p_q, p_k, p_v, p_dy [T, H, D], s_x_t and s_x_h elements between tokens and heads; p_y,
p_dq, p_dk, p_dv [T, H, D], contiguous, s_t between tokens. L positions of a sequence. p_seed int64 [1], i_stream.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B batch, L positions, T = B * L tokens, H heads, D head dim.
"""

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.attention.arguments import block_of, strides
from trope.kernels.attention.tiles import dot, load_tile, store_tile
from trope.kernels.random.triton import dropout_arguments, dropped


@triton.jit
def _weights(b_q, b_k, o_m, L, scale, FAST: tl.constexpr):
    """The softmax of one head, float32 [BLOCK, BLOCK]; zero where a query must not look."""
    o_n = tl.arange(0, o_m.shape[0])
    b_s = dot(b_q, tl.trans(b_k), FAST, "ieee") * scale
    # Queries behind the last look at all keys, so that no row is empty; nothing of them is stored.
    b_s = tl.where((o_m[:, None] >= o_n[None, :]) & (o_n < L)[None, :], b_s, float("-inf"))
    b_e = tl.exp(b_s - tl.max(b_s, axis=1)[:, None])
    return b_e / tl.sum(b_e, axis=1)[:, None]


@triton.jit(do_not_specialize=["i_stream"])
def _causal_forward_kernel(
    p_q, p_k, p_v, p_y, p_seed, s_q_t, s_k_t, s_v_t, s_q_h, s_k_h, s_v_h, s_t, i_stream, L, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (H, B)."""
    i_h, i_b, H = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    o_m = tl.arange(0, BLOCK)
    m_m, o_t = o_m < L, i_b * L + o_m
    b_q = load_tile(p_q + i_h * s_q_h, o_t, m_m, s_q_t, D, BLOCK_D)
    b_k = load_tile(p_k + i_h * s_k_h, o_t, m_m, s_k_t, D, BLOCK_D)
    b_v = load_tile(p_v + i_h * s_v_h, o_t, m_m, s_v_t, D, BLOCK_D)
    b_w = _weights(b_q, b_k, o_m, L, scale, FAST)
    b_w = dropped(b_w, p_seed, i_stream, (i_b * H + i_h) * L + o_m, THRESHOLD, SCALE)
    store_tile(p_y + i_h * D, dot(b_w.to(b_v.dtype), b_v, FAST, "ieee"), o_t, m_m, s_t, D, BLOCK_D)


@triton.jit(do_not_specialize=["i_stream"])
def _causal_backward_kernel(
    p_q, p_k, p_v, p_dy, p_dq, p_dk, p_dv, p_seed,
    s_q_t, s_k_t, s_v_t, s_dy_t, s_q_h, s_k_h, s_v_h, s_dy_h, s_t, i_stream, L, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (H, B)."""
    i_h, i_b, H = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    o_m = tl.arange(0, BLOCK)
    m_m, o_t = o_m < L, i_b * L + o_m
    o_row = (i_b * H + i_h) * L + o_m
    b_q = load_tile(p_q + i_h * s_q_h, o_t, m_m, s_q_t, D, BLOCK_D)
    b_k = load_tile(p_k + i_h * s_k_h, o_t, m_m, s_k_t, D, BLOCK_D)
    b_v = load_tile(p_v + i_h * s_v_h, o_t, m_m, s_v_t, D, BLOCK_D)
    b_dy = load_tile(p_dy + i_h * s_dy_h, o_t, m_m, s_dy_t, D, BLOCK_D)
    b_w = _weights(b_q, b_k, o_m, L, scale, FAST)
    b_kept = dropped(b_w, p_seed, i_stream, o_row, THRESHOLD, SCALE)
    b_dv = dot(tl.trans(b_kept).to(b_dy.dtype), b_dy, FAST, "ieee")
    store_tile(p_dv + i_h * D, b_dv, o_t, m_m, s_t, D, BLOCK_D)
    b_dw = dropped(dot(b_dy, tl.trans(b_v), FAST, "ieee"), p_seed, i_stream, o_row, THRESHOLD, SCALE)
    b_ds = b_w * (b_dw - tl.sum(b_dw * b_w, axis=1)[:, None]) * scale
    b_ds = b_ds.to(b_k.dtype)
    store_tile(p_dq + i_h * D, dot(b_ds, b_k, FAST, "ieee"), o_t, m_m, s_t, D, BLOCK_D)
    store_tile(p_dk + i_h * D, dot(tl.trans(b_ds), b_q, FAST, "ieee"), o_t, m_m, s_t, D, BLOCK_D)


def _arguments(q_THD: Tensor, L: int, dropout: float, seed: Tensor | None, stream: int) -> dict[str, Any]:
    """What both kernels take besides tensors. Warps and stages were not tuned."""
    H, D = q_THD.shape[1:]
    p_seed, drops = dropout_arguments(dropout, seed, q_THD)
    return {
        "p_seed": p_seed,
        "i_stream": stream,
        "s_t": H * D,
        "L": L,
        "scale": 1 / math.sqrt(D),
        "D": D,
        "BLOCK": block_of(L),
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        # The interpreter cannot multiply 16-bit numbers.
        "FAST": q_THD.dtype != torch.float32 and os.environ.get("TRITON_INTERPRET") != "1",
        **drops,
        "num_warps": 4,
    }


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, L: int, dropout: float, seed: Tensor | None, stream: int
    ) -> Tensor:
        T, H, D = q.shape
        y = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
        arguments = _arguments(q, L, dropout, seed, stream)
        if T:
            _causal_forward_kernel[(H, T // L)](p_q=q, p_k=k, p_v=v, p_y=y, **strides(q=q, k=k, v=v), **arguments)
        ctx.save_for_backward(q, k, v, *([] if seed is None else [seed]))
        ctx.settings = (L, dropout, stream)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (q, k, v, *seeds), (L, dropout, stream) = gradients, ctx.saved_tensors, ctx.settings
        T, H, D = q.shape
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dq, dk, dv = torch.empty((3, T, H, D), dtype=q.dtype, device=q.device)
        arguments = _arguments(q, L, dropout, seeds[0] if seeds else None, stream)
        if T:
            _causal_backward_kernel[(H, T // L)](
                p_q=q, p_k=k, p_v=v, p_dy=dy, p_dq=dq, p_dk=dk, p_dv=dv, **strides(q=q, k=k, v=v, dy=dy), **arguments
            )
        return dq, dk, dv, None, None, None, None


def causal_attention(
    q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, dropout: float, seed: Tensor | None, stream: int
) -> Tensor:
    """See `trope.kernels.causal_attention.causal_attention`."""
    B, L, H, D = q_BLHD.shape
    # Views of all tokens, one behind the other, unless a sequence is a part of a longer one.
    q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLHD, v_BLHD))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _CausalAttention.apply(q, k, v, L, dropout, seed, stream).view(B, L, H, D)
