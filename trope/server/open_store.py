"""Which store a path or URL means."""

from __future__ import annotations

from pathlib import Path

from trope.data.sources.urls import told
from trope.server.store import Store


def open_store(where: str | Path, may_create: bool = True) -> Store:
    """The store at a path (SQLite) or URL (redis://, rediss://, unix://).

    may_create: whether a file that is no store yet becomes one.
    """
    text = str(where)
    if text.startswith(("redis://", "rediss://", "unix://")):
        from trope.server.redis_store import RedisStore

        return RedisStore(text)
    if "://" in text:
        raise ValueError(f"--store must be a file or a redis:// URL, got {told(text)}")
    from trope.server.sqlite_store import SqliteStore

    return SqliteStore(Path(text), may_create)
