"""Cutting a training batch out of all events, as flat tokens of a fixed number: decides what runs.

The host reads nothing back: the caller's `BatchShape` fixes the shape, and a cursor on the device says where the batch
begins and moves on by itself. So the same launches, captured once, cut every batch of an epoch.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.batch import reference
from trope.kernels.batch.reference import BatchShape, Source, Tokens

__all__ = ["BatchShape", "Source", "Tokens", "gather_batch"]


def gather_batch(source: Source, plan: BatchShape, cursor: Tensor, backend: Backend = "auto") -> Tokens:
    """The batch that begins at window number `cursor` ([1] int64) of the order; moves the cursor on."""
    if resolve_backend(backend, source.items) == "torch":
        return reference.gather_batch(source, plan, cursor)
    from trope.kernels.batch import triton as fused

    return fused.gather_batch(source, plan, cursor)
