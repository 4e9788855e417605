"""Files and folders that are whole or absent: each is written under a temporary name, flushed to disk, then renamed.

A process that is killed meanwhile leaves a hidden `.NAME.partial-…`, never a half-written NAME. A folder that is
replaced exchanges its name with the new one in one step where the system can (Linux), so that NAME is never missing.
Elsewhere a kill may leave NAME as `.NAME.old-…` alone; `recover` brings it back. No other module knows these names.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# What a folder is called until it is whole, and while another takes its name in two steps.
_PARTIAL, _OLD = "partial", "old"
_TOKEN = "[0-9a-f]" * 8  # both a glob and a regular expression
_HIDDEN = re.compile(rf"\.(.+)\.(?:{_PARTIAL}|{_OLD})-{_TOKEN}")

# From linux/fs.h and fcntl.h.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# What rename(2) says where the name is taken: by a folder that is not empty, or by a file.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# What renameat2(2) says where the kernel or the file system cannot exchange names, NFS for example.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

# A full disk, a full quota, and a file that may not grow.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it is renamed to `path` if the block succeeds, and removed if it raises."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, _PARTIAL)
    # 0666 less the umask, as `open` does; mkstemp's 0600 is for secrets.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = partial.stat().st_mode
    try:
        yield partial
        partial.chmod(mode)  # whatever the writer made of it: safetensors makes 0600 of every file
        _flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, may_replace: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `path` if the block succeeds, and is removed if it raises.

    may_replace: called at the end with an existing, filled `path`, right before it is replaced; raises to refuse.
    """
    if path.is_symlink():  # the folder that it points to is replaced, on its own disk; the link stays
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, _PARTIAL)
    partial.mkdir()
    mode = partial.stat().st_mode
    try:
        yield partial
        for inner in partial.rglob("*"):
            if inner.is_file():
                inner.chmod(mode & 0o666)  # as in `atomic_file`; the umask is seen in the folder's own mode
            _flush(inner)
        _flush(partial)
        _take_name(partial, path, may_replace)
        _flush(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover(path: Path) -> None:
    """Bring the folder `path` back if killed writers left it under a hidden name alone; remove what else they left.

    A writer that is still alive loses what it has not finished. What cannot be removed now stays for the next time.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # as in `atomic_folder`
    survivors = sorted(_left(path, _OLD), key=_written_at)
    if survivors and not path.exists():
        try:
            survivors.pop().rename(path)  # the one that was written last
        except OSError:
            if not path.exists():  # else a living writer was faster
                raise
    for leftover in (*survivors, *_left(path, _PARTIAL)):
        shutil.rmtree(leftover, ignore_errors=True)


def recover_all(parent: Path) -> None:
    """`recover` every folder in `parent` that has left something there."""
    for name in {found[1] for path in parent.glob(".*") if (found := _HIDDEN.fullmatch(path.name))}:
        recover(parent / name)


@contextmanager
def one_line_if_full(path: Path) -> Iterator[None]:
    """Turn an OSError of a full disk into a ValueError that says what to do. path: what is being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ValueError(f"no space left while writing {path}; nothing was kept, free some and run again") from error


def _beside(path: Path, word: str) -> Path:
    """A hidden name in the folder of `path` that nobody else has."""
    return path.with_name(f".{path.name}.{word}-{secrets.token_hex(4)}")


def _left(path: Path, word: str) -> list[Path]:
    """What `_beside` has named and is still there."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.{word}-{_TOKEN}"))


def _written_at(path: Path) -> float:
    """Seconds; of what is no longer there, before everything else."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("-inf")


def _flush(path: Path) -> None:
    """Force a file to disk before it gets its final name, so that a power cut leaves no empty file there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_name(partial: Path, path: Path, may_replace: Callable[[Path], None] | None) -> None:
    """Rename `partial` to `path`. What has that name already gets the name of `partial`, or is removed."""
    try:
        # Asking first whether `path` exists would leave a moment in which another process can make it.
        partial.rename(path)
        return
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; name a folder")
    if may_replace is not None:
        may_replace(path)
    if not _exchange(partial, path):
        _replace_in_two_steps(partial, path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _replace_in_two_steps(partial: Path, path: Path) -> None:
    """Move `path` away, then rename `partial`; a kill between the two leaves `path` as `.NAME.old-…`."""
    old = _beside(path, _OLD)
    path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        old.rename(path)
        raise
    # It is removed under the name of what is not whole: `recover` takes all that is called old for whole.
    old.rename(partial)
