"""The item table: one vector per item, and the only class that knows how the vectors are stored.

Training, evaluation, checkpoints and serving go through it. A row w enters the network as sqrt(E) * w and the scores as
w / |w|.

Shape letters: V items (rows 1 .. V; row 0 is padding and stays zero), E width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.kernels.backend import Backend
from trope.kernels.table import InputEntries, ScoreEntries, invert, table_gradient, unit_vectors, update_table

EPS = 1e-6  # a vector shorter than this is divided by it instead of by its length


class ItemTable(nn.Module):
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
        nn.init.trunc_normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.weight[0] = 0

    def embed(self, items: Tensor) -> Tensor:
        """What the network reads for items [..]: sqrt(E) times their rows, [.., E]; differentiable."""
        return F.embedding(items, self.weight, padding_idx=0) * self.scale

    def vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0 is zero. Differentiable."""
        return F.normalize(self.weight.float(), dim=-1, eps=EPS)

    def unit_copy(self, dtype: torch.dtype, backend: Backend = "auto") -> Tensor:
        """Unit vectors in another dtype, outside of autograd, [V + 1, E]: what `update` keeps current."""
        return unit_vectors(self.weight.detach(), dtype, backend)

    def score_entries(self, items: Tensor, coefs: Tensor, rows: Tensor, backend: Backend = "auto") -> ScoreEntries:
        """The loss's part of the gradient, sorted by item: entry e adds coefs[e] * rows[e // C] to its unit vector."""
        return ScoreEntries(*invert(items, self.num_items, backend), coefs, rows)

    def input_entries(self, items_T: Tensor, grad_TE: Tensor, backend: Backend = "auto") -> InputEntries:
        """The network input's part of the gradient, sorted by item."""
        return InputEntries(*invert(items_T, self.num_items, backend), grad_TE, self.scale)

    def gradient(self, scores: ScoreEntries, inputs: InputEntries, backend: Backend = "auto") -> Tensor:
        """The gradient as a dense tensor [V + 1, E], for clipping and for several processes."""
        return table_gradient(self.weight.detach(), scores, inputs, backend)

    def update(
        self,
        moments: tuple[Tensor, Tensor],
        unit_VE: Tensor,
        scores: ScoreEntries,
        inputs: InputEntries,
        hyper: Tensor,
        backend: Backend = "auto",
    ) -> Tensor:
        """Gradient and AdamW step of every row in one pass; returns the squared norm of the gradient, [1].

        Args:
            moments: AdamW's first and second moment, updated in place.
            unit_VE: from `unit_copy`; receives the new rows' unit vectors.
            hyper: lr, beta1, beta2, eps, weight_decay, step, on the device.
        """
        return update_table(self.weight.detach(), *moments, unit_VE, scores, inputs, hyper, backend)
