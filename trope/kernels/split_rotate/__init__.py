"""From a Transformer's projection to q, k and v: rotation of q and k and padding in one pass. Decides what runs.

Softmax attention needs nothing else between the projection and torch's kernel. Where sequences fill their rows and
nothing turns, q, k and v are views and the forward moves no memory.

Shape letters: T tokens, F = 3 H D, H heads, D head dim, P planes, C coordinates, R rows of the padded batch (B * L).
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.silu_rotate.reference import Turns
from trope.kernels.split_rotate import reference


def split_rotate(
    pre_TF: Tensor,
    heads: int,
    coords_q_CT: Tensor | None = None,
    coords_k_CT: Tensor | None = None,
    turns: Turns | None = None,
    interleaved: bool = True,
    slots_T: Tensor | None = None,
    rows: int | None = None,
    backend: Backend = "auto",
    late: Late = IN_PLACE,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, each [R, H, D] in the dtype of `pre_TF`; differentiable in `pre_TF`, frequencies and coefficients.

    Args:
        pre_TF: the projection, q, k and v in this order.
        coords_q_CT, coords_k_CT: where each token stands, int64 or float64; no gradient.
        turns: how fast planes turn; without it nothing is rotated.
        interleaved: as in trope.kernels.rotate_qk.
        slots_T: the row of each token among R = `rows`, each row at most once; other rows are zero. Without slots,
            token t is row t.
        late: where the backward pass adds up the gradients of frequencies or coefficients.
    """
    assert pre_TF.shape[1] % (3 * heads) == 0, "the projection holds q, k and v of every head"
    assert (slots_T is None) == (rows is None), "slots lie among a number of rows"
    arguments = (heads, coords_q_CT, coords_k_CT, turns, interleaved, slots_T, rows)
    if resolve_backend(backend, pre_TF) == "torch":
        return reference.split_rotate(pre_TF, *arguments)
    from trope.kernels.split_rotate import triton as fused  # only now: CPU users need no Triton

    return fused.split_rotate(pre_TF, *arguments, late)
