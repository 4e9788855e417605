"""SiLU of HSTU's v, q and k and the rotation of q and k, in plain PyTorch: the ground truth of the kernel.

Shape letters: T tokens, F = 4 H D, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.rotary.reference import rotate_by


class Turns(NamedTuple):
    """How fast the planes of queries and keys turn.

    freqs_q, freqs_k: turns per unit of coordinate, float64 [C, P]. If given, slopes * deltas is added to them: slopes
    float64 constants [1, P], deltas the learned coefficients [P], whose gradient then needs no step in between.
    origin: with slopes, an int64 scalar that coordinates are counted from.
    betas: as in trope.kernels.rotate_qk, the paper's FP32 phases.
    """

    freqs_q: Tensor
    freqs_k: Tensor
    slopes_q: Tensor | None = None
    slopes_k: Tensor | None = None
    deltas_q: Tensor | None = None
    deltas_k: Tensor | None = None
    origin: Tensor | None = None
    betas: Tensor | None = None

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """What the planes turn by, float64 [C, P]."""
        if self.slopes_q is None or self.slopes_k is None:
            return self.freqs_q, self.freqs_k
        assert self.deltas_q is not None and self.deltas_k is not None
        freqs_q_CP = self.freqs_q + self.slopes_q * self.deltas_q.double()
        return freqs_q_CP, self.freqs_k + self.slopes_k * self.deltas_k.double()


def silu_rotate(
    pre_TF: Tensor, heads: int, coords_q_CT: Tensor | None, coords_k_CT: Tensor | None, turns: Turns | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u, v, q, k, each [T, H, D]; float64 stays float64, everything else is computed in float32 and rounded once."""
    # A split and no slices: its backward is one concatenation, where each slice would fill a gradient with zeros.
    u, x = pre_TF.unflatten(1, (4, heads, -1)).split((1, 3), dim=1)
    v, q, k = F.silu(x if x.dtype == torch.float64 else x.float()).unbind(1)
    if turns is not None:
        assert coords_q_CT is not None and coords_k_CT is not None, "planes turn by coordinates"
        freqs_q_CP, freqs_k_CP = turns.frequencies()
        if turns.origin is not None:
            coords_q_CT, coords_k_CT = coords_q_CT - turns.origin, coords_k_CT - turns.origin
        q = rotate_by(q[None], coords_q_CT[:, None], freqs_q_CP, turns.betas, interleaved)[0]
        k = rotate_by(k[None], coords_k_CT[:, None], freqs_k_CP, turns.betas, interleaved)[0]
    return u.squeeze(1), v.to(pre_TF.dtype), q.to(pre_TF.dtype), k.to(pre_TF.dtype)
