"""The guard: gradient norms, and the first number that was not finite, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Diverged(RuntimeError):
    """Training met a number that is not finite."""


class Guard:
    """Gradient norms and the first number that was not finite, kept on the device until someone asks."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._bad_step = torch.tensor(-1, device=device)
        self._bad_loss = torch.tensor(0.0, device=device)
        self._bad_norms: Tensor | None = None

    def __call__(self, step: int, loss: Tensor) -> Tensor:
        """Look at a step's loss and gradients before the optimiser does; returns the gradient's norm."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in self._named]
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = norms.norm()
        is_first = (self._bad_step < 0) & ~(norm + loss).isfinite()
        self._bad_norms = norms if self._bad_norms is None else torch.where(is_first, norms, self._bad_norms)
        self._bad_loss = torch.where(is_first, loss, self._bad_loss)
        self._bad_step = self._bad_step.masked_fill(is_first, step)
        return norm

    def check(self, kept: str) -> None:
        """Raise if any step so far met a number that is not finite.

        kept: what is still good, for the message.
        """
        step = int(self._bad_step)
        if step < 0:
            return
        assert self._bad_norms is not None
        names = [name for (name, _), ok in zip(self._named, self._bad_norms.isfinite().tolist(), strict=True) if not ok]
        found = f"the gradient of {names[0]} ({len(names)} of {len(self._named)} tensors)" if names else "the loss"
        raise Diverged(
            f"step {step}: {found} is not finite, the loss was {float(self._bad_loss):g}. Training stopped; {kept}. "
            "Lower train.lr or set train.clip=1, or look for extreme times in the data"
        )
