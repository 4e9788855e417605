"""The last residual sum with its turning dims turned, in plain PyTorch: the ground truth for the fused kernel.

Shape letters: T tokens, E width, F turning dims, P turning planes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.rotary.reference import rotate_by


def add_turned(
    x_TE: Tensor, delta_TE: Tensor | None, start_TE: Tensor | None, coords_T: Tensor, freqs_P: Tensor
) -> Tensor:
    """See `trope.kernels.readout.add_turned`."""
    turning = 2 * len(freqs_P)
    out_TE = x_TE if delta_TE is None else x_TE + delta_TE
    added_TF = out_TE[:, :turning] if start_TE is None else out_TE[:, :turning] - start_TE[:, :turning]
    turned = rotate_by(added_TF[None, :, None], coords_T[None, None], freqs_P[None], None, interleaved=True)
    return torch.cat((turned[0, :, 0], out_TE[:, turning:]), dim=1).to(x_TE.dtype)
