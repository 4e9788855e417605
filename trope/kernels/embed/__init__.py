"""The model's input and its gradient, written by hand. Decides what runs.

No autograd here: the table's gradient must never exist as a dense tensor, so the training step takes the gradient of
`embed`'s result from autograd, calls `embed_backward` with it, and gives the rows to the table's own sparse update.

Shape letters: T tokens, E width, F first dims, V rows of the table, L positions, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.aside import IN_PLACE, Aside
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.embed import reference
from trope.kernels.random.reference import keep_mask


@torch.no_grad()
def embed(
    items_T: Tensor,
    index_T: Tensor,
    table_VE: Tensor,
    positions_LE: Tensor,
    scale: float,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """dropout(table[item] * scale + positions[index]), zero where the item is 0; float32 [T, E], no gradient attached.

    Args:
        items_T: int32 or int64, 0 is padding.
        index_T: each token's place in its sequence, int32 or int64; of padding it may be anything.
        seed: int64 [1] on the device; None drops nothing.
        stream: one number per place in the model that drops.
    """
    if resolve_backend(backend, table_VE) == "torch":
        keep = _keep(seed, stream, len(items_T), table_VE.shape[1], dropout)
        index_T = index_T.where(items_T != 0, 0)
        return reference.embed(items_T, index_T, table_VE, positions_LE, scale, keep, dropout)
    from trope.kernels.embed import triton as fused  # only now: CPU users need no Triton

    return fused.embed(items_T, index_T, table_VE, positions_LE, scale, dropout, seed, stream)


@torch.no_grad()
def embed_backward(
    grad_x_TE: Tensor,
    items_T: Tensor,
    starts_B: Tensor,
    lengths_B: Tensor,
    max_len: int,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    backend: Backend = "auto",
    grad_first_TF: Tensor | None = None,
    beside: Aside = IN_PLACE,
) -> tuple[Tensor, Tensor]:
    """Gradients of each token's `table[item] * scale` [T, E] and of the positions [max_len, E].

    Args:
        grad_x_TE: the gradient of `embed`'s result.
        starts_B, lengths_B: where each sequence begins among the tokens, and how many of them are its own; tokens of no
            sequence do not count for the positions.
        max_len: L, the rows of the position table.
        dropout, seed, stream: as given to `embed`, so that the mask is the same.
        grad_first_TF: a further gradient of the first F dims of `embed`'s result, added to `grad_x_TE`.
        beside: where the positions' gradient is formed.
    """
    if resolve_backend(backend, grad_x_TE) == "torch":
        keep = _keep(seed, stream, len(grad_x_TE), grad_x_TE.shape[1], dropout)
        return reference.embed_backward(grad_x_TE, items_T, starts_B, lengths_B, max_len, keep, dropout, grad_first_TF)
    from trope.kernels.embed import triton as fused

    given = (dropout, seed, stream, grad_first_TF, beside)
    return fused.embed_backward(grad_x_TE, items_T, starts_B, lengths_B, max_len, *given)


def _keep(seed: Tensor | None, stream: int, rows: int, columns: int, dropout: float) -> Tensor | None:
    return None if seed is None or dropout == 0 else keep_mask(seed, stream, (rows, columns), dropout)
