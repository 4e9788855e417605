"""What a number was measured on: machine, versions, commit. It loads torch only when asked: `trope --help` is fast."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

__version__ = "0.1.0"


def describe() -> dict[str, str]:
    """Device, versions, commit and date, as plain strings."""
    import torch

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
