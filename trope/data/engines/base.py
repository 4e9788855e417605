"""What an engine must do: read the source's files, and run the shared expressions of `trope.data.prepare`.

Only the read step differs by engine. It attaches `place` to every event: the file and row the event came from, as one
number that rises through the source. Ties in time are broken by `place`, so every engine gives the same order. All
later steps are one set of Ibis expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ibis.expr.types as ir

from trope.data.engines.shard_tables import ShardWriter
from trope.data.sources.description import Lookup, Source

# place = file number << ROW_BITS | row number
ROW_BITS = 40
# Why a line of text is rejected: too few or too many fields, or foreign characters.
UNREADABLE = "line cannot be split into its fields"


# What engines say where the disk or a quota is full, or a file may not grow.
_FULL = ("No space left", "Disk quota exceeded", "File too large", "max_temp_directory_size")


def no_space(error: Exception, said: str) -> str | None:
    """The line for an engine's error if the disk is full, else None. said: what may be quoted of the error."""
    if not any(sign in str(error) for sign in _FULL):
        return None
    return f"no space left for intermediate tables: {said}; free some disk and run again"


@dataclass(frozen=True)
class BadRow:
    """An event that cannot be used: its file, its row (from 1, as an editor counts) and the reason."""

    file: str
    row: int
    reason: str


@dataclass(frozen=True)
class RawEvents:
    """What a read step returns: events as the source has them, not yet checked.

    table: columns `user`, `item`, `time`, `place`, and `basket`, `event` and `value` where the source has them. Text
        files give text columns. Temporal columns and parsed dates are int64 microseconds. Where dates were parsed from
        text, the column `written` keeps the text for messages.
    time_unit: the unit of `time`: `s`, `ms`, `us` or `ns`.
    rejected: rows that could not be split into fields; they are not in the table.
    renumber: whether `place` counts without the rejected rows.
    """

    table: ir.Table
    time_unit: str
    rejected: list[BadRow] = field(default_factory=list)
    renumber: bool = False


class Engine(Protocol):
    """A connection that reads a source and keeps intermediate tables.

    label: the engine's name and version, recorded in `meta.json`.
    """

    label: str

    def settle(self, source: Source) -> Source:
        """The source with its columns chosen, where only a connection can tell which there are; call it before `read`.

        The columns of files are chosen when they are found.
        """

    def read(self, source: Source) -> RawEvents:
        """The source's events; computed when needed, where the engine is lazy."""

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        """The file of a lookup, as a table."""

    def scan(self, files: tuple[Path, ...], columns: tuple[str, ...]) -> ir.Table:
        """These columns of Parquet files with one schema, as one table without an order."""

    def keep(self, table: ir.Table) -> ir.Table:
        """Compute a table now and keep it, so that later expressions read the result."""

    def each_shard(
        self, users: ir.Table, events: ir.Table, shard_users: int, write: ShardWriter
    ) -> Iterator[dict[str, Any]]:
        """Let `write` write every shard of `shard_users` users; yields what it returns, in any order.

        users, events: as in `trope.data.arrays.Coded`. Where the engine has workers, `write` runs there.
        """

    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that this engine raises when a file or a query fails."""

    def share_done(self) -> float | None:
        """The share of the running query that is done, from 0 to 1, or None if unknown; called from another thread."""
