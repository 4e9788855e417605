"""The first step that met a number that is not finite, kept on the device. Decides what runs.

A training step ends with it. Plain PyTorch takes some twenty launches of two microseconds for a few numbers, in which
the rest of a GPU waits; the kernel is one launch.

Shape letters: P parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.adamw.reference import Parts
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.divergence import reference
from trope.kernels.divergence.reference import Squares, Watched

__all__ = ["Squares", "Watched", "watch"]


@torch.no_grad()
def watch(
    loss: Tensor,
    norms_P: Tensor | None,
    watched: Watched,
    parts: Parts | None = None,
    table: Squares | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Count a step, and keep its numbers if it is the first with one that is not finite; returns the gradient's norm.

    Args:
        loss: scalar. norms_P: the norm of each parameter's gradient, float32; 0 where it is among the parts.
        watched: changed in place, so that a captured step does it again at each launch.
        parts: of parameters whose norms nobody has formed.
        table: of one more parameter, whose entry in norms_P is not read.
    """
    if resolve_backend(backend, watched.bad_norms_P) == "torch":
        return reference.watch(loss, norms_P, watched, parts, table)
    from trope.kernels.divergence import triton as fused  # only now: CPU users need no Triton

    return fused.watch(loss, norms_P, watched, parts, table)
