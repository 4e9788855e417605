"""Rotation of queries and keys by coordinates: the one place that decides which implementation runs.

`rotate_qk` is what the modules in trope.rotary call. The reference is in rotary/reference.py, the kernels in
rotary/triton.py, their registration as a torch operator in rotary/op.py.

Shape letters: B batch, L positions, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.rotary import reference


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
            reference.rotate_by(q_BLHD, coords_q_CBL, freqs_q_CP, betas_P, interleaved),
            reference.rotate_by(k_BLHD, coords_k_CBL, freqs_k_CP, betas_P, interleaved),
        )
    # Only now: registering a Triton operator loads torch's compiler, a second that CPU users need not pay.
    from trope.kernels.rotary import op

    return op.rotate_qk(q_BLHD, k_BLHD, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP, betas_P, interleaved)
