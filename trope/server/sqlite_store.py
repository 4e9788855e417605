"""Events in an SQLite file: write-ahead log, and every commit is on disk before it returns (synchronous=FULL).

Several servers on one machine may share the file.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from trope.server.schema import Event
from trope.server.store import Past, Stored, StoreError

_APPLICATION = 0x74726F70  # "trop", so that another program's file is not taken for ours
_FORMAT = 1
# `item` has no type: SQLite then keeps integers and text apart, as they came.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS events (
    position INTEGER PRIMARY KEY AUTOINCREMENT, user TEXT NOT NULL, item NOT NULL, time INTEGER NOT NULL, event_id TEXT
);
CREATE INDEX IF NOT EXISTS events_of_user ON events (user, position);
CREATE UNIQUE INDEX IF NOT EXISTS events_once ON events (event_id) WHERE event_id IS NOT NULL;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORMAT};
COMMIT;
"""
_INSERT = "INSERT INTO events (user, item, time, event_id) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
_BUSY_SECONDS = 10.0
_PAGES_KIB = 256
"""Of the file's pages that each connection keeps. SQLite's default of 2,000 fills over hours, and saves no measurable
time: the system keeps the pages too."""


class SqliteStore:
    """A store in one file, made where it is missing and may be created."""

    def __init__(self, path: Path, may_create: bool = True) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: transactions begin where we say. One connection writes, one reads beside it.
            self._writer, self._reader = (
                sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
                for _ in range(2)
            )
            self._prepare(may_create)
        except sqlite3.Error as error:
            raise ValueError(f"cannot open the store {path}: {error}; name another file with --store") from None
        self._writing, self._reading = threading.Lock(), threading.Lock()

    def _prepare(self, may_create: bool) -> None:
        # The tables first: a server that begins beside this one makes them and the two numbers in one transaction.
        (tables,) = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if tables and (application, version) != (_APPLICATION, _FORMAT):
            raise ValueError(f"{self.path} is a database of something else, not of `trope serve`; name another file")
        if not (tables or may_create):
            raise ValueError(f"{self.path} has no event; is this the file that `trope serve --store` names?")
        (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise ValueError(f"{self.path} lies on a file system without WAL ({mode}); name another place with --store")
        self._writer.execute("PRAGMA synchronous = FULL")
        for connection in (self._writer, self._reader):
            connection.execute(f"PRAGMA cache_size = -{_PAGES_KIB}")
        if not tables:
            self._writer.executescript(_SCHEMA)

    def append(self, posts: Sequence[Sequence[Event]]) -> list[int]:
        """See `Store`: one transaction, so one flush to disk for all of them."""
        with self._writing, _one_line(self.path, "write"):
            marks = [self._writer.total_changes]
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                for events in posts:
                    self._writer.executemany(_INSERT, events)
                    marks.append(self._writer.total_changes)
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            return [after - before for before, after in pairwise(marks)]

    def after(self, position: int, most: int, since: int = 0) -> list[Stored]:
        """See `Store`."""
        query = (
            "SELECT position, user, item, time FROM events WHERE position > ? AND time >= ? ORDER BY position LIMIT ?"
        )
        with self._reading, _one_line(self.path, "read"):
            return [Stored(*row) for row in self._reader.execute(query, (position, since, most))]

    def last_position(self) -> int:
        """See `Store`."""
        with self._reading, _one_line(self.path, "read"):
            return int(self._reader.execute("SELECT coalesce(max(position), 0) FROM events").fetchone()[0])

    def histories(self, users: Sequence[str], most: int) -> list[list[Past]]:
        """See `Store`."""
        query = "SELECT position, item, time FROM events WHERE user = ? ORDER BY position DESC LIMIT ?"
        with self._reading, _one_line(self.path, "read"):
            return [[Past(*row) for row in self._reader.execute(query, (user, most))][::-1] for user in users]

    def describe(self) -> str:
        """See `Store`."""
        return f"SQLite {self.path}, on disk when acknowledged"

    def close(self) -> None:
        """See `Store`; the write-ahead log is folded into the file."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()


@contextmanager
def _one_line(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the store {path} does not {verb}: {error}") from None
