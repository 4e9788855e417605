"""Files and folders that are whole or absent: written under another name beside their own, flushed, then renamed.

A process killed in between leaves a hidden `.NAME.partial-…` behind, never a half-written NAME.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well and vanishes when it does not."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)  # mkstemp's 0600 is for secrets
        _flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well (replacing what was there) and vanishes else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)
        for inner in partial.rglob("*"):
            _flush(inner)
        _flush(partial)
        _take_name(partial, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have it on disk before it gets its final name, so that a power cut leaves no empty file under that name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_name(partial: Path, path: Path) -> None:
    """Rename, moving an existing folder out of the way first and back again if that fails."""
    if not path.exists():
        partial.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    path.rename(old / path.name)
    try:
        partial.rename(path)
    except OSError:
        (old / path.name).rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
