"""The last residual sum of a network with a readout by time, its turning dims rotated. Decides what runs.

Shape letters: T tokens, E width, W dims of the start that are given, P turning planes.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.readout import reference
from trope.kernels.readout.reference import Curve

__all__ = ["Curve", "add_turned"]


def add_turned(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    start_TW: Tensor | None,
    moments_T: Tensor,
    curve: Curve,
    backend: Backend = "auto",
    late: Late = IN_PLACE,
) -> Tensor:
    """x + delta in the dtype of x. Its first 2P dims lose those of `start`; its planes then turn along the curve.

    Differentiable in x, delta, start and the curve's coefficients; where it has none, in its frequencies.

    Args:
        x_TE, delta_TE: the residual stream, and what the last block adds to it. Without delta nothing is added.
        start_TW: what the stream began with, W from 2P to E: dims past 2P are not read, and their gradient is zero.
            Without start nothing is lost.
        moments_T: the time each token speaks for; no gradient.
        late: where the backward pass adds up the gradient of coefficients or frequencies.
    """
    assert start_TW is None or 2 * len(curve.freqs_P) <= start_TW.shape[1] <= x_TE.shape[1]
    assert (curve.slopes_P is None) == (curve.deltas_P is None), "a slope belongs to a coefficient"
    assert curve.slopes_P is None or not curve.freqs_P.requires_grad, "with coefficients, frequencies are constants"
    assert (curve.origin is None) == (curve.earliest is None) == (curve.latest is None), "ends are counted from it"
    if resolve_backend(backend, x_TE) == "torch":
        return reference.add_turned(x_TE, delta_TE, start_TW, moments_T, curve)
    from trope.kernels.readout import triton as fused  # only now: CPU users need no Triton

    return fused.add_turned(x_TE, delta_TE, start_TW, moments_T, curve, late)
