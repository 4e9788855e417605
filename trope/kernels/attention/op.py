"""The fused attention as an autograd function. attention/__init__.py imports it on first use, `import trope` never."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trope.kernels.attention.arguments import Bias
from trope.kernels.attention.backward import backward
from trope.kernels.attention.triton import forward, with_sheet

# The gradient of the scores may take this many times the budget of what is kept for all blocks, because it lives only
# during one block's backward. With 4, the bf16 gradients of `shop` (128 x 8 heads x 512 x 512, 0.5 GiB) are kept.
# Keeping them is part of what took `shop` from 45 to 52 it/s (docs/speed.md, e9921df to 8b9a7e0); the factor was not
# tuned.
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
        bias = with_sheet(Bias(position, time, gaps), bounds, q, most_bytes)
        ctx.save_for_backward(q, k, v, position, time, bias.sheet)
        ctx.bounds, ctx.n, ctx.gaps, ctx.most_bytes = bounds, n, gaps, most_bytes
        return forward(q, k, v, bounds, n, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position, time, sheet = ctx.saved_tensors
        (dy,) = gradients
        bias = Bias(position, time, ctx.gaps, sheet)
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dq, dk, dv, d_position, d_time = backward(dy, q, k, v, ctx.bounds, ctx.n, bias, KEPT * ctx.most_bytes)
        return dq, dk, dv, None, None, d_position, d_time, None, None
