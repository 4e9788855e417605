"""q, k and v of a Transformer's projection, rotated and padded, in plain PyTorch: the ground truth of the kernel.

Shape letters: T tokens, F = 3 H D, H heads, D head dim, C coordinates, R rows of the padded batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.rotary.reference import rotate_by
from trope.kernels.silu_rotate.reference import Turns


def split_rotate(
    pre_TF: Tensor, heads: int, coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, turns: Turns | None,
    interleaved: bool, slots_T: Tensor | None, rows: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v, each [R, H, D]; float64 stays float64, everything else turns in float32 and is rounded once."""
    q, k, v = pre_TF.unflatten(1, (3, heads, -1)).unbind(1)
    if turns is not None:
        assert coords_q_CT is not None and coords_k_CT is not None, "planes turn by coordinates"
        freqs_q_CP, freqs_k_CP = turns.frequencies()
        if turns.origin is not None:
            coords_q_CT, coords_k_CT = coords_q_CT - turns.origin, coords_k_CT - turns.origin
        q = rotate_by(q[None], coords_q_CT[:, None], freqs_q_CP, turns.betas, interleaved)[0]
        k = rotate_by(k[None], coords_k_CT[:, None], freqs_k_CP, turns.betas, interleaved)[0]
    if slots_T is None or rows is None:
        return q, k, v
    joint = torch.stack((q, k, v), dim=1)
    # Each token has a row of its own, so the gradient is a selection too, with nothing to add up.
    q, k, v = joint.new_zeros((rows, *joint.shape[1:])).index_copy(0, slots_T, joint).unbind(1)
    return q, k, v
