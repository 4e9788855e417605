"""The fused attention as an autograd function. Imported on first use by attention.py, never by `import trope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trope.kernels.attention import backward as attention_backward
from trope.kernels.attention import triton as attention_triton
from trope.kernels.attention.triton import Bias

# The gradient of the scores lives only during one block's backward: it may take more than what is kept for all.
KEPT = 4


class FusedAttention(torch.autograd.Function):
    """q, k, v, bounds, n, position, time, gaps, most bytes of a sheet -> y; see `attention.hstu_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Any,
        n: int,
        position: Any,
        time: Any,
        gaps: Any,
        most_bytes: int,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        bias = attention_triton.with_sheet(Bias(position, time, gaps), bounds, q, most_bytes)
        ctx.save_for_backward(q, k, v, position, time, bias.sheet)
        ctx.bounds, ctx.n, ctx.gaps, ctx.most_bytes = bounds, n, gaps, most_bytes
        return attention_triton.forward(q, k, v, bounds, n, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position, time, sheet = ctx.saved_tensors
        (dy,) = gradients
        bias = Bias(position, time, ctx.gaps, sheet)
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dq, dk, dv, d_position, d_time = attention_backward.backward(
            dy, q, k, v, ctx.bounds, ctx.n, bias, KEPT * ctx.most_bytes
        )
        return dq, dk, dv, None, None, d_position, d_time, None, None
