"""The last residual sum of a network with a readout by time, its turning dims rotated. Decides what runs.

Shape letters: T tokens, E width, P turning planes.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.readout import reference


def add_turned(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    start_TE: Tensor | None,
    coords_T: Tensor,
    freqs_P: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """x + delta in the dtype of x. Its first 2P dims lose those of `start`; plane p then turns by coords * freqs[p]
    turns.

    Args:
        x_TE, delta_TE, start_TE: the residual stream, what the last block adds to it, what it began with. Without
            delta nothing is added, without start nothing is lost.
        coords_T: where each token stands, int64; no gradient.
        freqs_P: turns per unit of coordinate, float64.
    """
    if resolve_backend(backend, x_TE) == "torch":
        return reference.add_turned(x_TE, delta_TE, start_TE, coords_T, freqs_P)
    from trope.kernels.readout import triton as fused  # only now: CPU users need no Triton

    return fused.add_turned(x_TE, delta_TE, start_TE, coords_T, freqs_P)
