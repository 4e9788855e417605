"""Files and folders that are whole or absent: each is written under a temporary name, flushed to disk, then renamed.

A process that is killed meanwhile leaves a hidden `.NAME.partial-…`, never a half-written NAME.
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
    """Yield a temporary path to write; it is renamed to `path` if the block succeeds, and removed if it raises."""
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
    """Yield a temporary folder to fill; it replaces `path` if the block succeeds, and is removed if it raises."""
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
    """Force a file to disk before it gets its final name, so that a power cut leaves no empty file there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_name(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`; an existing folder is moved away first, and back if the rename fails."""
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
