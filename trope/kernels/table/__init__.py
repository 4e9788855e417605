"""The item table's gradient and optimiser step in one pass over the table.

A dense AdamW step must read and write weights and moments once. The fused update adds only the gathers of what each
row's gradient is made of, and it writes the unit vectors for the next step. `invert` first sorts the entries of a batch
by item: rows then gather instead of scatter, and every sum has a fixed order. The reference is in table/reference.py,
the kernels are in table/triton.py. table/own.cu does the same beside a network that needs most of the GPU.

Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.table import own, reference
from trope.kernels.table.own import own_multiprocessors
from trope.kernels.table.reference import InputEntries, Part, ScoreEntries

__all__ = [
    "InputEntries", "Part", "ScoreEntries", "invert", "own_multiprocessors", "table_gradient", "unit_vectors",
    "update_table",
]  # fmt: skip


def invert(items: Tensor, num_items: int, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Sort the entries of a tensor of items by item: (order, first_V).

    Item v owns the flat entry numbers order[first[v] : first[v + 1]], in rising order. order is as torch.sort gives it,
    int64 (a copy to int32 would cost more than it saves); first_V is int32 [V+2].

    Args:
        items: candidates [T, C] or inputs [T], values 0 .. num_items.
    """
    if resolve_backend(backend, items) == "torch":
        return reference.invert(items, num_items)
    from trope.kernels.table import triton as fused

    return fused.invert(items, num_items)


@torch.no_grad()
def table_gradient(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries, backend: Backend = "auto") -> Tensor:
    """The table's gradient as a dense tensor [V+1, E]: clipping needs its norm before any row moves."""
    if resolve_backend(backend, table_VE) == "torch":
        return reference.table_gradient(table_VE, scores, inputs)
    from trope.kernels.table import triton as fused

    return fused.table_gradient(table_VE, scores, inputs)


@torch.no_grad()
def update_table(
    table_VE: Tensor,
    exp_avg_VE: Tensor,
    exp_avg_sq: Tensor,
    unit_VE: Tensor,
    scores: ScoreEntries,
    inputs: InputEntries,
    factors: Tensor,
    backend: Backend = "auto",
    part: Part = "all",
    multiprocessors: int = 0,
) -> Tensor:
    """One AdamW step of the rows 1 .. V, or of a part of them, in place.

    Returns the squared norm of their gradient in a few parts, float32 [S], whose sum is left to the caller.

    A row w enters the scores as w / max(|w|, 1e-6) and the network as scale * w; its gradient is the sum over both. The
    step is torch.optim.AdamW's with dense semantics: rows without entries decay and follow their moments too.

    Args:
        table_VE, exp_avg_VE: weights and first moment, float32 [V+1, E].
        exp_avg_sq: second moment, float32 [V+1, E], or [V+1]: one number a row, for the mean of its squared gradients.
        unit_VE: receives the new rows' unit vectors. Row 0 of all four stays as it is.
        scores, inputs: what the gradient is made of; `order` and `first_V` are from `invert`.
        factors: of AdamW, from `trope.kernels.adamw.factors_of` with the same backend.
        part: "others" moves the rows that are no token's input, whose gradient is known before the network's backward
            pass; "inputs" moves the rest. Both together are "all".
        multiprocessors: how many of the GPU's "others" has for itself, from `own_multiprocessors`; 0: it shares all.
    """
    assert part == "others" or (inputs.grad_TE is not None and not multiprocessors)
    arguments = (table_VE, exp_avg_VE, exp_avg_sq, unit_VE, scores, inputs, factors, part)
    if resolve_backend(backend, table_VE) == "torch":
        return reference.update_table(*arguments)
    from trope.kernels.table import triton as fused

    if multiprocessors:
        return own.update_others(*arguments[:-1], multiprocessors)
    return fused.update_table(*arguments)


@torch.no_grad()
def unit_vectors(table_VE: Tensor, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
    """Every row over its length, w / max(|w|, 1e-6), in another dtype."""
    if resolve_backend(backend, table_VE) == "torch":
        return reference.unit_vectors(table_VE, dtype)
    from trope.kernels.table import triton as fused

    return fused.unit_vectors(table_VE, dtype)
