"""The watch in plain PyTorch: the ground truth for the kernel, and the CPU path.

Shape letters: P parameters.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from trope.kernels.adamw.reference import Parts


class Watched(NamedTuple):
    """What is kept of all steps so far, on their device."""

    step: Tensor  # int64 [], steps so far
    bad_step: Tensor  # int64 [], the first with a number that is not finite, or -1
    bad_loss: Tensor  # float32 [], its loss
    bad_norms_P: Tensor  # float32 [P], the norms of its gradients

    @classmethod
    def begin(cls, step: int, parameters: int, device: torch.device) -> Self:
        """Nothing seen yet, after so many steps."""
        return cls(
            torch.tensor(step, device=device),
            torch.tensor(-1, device=device),
            torch.tensor(0.0, device=device),
            torch.zeros(parameters, device=device),
        )


class Squares(NamedTuple):
    """The gradient of one parameter by parts of its squared norm, whose sum nobody has formed yet."""

    place: int  # of the parameter
    first: Tensor  # float32 [S]
    second: Tensor | None  # float32 [S'], or None


def watch(loss: Tensor, norms_P: Tensor | None, watched: Watched, parts: Parts | None, table: Squares | None) -> Tensor:
    """See `trope.kernels.divergence.watch`."""
    squares_P = torch.zeros_like(watched.bad_norms_P) if norms_P is None else norms_P.square()
    if table is not None:
        squares_P[table.place] = table.first.sum() + (0 if table.second is None else table.second.sum())
    if parts is not None:
        squares_P = squares_P.index_add(0, parts.places_S, parts.squares_S)
    norms_P = squares_P.sqrt()
    norm = norms_P.norm()
    watched.step.add_(1)
    is_first = (watched.bad_step < 0) & ~(norm + loss).isfinite()
    watched.bad_norms_P.copy_(torch.where(is_first, norms_P, watched.bad_norms_P))
    watched.bad_loss.copy_(torch.where(is_first, loss, watched.bad_loss))
    watched.bad_step.copy_(torch.where(is_first, watched.step, watched.bad_step))
    return norm
