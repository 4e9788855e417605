"""The norms of the blocks, each with what surrounds it in one pass over memory. Decides what runs.

`norm` adds a branch's output, with dropout, to the residual stream and normalises the sum: layer norm for HSTU, RMS
norm for the Transformer block. `gate`, of HSTU, normalises attention's
output, multiplies it by SiLU of u and applies dropout. u comes straight from the projection; SiLU of u is never stored.

Shape letters: T tokens, E width, F = H D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.norm import reference
from trope.kernels.random.reference import keep_mask

EPS = 1e-6  # of both norms, as in the public code


def norm(
    x_TE: Tensor,
    delta_TE: Tensor | None = None,
    eps: float = EPS,
    out_dtype: torch.dtype = torch.bfloat16,
    rms: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """x + dropout(delta) in the dtype of x, and its norm without affine in `out_dtype`; differentiable in both inputs.

    Args:
        x_TE: the residual stream.
        delta_TE: what a branch adds to it; without one the first result is x itself.
        rms: divide by the root of the mean square. Otherwise layer norm.
        seed: int64 [1] on the device; None drops nothing.
        stream: one number per place in the model that drops.
    """
    if resolve_backend(backend, x_TE) == "torch":
        keep = None if delta_TE is None else _keep(delta_TE, dropout, seed, stream)
        return reference.norm(x_TE, delta_TE, eps, out_dtype, rms, keep, dropout)
    from trope.kernels.norm import triton as fused  # only now: CPU users need no Triton

    return fused.norm(x_TE, delta_TE, eps, out_dtype, rms, dropout, seed, stream)


def gate(
    y_TF: Tensor,
    u_TF: Tensor,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    eps: float = EPS,
    buffer: GradientBuffer | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Dropout of (layer norm of y, without affine, times SiLU of u), in the dtype of y; differentiable in y and u.

    Args:
        y_TF, u_TF: rows may be strided views, such as `u.flatten(1)` of silu_rotate's u.
        seed: int64 [1] on the device; None drops nothing.
        stream: one number per place in the model that drops.
        buffer: shared with the silu_rotate that u is from, it saves a copy of u's gradient; the reference needs none.
    """
    if resolve_backend(backend, y_TF) == "torch":
        return reference.gate(y_TF, u_TF, _keep(y_TF, dropout, seed, stream), dropout, eps)
    from trope.kernels.norm import triton as fused

    return fused.gate(y_TF, u_TF, dropout, seed, stream, eps, buffer)


def _keep(x_TF: Tensor, dropout: float, seed: Tensor | None, stream: int) -> Tensor | None:
    """What the reference keeps of x, bool [T, F]; None where nothing drops."""
    if seed is None or dropout == 0:
        return None
    return keep_mask(seed, stream, (x_TF.shape[0], x_TF.shape[1]), dropout)
