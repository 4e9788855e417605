"""The device to compute on, by name, and making it the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def choose_device(device: str) -> torch.device:
    """The device by name; auto takes a GPU where there is one. Models run on CPUs and CUDA GPUs, nowhere else."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = f"device must be auto, cpu, cuda or such as cuda:1, got {device!r}"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(wanted) from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"{wanted}: trope runs on CPUs and on CUDA GPUs; take --device cpu here")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no GPU; take --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {device} was asked for, but torch finds {count} GPUs; they count from cuda:0")
    return chosen


def current_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Inside, `device` is the current GPU; a CPU changes nothing.

    `torch.cuda.manual_seed` seeds the current GPU, and Triton launches on it, whichever their tensors are on.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_gpu(method: Callable[P, T]) -> Callable[P, T]:
    """A method of an object with a `device`, which is the current GPU inside."""

    @functools.wraps(method)
    def guarded(*args: P.args, **named: P.kwargs) -> T:
        owner: Any = args[0]
        with current_gpu(owner.device):
            return method(*args, **named)

    return guarded
