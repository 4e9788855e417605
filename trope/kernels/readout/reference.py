"""The last residual sum with its turning dims turned, in plain PyTorch: the ground truth for the fused kernel.

Shape letters: T tokens, E width, W dims of the start that are given, F turning dims, P turning planes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.kernels.rotary.reference import rotate_by


class Curve(NamedTuple):
    """What the angles of the turning planes are formed from: plane p turns by coordinate * frequency[p] turns.

    freqs_P: turns per unit of coordinate, float64. If given, slopes * deltas is added to them: slopes float64
        constants, deltas the learned coefficients.
    origin, earliest, latest: int64 scalars, all three or none. Coordinates are counted from the origin and held
        between the two ends; without them moments are coordinates.
    """

    freqs_P: Tensor
    slopes_P: Tensor | None = None
    deltas_P: Tensor | None = None
    origin: Tensor | None = None
    earliest: Tensor | None = None
    latest: Tensor | None = None

    def frequencies(self) -> Tensor:
        """Turns per unit of coordinate, float64 [P]."""
        if self.slopes_P is None:
            return self.freqs_P
        assert self.deltas_P is not None
        return self.freqs_P + self.slopes_P * self.deltas_P.double()

    def coordinates(self, moments: Tensor) -> Tensor:
        """Where moments stand on the curve, same shape."""
        return moments if self.origin is None else (moments - self.origin).clamp(self.earliest, self.latest)


def add_turned(
    x_TE: Tensor, delta_TE: Tensor | None, start_TW: Tensor | None, moments_T: Tensor, curve: Curve
) -> Tensor:
    """See `trope.kernels.readout.add_turned`."""
    turning = 2 * len(curve.freqs_P)
    out_TE = x_TE if delta_TE is None else x_TE + delta_TE
    added_TF = out_TE[:, :turning] if start_TW is None else out_TE[:, :turning] - start_TW[:, :turning]
    coords_T, freqs_P = curve.coordinates(moments_T), curve.frequencies()
    turned = rotate_by(added_TF[None, :, None], coords_T[None, None], freqs_P[None], None, interleaved=True)
    return torch.cat((turned[0, :, 0], out_TE[:, turning:]), dim=1).to(x_TE.dtype)
