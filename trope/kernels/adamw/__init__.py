"""AdamW of a network's tensors in one pass: weights, moments, the gradients' norms and copies in bf16.

torch's own fused AdamW gives a program 65,536 numbers, so a matrix of a million keeps 16 of an H200's 132
multiprocessors busy. Norms and copies are passes of their own there, of several launches each. Decides what runs.

Shape letters: S parts of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trope.kernels.adamw import reference
from trope.kernels.adamw.reference import Moved, Parts
from trope.kernels.backend import Backend, resolve_backend

__all__ = ["Moved", "Parts", "factors_of", "move"]


@torch.no_grad()
def factors_of(hyper: Tensor, backend: Backend = "auto") -> Tensor:
    """What every weight of a step is multiplied by, formed once in float64, for `move` and `update_table`.

    hyper: [6] on the device, float32 or float64: lr, beta1, beta2, eps, weight_decay, step (from 1).
    """
    if resolve_backend(backend, hyper.new_empty(0, dtype=torch.float32)) == "torch":  # hyper may be float64
        return hyper.double()
    from trope.kernels.adamw import triton as fused  # only now: CPU users need no Triton

    return fused.factors_of(hyper)


@torch.no_grad()
def move(tensors: Sequence[Moved], factors: Tensor, backend: Backend = "auto") -> Parts:
    """One AdamW step of each tensor, in place; returns the squared norms of the gradients.

    factors: from `factors_of`, with the same backend.
    """
    if not tensors:
        nothing = torch.zeros(0, device=factors.device)
        return Parts(nothing, nothing.int())
    if resolve_backend(backend, tensors[0].weight) == "torch":
        return reference.move(tensors, factors)
    from trope.kernels.adamw import triton as fused

    return fused.move(tensors, factors)
