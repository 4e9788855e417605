"""The network's parameters in the fused step: AdamW in one launch, and copies in bf16 for the next step.

A cast of every matrix at its product would be a launch in the middle of the forward pass. The pass that moves a matrix
writes the copy instead (trope.kernels.adamw), beside the item table's update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trope.kernels.adamw import Moved, Parts, move
from trope.kernels.backend import Backend
from trope.models.recommender import SequentialRecommender
from trope.train.optimizer import group_of, hold_moments

# Numbers of a tensor from which on it moves here; torch's AdamW moves smaller ones.
LARGE = 1


class Matrices:
    """The tensors that move here, and copies of the parameters that products read.

    Args:
        optimizer: its moments of the large tensors are updated here.
        hyper: of the item table (`table_hyper`). The tensors here have its rates, and count its steps.
        moves: False where the optimiser moves everything.
        low_dtype: of the copies; None where products read the parameters.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        optimizer: torch.optim.Optimizer,
        hyper: Tensor,
        moves: bool,
        low_dtype: torch.dtype | None,
        backend: Backend,
    ) -> None:
        self.optimizer, self.low_dtype, self.backend = optimizer, low_dtype, backend
        network = [p for p in model.parameters() if p is not model.items.weight]
        rates = group_of(optimizer, model.items.weight)
        self.large = [
            p for p in network
            if moves and p.requires_grad and p.numel() >= LARGE and _is_alike(group_of(optimizer, p), rates)
        ]  # fmt: skip
        for parameter in self.large:
            hold_moments(optimizer, parameter, hyper)
        self._low: dict[int, Tensor] = {}
        # Parameters that have a copy, but that the optimiser moves; and these copies.
        self._others: list[Tensor] = []
        self._copies: list[Tensor] = []

    def low(self, parameter: Tensor) -> Tensor | None:
        """A parameter's copy, made at the first call and kept current from then on; for `Context`."""
        if self.low_dtype is None:
            return None
        if id(parameter) not in self._low:
            self._low[id(parameter)] = parameter.detach().to(self.low_dtype)
            if not any(parameter is each for each in self.large):
                self._others.append(parameter.detach())
                self._copies.append(self._low[id(parameter)])
        return self._low[id(parameter)]

    def move(self, factors: Tensor, place_of: Callable[[Tensor], int]) -> tuple[Parts, list[Tensor]]:
        """Move the tensors that move here; returns the squared norms of their gradients, and the gradients.

        The parameters' own gradients are gone then, so the optimiser passes them over. Another stream may still read
        the returned ones.

        place_of: the number of a parameter, see `Parts`.
        """
        moving = [p for p in self.large if p.grad is not None]
        gradients = [p.grad.contiguous() for p in moving if p.grad is not None]
        tensors = []
        for parameter, gradient in zip(moving, gradients, strict=True):
            state = self.optimizer.state[parameter]
            moments = (state["exp_avg"], state["exp_avg_sq"])
            group, low = group_of(self.optimizer, parameter), self._low.get(id(parameter))
            decays = bool(group["weight_decay"])
            tensors.append(Moved(parameter.detach(), *moments, gradient, low, place_of(parameter), decays))
            parameter.grad = None
        return move(tensors, factors, self.backend), gradients

    @torch.no_grad()
    def copy_others(self) -> None:
        """Bring up to date the copies of what the optimiser has moved."""
        if self._others:
            torch._foreach_copy_(self._copies, self._others)


def _is_alike(group: dict[str, object], other: dict[str, object]) -> bool:
    """Whether a group of the optimiser has another's rates, which are formed once for both; it may have no decay."""
    is_same = all(group[name] == other[name] for name in ("lr", "betas", "eps"))
    return is_same and group["weight_decay"] in (other["weight_decay"], 0)
