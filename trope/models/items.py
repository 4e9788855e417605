"""The item table: one vector per item, and the only class that knows how the vectors are stored.

Training, evaluation, checkpoints and serving go through it. A row w enters the network as sqrt(E) * w and the scores as
w / |w|. Where several processes train, `trope.models.sharded_items` stores the rows over them.

Shape letters: V items (rows 1 .. V; row 0 is padding and stays zero), E width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.kernels.backend import Backend
from trope.kernels.table import InputEntries, Part, ScoreEntries, invert, table_gradient, unit_vectors, update_table

EPS = 1e-6  # a vector shorter than this is divided by it instead of by its length
_STD = 0.02
# Most numbers that a rank draws at a time of rows that others keep. A multiple of 16, as torch's normal draws come.
_PIECE = 1 << 24


class TableRows(nn.Module):
    """Rows that are trained outside of autograd, row 0 zero: a whole table's, or those of one process."""

    weight: nn.Parameter

    def unit_copy(self, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
        """Unit vectors in another dtype, outside of autograd, [V + 1, E]: what `update` keeps current."""
        return unit_vectors(self.weight.detach(), dtype, backend)

    def gradient(self, scores: ScoreEntries, inputs: InputEntries, backend: Backend = "auto") -> Tensor:
        """The gradient as a dense tensor [V + 1, E], for clipping."""
        return table_gradient(self.weight.detach(), scores, inputs, backend)

    def update(
        self,
        moments: tuple[Tensor, Tensor],
        unit_VE: Tensor,
        scores: ScoreEntries,
        inputs: InputEntries,
        factors: Tensor,
        backend: Backend = "auto",
        part: Part = "all",
        multiprocessors: int = 0,
    ) -> Tensor:
        """Gradient and AdamW step of the rows of `part` in one pass.

        Returns the squared norm of their gradient in a few parts, [S], whose sum is left to the caller.

        Args:
            moments: AdamW's first and second moment, updated in place.
            unit_VE: from `unit_copy`; receives the new rows' unit vectors.
            factors: of AdamW, from `trope.kernels.adamw.factors_of` with the same backend.
            part: "inputs" are the rows of items that are some token's input, "others" the rest; see
                `trope.kernels.table.update_table`, also for `multiprocessors`.
        """
        return update_table(
            self.weight.detach(), *moments, unit_VE, scores, inputs, factors, backend, part, multiprocessors
        )


class ItemTable(TableRows):
    """Vectors of all items.

    Args:
        num_items: V; items are 1 .. V.
        width: E.
    """

    def __init__(self, num_items: int, width: int) -> None:
        super().__init__()
        self.num_items, self.width = num_items, width
        self.scale = math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(num_items + 1, width))
        nn.init.normal_(self.weight)  # the draw that nn.Embedding made here, so that a seed gives the same model
        with torch.no_grad():
            self.weight[0] = 0
        nn.init.trunc_normal_(self.weight, std=_STD)
        with torch.no_grad():
            self.weight[0] = 0

    @classmethod
    def of_rows(cls, rows_VE: Tensor) -> ItemTable:
        """A table of rows that exist, [V + 1, E], row 0 zero; it does not copy them."""
        with torch.device("meta"):
            table = cls(len(rows_VE) - 1, rows_VE.shape[1])
        table.weight = nn.Parameter(rows_VE)
        return table

    def embed(self, items: Tensor) -> Tensor:
        """What the network reads for items [..]: sqrt(E) times their rows, [.., E]; differentiable."""
        return F.embedding(items, self.weight, padding_idx=0) * self.scale

    def vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0 is zero. Differentiable."""
        return F.normalize(self.weight.float(), dim=-1, eps=EPS)

    def entries_by_item(self, items: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """Order and bounds of a batch's entries by item, as `ScoreEntries` and `InputEntries` begin."""
        return invert(items, self.num_items, backend)

    def input_entries(self, items_T: Tensor, backend: Backend = "auto") -> InputEntries:
        """The network input's part of the gradient, sorted by item; its `grad_TE` comes later."""
        return InputEntries(items_T, *self.entries_by_item(items_T, backend), None, self.scale)


def first_rows(num_items: int, width: int, first: int, last: int) -> Tensor:
    """What a new `ItemTable` has for items first .. last - 1, behind a row of zeros; all others are drawn and dropped.

    One stream of random numbers makes the whole table, so the rows of a shard are found by drawing all before them.
    """
    rows = 16 * max(1, _PIECE // (16 * width))
    total, kept = num_items + 1, torch.zeros(last - first + 1, width)
    starts = list(range(0, max(total - 15, 1), rows))  # torch draws 16 numbers at a time: no shorter piece at the end
    bounds = list(zip(starts, [*starts[1:], total], strict=True))
    for begin, end in bounds:
        nn.init.normal_(torch.empty(end - begin, width))
    for begin, end in bounds:
        piece = nn.init.trunc_normal_(torch.empty(end - begin, width), std=_STD)
        low, high = max(begin, first), min(end, last)
        if low < high:
            kept[low - first + 1 : high - first + 1] = piece[low - begin : high - begin]
    return kept


def row_entries(
    rows_G: Tensor, grad_GE: Tensor, num_items: int, backend: Backend = "auto"
) -> tuple[ScoreEntries, InputEntries]:
    """Gradients of a table's rows as its update takes them; a row may come several times."""
    nothing = rows_G.new_zeros(0), rows_G.new_zeros(num_items + 2, dtype=torch.int32)
    scores = ScoreEntries(*nothing, grad_GE.new_zeros((0, 1)), grad_GE.new_zeros((0, grad_GE.shape[1])))
    return scores, InputEntries(rows_G, *invert(rows_G, num_items, backend), grad_GE, 1.0)
