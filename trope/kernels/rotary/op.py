"""The fused kernels as torch operators: `trope::rotate_qk` and its backward.

Registered as Triton operators, so that autograd knows the gradients and torch.compile sees through to the kernels.
Imported on first use by rotary/__init__.py, never by `import trope`.
"""

from typing import Any

import torch
from torch import Tensor

from trope.kernels.rotary import triton as fused


def rotate_qk(
    q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor,
    betas: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Bring the arguments into the form the kernels take, and call the operator."""
    return torch.ops.trope.rotate_qk(
        _dense_planes(q), _dense_planes(k), coords_q.contiguous(), coords_k.contiguous(),
        freqs_q.contiguous(), freqs_k.contiguous(), betas, interleaved,
    )  # fmt: skip


def _dense_planes(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.triton_op("trope::rotate_qk", mutates_args=())
def _rotate_qk(
    q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor,
    betas: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return fused.forward(q, k, coords_q, coords_k, freqs_q, freqs_k, betas, interleaved)


@torch.library.triton_op("trope::rotate_qk_backward", mutates_args=())
def _rotate_qk_backward(
    g_q: Tensor, g_k: Tensor,
    q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor,
    betas: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return fused.backward(g_q, g_k, q, k, coords_q, coords_k, freqs_q, freqs_k, betas, interleaved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g_q: Tensor, g_k: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dfreqs = torch.ops.trope.rotate_qk_backward(
        _dense_planes(g_q), _dense_planes(g_k), *ctx.saved_tensors, ctx.interleaved
    )
    return dq, dk, None, None, dfreqs[0], dfreqs[1], None, None


_rotate_qk.register_autograd(_backward, setup_context=_setup_context)
