"""Rotation of queries and keys by coordinates: the one place that decides which implementation runs.

`rotate_qk` is what the modules in trope.rotary call. The Triton version is registered as two torch operators
(`trope::rotate_qk` and its backward), so autograd knows its gradients and torch.compile sees through it.

Shape letters: B batch, L positions, H heads, D head dim, P planes, C coordinates.
"""

from typing import Any

import torch
from torch import Tensor

from trope.kernels import rotary_reference
from trope.kernels.backend import Backend, resolve_backend


def rotate_qk(
    q_BLHD: Tensor,
    k_BLHD: Tensor,
    coords_q_CBL: Tensor,
    coords_k_CBL: Tensor,
    freqs_q_CP: Tensor,
    freqs_k_CP: Tensor,
    betas_P: Tensor | None = None,
    interleaved: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Turn every plane p of q and k by sum over c of coords[c] * freqs[c, p]; differentiable in q, k and both freqs.

    Args:
        q_BLHD, k_BLHD: any strides; the number of heads may differ (grouped queries), the rest must agree.
        coords_q_CBL, coords_k_CBL: where each token stands, int64 or float64; no gradient.
        freqs_q_CP, freqs_k_CP: turns per unit of coordinate, float64. P planes rotate the first 2P dims of each head.
        betas_P: if given, the paper's FP32 phases: freqs hold alpha, both float32, the angle is alpha * t / beta.
        interleaved: plane p is (x[2p], x[2p + 1]); otherwise halves, (x[p], x[P + p]).
    """
    if resolve_backend(backend, q_BLHD) == "torch":
        return (
            rotary_reference.rotate_by(q_BLHD, coords_q_CBL, freqs_q_CP, betas_P, interleaved),
            rotary_reference.rotate_by(k_BLHD, coords_k_CBL, freqs_k_CP, betas_P, interleaved),
        )
    return torch.ops.trope.rotate_qk(
        _dense_planes(q_BLHD), _dense_planes(k_BLHD), coords_q_CBL.contiguous(), coords_k_CBL.contiguous(),
        freqs_q_CP.contiguous(), freqs_k_CP.contiguous(), betas_P, interleaved,
    )  # fmt: skip


def _dense_planes(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.triton_op("trope::rotate_qk", mutates_args=())
def _rotate_qk(
    q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor,
    betas: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from trope.kernels import rotary_triton

    return rotary_triton.forward(q, k, coords_q, coords_k, freqs_q, freqs_k, betas, interleaved)


@torch.library.triton_op("trope::rotate_qk_backward", mutates_args=())
def _rotate_qk_backward(
    g_q: Tensor, g_k: Tensor,
    q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor,
    betas: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from trope.kernels import rotary_triton

    return rotary_triton.backward(g_q, g_k, q, k, coords_q, coords_k, freqs_q, freqs_k, betas, interleaved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g_q: Tensor, g_k: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dfreqs = torch.ops.trope.rotate_qk_backward(
        _dense_planes(g_q), _dense_planes(g_k), *ctx.saved_tensors, ctx.interleaved
    )
    return dq, dk, None, None, dfreqs[0], dfreqs[1], None, None


_rotate_qk.register_autograd(_backward, setup_context=_setup_context)
