"""AdamW's step in plain PyTorch: the ground truth for the kernels, and the CPU path.

Shape letters: R rows, E width, S parts of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moved(NamedTuple):
    """A tensor that moves, in any shape, contiguous; weight, moments and gradient are float32.

    low: receives the new weights in its own dtype, or None. Those of one call have one dtype.
    place: a number by which the caller knows the tensor.
    decays: False leaves out the weight decay.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    low: Tensor | None
    place: int = 0
    decays: bool = True


class Parts(NamedTuple):
    """Squared norms of gradients, in parts whose sums nobody has formed."""

    squares_S: Tensor  # float32
    places_S: Tensor  # int32, the place of the tensor that a part is of


def adamw(
    weight_RE: Tensor,
    exp_avg_RE: Tensor,
    exp_avg_sq: Tensor,
    grad_RE: Tensor,
    lr: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    eps: float | Tensor,
    weight_decay: float | Tensor,
    step: Tensor,
) -> None:
    """AdamW's step, in place; a second moment [R] is one number a row, its squared gradients averaged over the row.

    The hyperparameters are numbers or scalars on the device; steps count from 1.
    """
    square = grad_RE.square()
    if exp_avg_sq.ndim < weight_RE.ndim:
        square, exp_avg_sq = square.mean(dim=1, keepdim=True), exp_avg_sq[:, None]
    exp_avg_RE.mul_(beta1).add_(grad_RE * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(square * (1 - beta2))
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + eps
    weight_RE.mul_(1 - lr * weight_decay).sub_(exp_avg_RE / denominator * (lr / (1 - beta1**step)))


def move(tensors: Sequence[Moved], factors: Tensor) -> Parts:
    """See `trope.kernels.adamw.move`; one part of each tensor."""
    lr, beta1, beta2, eps, weight_decay, step = factors.unbind()
    for each in tensors:
        adamw(*each[:4], lr, beta1, beta2, eps, weight_decay if each.decays else 0.0, step)
        if each.low is not None:
            each.low.copy_(each.weight)
    squares_S = torch.stack([each.grad.square().sum() for each in tensors])
    # Filled on the device: a captured step copies nothing from the host.
    return Parts(squares_S, torch.stack([torch.full_like(squares_S[0], each.place).int() for each in tensors]))
