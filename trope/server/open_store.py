"""Which store a path or URL means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trope.data.sources.urls import shown

if TYPE_CHECKING:
    from trope.server.store import Store

_REDIS = ("redis://", "rediss://", "unix://")
_SQLITE = b"SQLite format 3\0"  # how every such file begins


def is_store(where: str) -> bool:
    """Whether a path or URL may be a store: an SQLite file, or a Redis. It needs none of the server's packages."""
    if where.startswith(_REDIS):
        return True
    path = Path(where)
    if "://" in where or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def open_store(where: str | Path, may_create: bool = True) -> Store:
    """The store at a path (SQLite) or URL (redis://, rediss://, unix://).

    may_create: whether a file that is no store yet becomes one.
    """
    text = str(where)
    if text.startswith(_REDIS):
        from trope.server.redis_store import RedisStore

        return RedisStore(text)
    if "://" in text:
        raise ValueError(f"--store must be a file or a redis:// URL, got {shown(text)}")
    from trope.server.sqlite_store import SqliteStore

    return SqliteStore(Path(text), may_create)
