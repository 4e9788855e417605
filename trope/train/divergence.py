"""The guard: gradient norms, and the first number that was not finite, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Diverged(RuntimeError):
    """Training met a number that is not finite."""


class DivergenceGuard:
    """Gradient norms and the first number that was not finite, kept on the device until someone asks.

    Args:
        model: its parameters that autograd sees are looked at.
        also: a parameter that autograd does not see, whose norm the caller knows.
    """

    def __init__(self, model: nn.Module, device: torch.device, step: int = 0, also: nn.Parameter | None = None) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or p is also]
        self._step = torch.tensor(step, device=device)
        self._bad_step = torch.tensor(-1, device=device)
        self._bad_loss = torch.tensor(0.0, device=device)
        self._bad_norms = torch.zeros(len(self._named), device=device)

    def __call__(self, loss: Tensor, norms: dict[int, Tensor] | None = None) -> Tensor:
        """Look at a step's loss and gradients; returns the gradient's norm.

        Everything is updated in place, so that a captured step does it again at each launch.

        norms: by the id of a parameter, gradient norms that are known already.
        """
        known = dict(norms or {})
        with_gradient = [p for _, p in self._named if p.grad is not None and id(p) not in known]
        found = torch._foreach_norm([p.grad for p in with_gradient if p.grad is not None])
        known |= {id(p): norm for p, norm in zip(with_gradient, found, strict=True)}
        zero = torch.zeros((), device=loss.device)
        norms_P = torch.stack([known.get(id(p), zero).float() for _, p in self._named])
        norm = norms_P.norm()
        self._step += 1
        is_first = (self._bad_step < 0) & ~(norm + loss).isfinite()
        self._bad_norms.copy_(torch.where(is_first, norms_P, self._bad_norms))
        self._bad_loss.copy_(torch.where(is_first, loss, self._bad_loss))
        self._bad_step.copy_(torch.where(is_first, self._step, self._bad_step))
        return norm

    def check(self, kept: str) -> None:
        """Raise if any step so far met a number that is not finite.

        kept: what is still good, for the message.
        """
        step = int(self._bad_step)
        if step < 0:
            return
        names = [name for (name, _), ok in zip(self._named, self._bad_norms.isfinite().tolist(), strict=True) if not ok]
        found = f"the gradient of {names[0]} ({len(names)} of {len(self._named)} tensors)" if names else "the loss"
        raise Diverged(
            f"step {step}: {found} is not finite, the loss was {float(self._bad_loss):g}. Training stopped; {kept}. "
            "Lower train.lr or set train.clip=1, or look for extreme times in the data"
        )
