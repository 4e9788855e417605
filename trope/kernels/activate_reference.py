"""SiLU of HSTU's joint projection and the rotation of its q and k, in plain PyTorch: the ground truth of the kernel.

Shape letters: T tokens, F = 4 H D, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.rotary_reference import rotate_by


def activate(
    pre_TF: Tensor, heads: int,
    coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, freqs_q_CP: Tensor | None, freqs_k_CP: Tensor | None,
    betas_P: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u, v, q, k, each [T, H, D]; float64 stays float64, everything else is computed in float32 and rounded once."""
    x = pre_TF if pre_TF.dtype == torch.float64 else pre_TF.float()
    u, v, q, k = F.silu(x).view(len(x), 4, heads, -1).unbind(1)
    if freqs_q_CP is not None and freqs_k_CP is not None:
        assert coords_q_CT is not None and coords_k_CT is not None, "frequencies turn by coordinates"
        q = rotate_by(q[None], coords_q_CT[:, None], freqs_q_CP, betas_P, interleaved)[0]
        k = rotate_by(k[None], coords_k_CT[:, None], freqs_k_CP, betas_P, interleaved)[0]
    return u.to(pre_TF.dtype), v.to(pre_TF.dtype), q.to(pre_TF.dtype), k.to(pre_TF.dtype)
