"""The item table's gradient and AdamW step in plain PyTorch: the ground truth for the fused update, and the CPU path.

Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trope.kernels.adamw.reference import adamw
from trope.kernels.softmax.reference import EPS, through_length

# Which rows an update moves: all of them, those that are no token's input, or those that are.
Part = Literal["all", "others", "inputs"]
_PIECE = 1 << 26  # most gathered numbers at once: 256 MiB in float32; a bound on memory, not tuned


class ScoreEntries(NamedTuple):
    """The loss's part of the table's gradient: entry e adds coefs[e] * out[e // C] to its item's unit vector."""

    order: Tensor  # [T * C] entries by item, from `invert`
    first_V: Tensor  # [V+2] where each item's entries begin in `order`
    coefs_TC: Tensor
    out_TE: Tensor


class InputEntries(NamedTuple):
    """The network's part: entry t adds scale * grad[t] to its item's vector."""

    items_T: Tensor
    order: Tensor  # [T]
    first_V: Tensor  # [V+2]
    grad_TE: Tensor | None  # None as long as only the rows of other items are updated
    scale: float


def invert(items: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """See `trope.kernels.table.invert`."""
    by_item, order = torch.sort(items.reshape(-1).int(), stable=True)
    bounds = torch.arange(num_items + 2, dtype=torch.int32, device=items.device)
    return order, torch.searchsorted(by_item, bounds, out_int32=True)


def table_gradient(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries) -> Tensor:
    """See `trope.kernels.table.table_gradient`; in the table's dtype."""
    tokens, candidates = scores.coefs_TC.shape
    assert scores.order.numel() == tokens * candidates
    grad_unit_VE = torch.zeros_like(table_VE)
    entries = max(1, _PIECE // table_VE.shape[1])
    for start in range(0, scores.order.numel(), entries):
        entry = scores.order[start : start + entries].long()
        coefs = scores.coefs_TC.reshape(-1)[entry].to(table_VE.dtype)
        rows = coefs[:, None] * scores.out_TE[entry // candidates].to(table_VE.dtype)
        grad_unit_VE.index_add_(0, _items(scores.first_V, start, len(entry)), rows)
    length_V1 = table_VE.norm(dim=1, keepdim=True)
    grad_VE = through_length(grad_unit_VE, table_VE / length_V1.clamp_min(EPS), length_V1)
    if inputs.grad_TE is not None:
        rows = inputs.scale * inputs.grad_TE[inputs.order.long()].to(table_VE.dtype)
        grad_VE.index_add_(0, _items(inputs.first_V, 0, len(rows)), rows)
    grad_VE[0] = 0
    return grad_VE


def _items(first_V: Tensor, start: int, count: int) -> Tensor:
    """The items that own the places start .. start + count of an order."""
    places = torch.arange(start, start + count, dtype=first_V.dtype, device=first_V.device)
    return torch.searchsorted(first_V, places, right=True) - 1


def update_table(
    table_VE: Tensor,
    exp_avg_VE: Tensor,
    exp_avg_sq: Tensor,
    unit_VE: Tensor,
    scores: ScoreEntries,
    inputs: InputEntries,
    factors: Tensor,
    part: Part = "all",
) -> Tensor:
    """See `trope.kernels.table.update_table`. Everything is in the table's dtype."""
    grad_VE = table_gradient(table_VE, scores, inputs)
    rows = slice(1, None) if part == "all" else _rows_of(part, inputs)
    weights, first, second = table_VE[rows], exp_avg_VE[rows], exp_avg_sq[rows]
    adamw(weights, first, second, grad_VE[rows], *factors.unbind())
    if part != "all":  # these were copies
        table_VE[rows], exp_avg_VE[rows], exp_avg_sq[rows] = weights, first, second
    unit_VE[rows] = unit_vectors(table_VE[rows], unit_VE.dtype)
    return grad_VE[rows].square().sum().reshape(1)


def _rows_of(part: Part, inputs: InputEntries) -> Tensor:
    """Which rows a part has, [V+1] bool: never row 0."""
    is_input_V = inputs.first_V[1:] > inputs.first_V[:-1]
    is_mine_V = is_input_V if part == "inputs" else ~is_input_V
    is_mine_V[0] = False
    return is_mine_V


def unit_vectors(table_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """See `trope.kernels.table.unit_vectors`."""
    return (table_VE / table_VE.norm(dim=1, keepdim=True).clamp_min(EPS)).to(dtype)
