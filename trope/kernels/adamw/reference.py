"""AdamW's step in plain PyTorch: the ground truth for the kernels, and the CPU path.

Shape letters: R rows, E width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moved(NamedTuple):
    """A tensor that moves, in any shape, contiguous; weight, moments and gradient are float32.

    low: receives the new weights in its own dtype, or None.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    low: Tensor | None


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
