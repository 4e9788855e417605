"""Which implementation runs: the torch reference or the Triton kernel. The only place that decides."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
BACKENDS = ("auto", "torch", "triton")

# Only whether it is installed: a Triton that is there but broken must fail loudly, not become a slow run.
HAS_TRITON = importlib.util.find_spec("triton") is not None

logger = logging.getLogger("trope")


_preferred: ContextVar[Literal["torch"] | None] = ContextVar("trope_backend", default=None)


@contextmanager
def prefer(backend: Literal["torch"]) -> Iterator[None]:
    """Inside, "auto" takes the reference everywhere, to compare with it. Also a decorator."""
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


def resolve_backend(backend: Backend, x: Tensor) -> Literal["torch", "triton"]:
    """The backend for a tensor: Triton for CUDA tensors up to float32, else torch, unless one is asked for."""
    if backend == "auto":
        fused = x.is_cuda and x.dtype != torch.float64 and HAS_TRITON
        chosen: Literal["torch", "triton"] = "triton" if fused else "torch"
        if torch.compiler.is_compiling():
            return chosen
        _say_once(chosen, x.device.type)
        return _preferred.get() or chosen
    if backend == "torch":
        return "torch"
    if backend != "triton":
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if not HAS_TRITON:
        raise ValueError(
            "backend='triton' needs the package triton, which is not installed; use backend='auto' or 'torch'"
        )
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"backend='triton' needs a CUDA tensor, got one on {x.device}; use backend='auto' or 'torch' "
            "(or TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, for tests)"
        )
    if x.dtype == torch.float64:
        raise ValueError("backend='triton' computes in float32, got a float64 tensor; use backend='auto' or 'torch'")
    return "triton"


@functools.cache
def _say_once(chosen: str, device: str) -> None:
    logger.info("backend='auto' took %s for %s tensors", chosen, device)
