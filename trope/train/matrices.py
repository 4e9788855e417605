"""The network's parameters in the fused step: AdamW in one launch, and copies in bf16 for the next step.

A cast of every matrix at its product would be a launch in the middle of the forward pass. The pass that moves a matrix
writes the copy instead (trope.kernels.adamw), beside the item table's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trope.kernels.adamw import Moved, Parts, move
from trope.kernels.aside import Late
from trope.kernels.backend import Backend
from trope.models.recommender import SequentialRecommender
from trope.train.optimizer import group_of, hold_moments

# Numbers of a tensor from which on it moves here; torch's AdamW moves smaller ones.
LARGE = 1
# Gradients of so many numbers are worth a launch of their own during the backward pass.
EARLY = 1 << 20


class Matrices:
    """The tensors that move here, and copies of the parameters that products read.

    Args:
        optimizer: its moments of the large tensors are updated here.
        hyper: of the item table (`table_hyper`). The tensors here have its rates, and count its steps.
        moves: False where the optimiser moves everything.
        low_dtype: of the copies; None where products read the parameters.
        place_of: the number of a parameter, see `Parts`.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        optimizer: torch.optim.Optimizer,
        hyper: Tensor,
        moves: bool,
        low_dtype: torch.dtype | None,
        place_of: Callable[[Tensor], int],
        backend: Backend,
    ) -> None:
        self.optimizer, self.low_dtype, self.place_of, self.backend = optimizer, low_dtype, place_of, backend
        # Gradients of what has moved in a step, which another stream may still read; and parts of their norms.
        self.read: list[Tensor] = []
        self._parts: list[Parts] = []
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

    @contextmanager
    def moving(self, factors: Tensor | None, late: Late) -> Iterator[None]:
        """In a backward pass within, tensors move when their gradients have come, as many at a time as `EARLY` says.

        Autograd has read a parameter for the last time when its gradient comes. Those of the last gradients are left to
        `move`, which does not go behind anything. Nothing moves without factors, or where no work is late.
        """
        self.read.clear()
        self._parts.clear()
        waiting = 0

        def came(parameter: Tensor) -> None:
            nonlocal waiting
            if factors is not None and waiting >= EARLY:
                waiting = -parameter.numel()
                with late.work():
                    self._move(factors)
            waiting += parameter.numel()

        hooks = [p.register_post_accumulate_grad_hook(came) for p in self.large] if late.is_open else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def move(self, factors: Tensor) -> Parts:
        """Move the tensors that have not moved in this step; returns the squared norms of all their gradients.

        The parameters' own gradients are gone then, so the optimiser passes them over. They live on in `read`, which
        the caller clears when no stream reads them any more.
        """
        self._move(factors)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else Parts(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _move(self, factors: Tensor) -> None:
        """Move the tensors that have a gradient."""
        moving = [p for p in self.large if p.grad is not None]
        gradients = [p.grad.contiguous() for p in moving if p.grad is not None]
        tensors = []
        for parameter, gradient in zip(moving, gradients, strict=True):
            state = self.optimizer.state[parameter]
            moments = (state["exp_avg"], state["exp_avg_sq"])
            group, low = group_of(self.optimizer, parameter), self._low.get(id(parameter))
            decays = bool(group["weight_decay"])
            tensors.append(Moved(parameter.detach(), *moments, gradient, low, self.place_of(parameter), decays))
            parameter.grad = None
        self.read += gradients
        self._parts.append(move(tensors, factors, self.backend))

    @torch.no_grad()
    def copy_others(self) -> None:
        """Bring up to date the copies of what the optimiser has moved."""
        if self._others:
            torch._foreach_copy_(self._copies, self._others)


def _is_alike(group: dict[str, object], other: dict[str, object]) -> bool:
    """Whether a group of the optimiser has another's rates, which are formed once for both; it may have no decay."""
    is_same = all(group[name] == other[name] for name in ("lr", "betas", "eps"))
    return is_same and group["weight_decay"] in (other["weight_decay"], 0)
