"""One tensor for the gradient of HSTU's projection to u, v, q and k. Two backwards write a part of it each.

Shape letters: T tokens, F = 4 H D.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GradientBuffer:
    """Room for the gradients of u, v, q and k side by side. One per forward of a block.

    The gate's backward runs first: it makes the room and returns the first columns as the gradient of u. silu_rotate's
    backward fills the other columns, if it is still given that tensor. If u was used elsewhere too, autograd has added
    gradients up in a tensor of its own: `take` then returns None and silu_rotate copies.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows_TF: Tensor | None = None

    def first_columns(self, u: Tensor) -> Tensor:
        """Uninitialised room for the gradient of `u` [T, n], the first n of F columns."""
        self._rows_TF = torch.empty((len(u), self._width), dtype=u.dtype, device=u.device)
        return self._rows_TF[:, : u.shape[1]]

    def take(self, g_u: Tensor | None) -> Tensor | None:
        """The whole room [T, F] if `g_u` [T, ..] lies in its first columns, else None. The buffer forgets the room."""
        rows_TF, self._rows_TF = self._rows_TF, None
        if rows_TF is None or g_u is None or g_u.dtype != rows_TF.dtype or not g_u.numel():
            return None
        first = rows_TF[:, : g_u[0].numel()].view(g_u.shape)
        return rows_TF if g_u.data_ptr() == first.data_ptr() and g_u.stride() == first.stride() else None
