"""The guard: gradient norms, and the first number that was not finite, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trope.kernels.adamw import Parts
from trope.kernels.divergence import Squares, Watched, watch


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
        self._watched = Watched.begin(step, len(self._named), device)

    def norms(self, known: Iterable[int] = ()) -> dict[int, Tensor]:
        """The norm of each gradient, by the id of its parameter, but for those that are known already."""
        left_out = set(known)
        of = {id(p): p.grad for _, p in self._named if p.grad is not None and id(p) not in left_out}
        return dict(zip(of, torch._foreach_norm(list(of.values())), strict=True)) if of else {}

    def stacked(self, known: dict[int, Tensor]) -> Tensor:
        """The norms of all gradients, [P]. known: by the id of their parameter; the others are computed here."""
        found = {**self.norms(known), **known}
        missing = [id(p) for _, p in self._named if id(p) not in found]  # not every step reaches every parameter
        found |= dict.fromkeys(missing, torch.zeros((), device=self._watched.step.device)) if missing else {}
        return torch.stack([found[id(p)].float() for _, p in self._named])

    def __call__(self, loss: Tensor, known: dict[int, Tensor] | None = None) -> Tensor:
        """Look at a step's loss and gradients; returns the gradient's norm. known: see `stacked`."""
        return watch(loss, self.stacked(known or {}), self._watched)

    def place_of(self, parameter: Tensor) -> int:
        """The number by which `with_parts` knows a parameter."""
        return next(place for place, (_, p) in enumerate(self._named) if p is parameter)

    def with_parts(
        self, loss: Tensor, norms_P: Tensor | None, parts: Parts, table: Tensor, squares: Tensor, more: Tensor | None
    ) -> Tensor:
        """The same from parts of squared norms.

        Args:
            norms_P: from `stacked`, of the parameters that the rest has not; None if there are none.
            parts: of the network's parameters.
            squares, more: of the item table; `more` may be None.
        """
        return watch(loss, norms_P, self._watched, parts, Squares(self.place_of(table), squares, more))

    def check(self, kept: str) -> None:
        """Raise if any step so far met a number that is not finite.

        kept: what is still good, for the message.
        """
        step, is_finite_P = int(self._watched.bad_step), self._watched.bad_norms_P.isfinite().tolist()
        if step < 0:
            return
        names = [name for (name, _), is_finite in zip(self._named, is_finite_P, strict=True) if not is_finite]
        found = f"the gradient of {names[0]} ({len(names)} of {len(self._named)} tensors)" if names else "the loss"
        raise Diverged(
            f"step {step}: {found} is not finite, the loss was {float(self._watched.bad_loss):g}. Training stopped; "
            f"{kept}. Lower train.lr or set train.clip=1, or look for extreme times in the data"
        )
