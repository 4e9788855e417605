"""What a number was measured on: machine, versions, commit. Every results file carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

__version__ = "0.1.0"


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
    """The checkout's commit, "+" behind it if files differ from it; TROPE_COMMIT where the checkout has no history."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return _stated_commit()


def _stated_commit() -> str:
    stated = os.environ.get("TROPE_COMMIT") or "unknown"
    if stated != "unknown" and not re.fullmatch(r"[0-9a-f]{7,40}\+?", stated):
        raise ValueError(f"TROPE_COMMIT must be a commit, 7 to 40 hexadecimal digits, got {stated!r}; or unset it")
    return stated


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
