"""Which store a path or URL means."""

from __future__ import annotations

from pathlib import Path

from trope.server.store import Store


def open_store(where: str | Path) -> Store:
    """The store at a path (SQLite) or URL (redis://, rediss://, unix://)."""
    text = str(where)
    if text.startswith(("redis://", "rediss://", "unix://")):
        from trope.server.redis_store import RedisStore

        return RedisStore(text)
    if "://" in text:
        raise ValueError(f"--store must be a file or a redis:// URL, got {text}")
    from trope.server.sqlite_store import SqliteStore

    return SqliteStore(Path(text))
