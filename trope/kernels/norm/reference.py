"""The norms of the blocks in plain PyTorch: the ground truth of the kernels. All are without affine.

Shape letters: T tokens, E width, F = H D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    rms: bool = False,
    keep_TE: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The residual stream with `delta_TE` added, dropped by the mask `keep_TE`, and its layer norm or RMS norm."""
    new_TE = x_TE
    if delta_TE is not None:
        added_TE = delta_TE.to(x_TE.dtype)
        new_TE = x_TE + (added_TE if keep_TE is None else added_TE * keep_TE / (1 - dropout))
    normed_TE = (F.rms_norm if rms else F.layer_norm)(new_TE, new_TE.shape[1:], eps=eps)
    return new_TE, normed_TE.to(out_dtype)


def gate(y_TF: Tensor, u_TF: Tensor, keep_TF: Tensor | None, dropout: float, eps: float) -> Tensor:
    """Layer norm of y times SiLU of u, then dropout by the mask `keep_TF`; float32 inside, float64 stays float64."""
    dtype = torch.promote_types(y_TF.dtype, torch.float32)
    gated_TF = F.layer_norm(y_TF.to(dtype), y_TF.shape[1:], eps=eps) * F.silu(u_TF.to(dtype))
    if keep_TF is not None:
        gated_TF = gated_TF * keep_TF / (1 - dropout)
    return gated_TF.to(y_TF.dtype)
