"""The fused attention as an autograd function. attention/__init__.py imports it on first use, `import trope` never."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trope.kernels.aside import Late
from trope.kernels.attention import narrow
from trope.kernels.attention.arguments import Bias, at_least, kept_bytes, passing_bytes
from trope.kernels.attention.backward import backward
from trope.kernels.attention.triton import forward, with_sheet

# A bias is kept for the backward if it takes at most `most_bytes`, or this share of the GPU's memory if that is more:
# 559 MiB a block on an H200, where 16 sequences of 4,096 positions take 512.
KEPT_SHARE = 256


class FusedAttention(torch.autograd.Function):
    """q, k, v, bounds, n, position, time, gaps, most bytes that are kept, whether gradients are on, late -> y; see
    `attention.hstu_attention`."""

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
        learns: bool,
        late: Late,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        passing = passing_bytes(most_bytes, q.device)
        bias = Bias(position, time, gaps)
        # These keep the gradient of the scores, and need no runs of buckets.
        fits = not learns or kept_bytes(q.shape[1], q, bounds) <= passing
        is_narrow = fits and narrow.is_narrow(q, k, v, bounds, bias)
        bias = with_sheet(bias, bounds, q, passing, narrow.write_sheet if is_narrow else None)
        is_kept = bias.sheet is not None and bias.sheet.nbytes <= at_least(most_bytes, KEPT_SHARE, q.device)
        ctx.save_for_backward(q, k, v, position, time, bias.sheet if is_kept else None)
        ctx.bounds, ctx.n, ctx.gaps, ctx.passing, ctx.late = bounds, n, gaps, passing, late
        ctx.is_narrow = is_narrow and bias.sheet is not None
        if ctx.is_narrow:
            return narrow.forward(q, k, v, bounds, n, bias)
        return forward(q, k, v, bounds, n, bias, learns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position, time, sheet = ctx.saved_tensors
        (dy,) = gradients
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        bias = Bias(position, time, ctx.gaps, sheet)
        if sheet is None:
            write = narrow.write_sheet if ctx.is_narrow else None
            bias = with_sheet(bias, ctx.bounds, q, ctx.passing, write)
        if ctx.is_narrow:
            found = narrow.backward(dy, q, k, v, ctx.bounds, ctx.n, bias)
        else:
            found = backward(dy, q, k, v, ctx.bounds, ctx.n, bias, ctx.passing, ctx.late)
        dq, dk, dv, d_position, d_time = found
        return dq, dk, dv, None, None, d_position, d_time, None, None, None, None
