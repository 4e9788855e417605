"""The device to compute on, and what a number was measured on: machine, versions, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

__version__ = "0.1.0"
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


def describe() -> dict[str, str]:
    """Device, versions, commit and date, as plain strings."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "trope": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """TROPE_COMMIT where it is set, for a copy whose history is missing or old; else the checkout's commit, with "+"
    behind it if files differ from it."""
    if os.environ.get("TROPE_COMMIT"):
        return _stated_commit()
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _stated_commit() -> str:
    stated = os.environ["TROPE_COMMIT"]
    if not re.fullmatch(r"[0-9a-f]{7,40}\+?", stated):
        raise ValueError(f"TROPE_COMMIT must be a commit, 7 to 40 hexadecimal digits, got {stated!r}; or unset it")
    return stated


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
