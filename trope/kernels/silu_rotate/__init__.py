"""From HSTU's projection to u, v, q and k: SiLU and the rotation of q and k in one pass. Decides what runs.

SiLU must read and write v, q and k anyway, so the rotation of T-RoPE moves no further memory in that pass. u stays as
it is: the gate (trope.kernels.norm) reads it once and applies SiLU itself.

Shape letters: T tokens, F = 4 H D, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.silu_rotate import reference
from trope.kernels.silu_rotate.reference import Turns

__all__ = ["Turns", "silu_rotate"]


def silu_rotate(
    pre_TF: Tensor,
    heads: int,
    coords_q_CT: Tensor | None = None,
    coords_k_CT: Tensor | None = None,
    turns: Turns | None = None,
    interleaved: bool = True,
    buffer: GradientBuffer | None = None,
    backend: Backend = "auto",
    late: Late = IN_PLACE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, v, q, k, each [T, H, D] in the dtype of `pre_TF`; differentiable in `pre_TF`, frequencies and coefficients.

    u is a view of the projection, before SiLU; v, q and k are after it.

    Args:
        pre_TF: the projection, u, v, q and k in this order.
        coords_q_CT, coords_k_CT: where each token stands, int64 or float64; no gradient.
        turns: how fast planes turn; without it nothing is rotated.
        interleaved: as in trope.kernels.rotate_qk.
        buffer: shared with the gate that takes u, it saves a copy of u's gradient; the reference needs none.
        late: where the backward pass adds up the gradients of frequencies or coefficients.
    """
    assert pre_TF.shape[1] % (4 * heads) == 0, "the projection holds u, v, q and k of every head"
    arguments = (heads, coords_q_CT, coords_k_CT, turns, interleaved)
    if resolve_backend(backend, pre_TF) == "torch":
        return reference.silu_rotate(pre_TF, *arguments)
    from trope.kernels.silu_rotate import triton as fused  # only now: CPU users need no Triton

    return fused.silu_rotate(pre_TF, *arguments, buffer, late)
