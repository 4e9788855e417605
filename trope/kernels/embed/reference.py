"""The model's input and its gradients in plain PyTorch: the ground truth of the kernels.

Shape letters: T tokens, E width, F first dims, V rows of the table, L positions, B sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(
    items_T: Tensor, index_T: Tensor, table_VE: Tensor, positions_LE: Tensor, scale: float, keep_TE: Tensor | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    """Scaled item vectors plus positions, dropped by the mask `keep_TE`; padding, item 0, is zero."""
    dtype = torch.promote_types(positions_LE.dtype, torch.float32)
    x_TE = table_VE[items_T].to(dtype) * scale + positions_LE[index_T].to(dtype)
    return dropped(x_TE, items_T, keep_TE, dropout)


def dropped(x_TE: Tensor, items_T: Tensor, keep_TE: Tensor | None, dropout: float) -> Tensor:
    """Dropout and the zeros of padding: linear and diagonal, so it is also its own backward."""
    if keep_TE is not None:
        x_TE = x_TE * keep_TE / (1 - dropout)
    return x_TE * (items_T != 0)[:, None]


def embed_backward(
    grad_x_TE: Tensor, items_T: Tensor, starts_B: Tensor, lengths_B: Tensor, max_len: int, keep_TE: Tensor | None,
    dropout: float, grad_first_TF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the scaled item vectors [T, E] and of the positions [max_len, E]."""
    if grad_first_TF is not None:
        grad_x_TE = grad_x_TE + F.pad(grad_first_TF, (0, grad_x_TE.shape[1] - grad_first_TF.shape[1]))
    rows_TE = dropped(grad_x_TE, items_T, keep_TE, dropout)
    index_L = torch.arange(max_len, device=rows_TE.device)
    token_BL = starts_B[:, None] + index_L
    inside_BL = index_L < lengths_B[:, None]
    positions_LE = (rows_TE[token_BL.where(inside_BL, 0)] * inside_BL[..., None]).sum(0)
    return rows_TE, positions_LE
