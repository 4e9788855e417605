"""Engines: who reads the files and runs the shared expressions of `trope.data.prepare`.

Only the read step differs by engine. It must attach `place`, the file and row an event came from, as one number that
rises through the source: ties in time are broken by it, so every engine gives the same order. Everything after it is
one set of Ibis expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ibis
import ibis.expr.types as ir

from trope.data.sources.source import Lookup, Source

# place = file number << ROW_BITS | row number
ROW_BITS = 40
ENGINES = ("duckdb", "spark")
# Why a line of text is rejected: too few or too many fields, an open quote, foreign characters.
UNREADABLE = "line cannot be split into its fields"


@dataclass(frozen=True)
class BadRow:
    """An event that cannot be used, and where it stands (counted from 1, as an editor shows it)."""

    file: str
    row: int
    reason: str


@dataclass(frozen=True)
class Read:
    """What a read step hands on.

    table: columns `user`, `item`, `time`, `place`, and `basket` and `event` where the source has them. Text files
        give text columns; temporal columns and parsed dates come as int64 microseconds. Where dates were parsed from
        text, `written` is that text, for messages.
    time_unit: the unit of `time`: `s`, `ms`, `us` or `ns`.
    rejected: rows that could not be split into fields at all; they are not in the table.
    renumber: whether `place` skips the rejected rows.
    """

    table: ir.Table
    time_unit: str
    rejected: list[BadRow] = field(default_factory=list)
    renumber: bool = False


class Engine(Protocol):
    """A connection that can read a source and hold on to intermediate tables."""

    label: str

    def read(self, source: Source) -> Read:
        """The source's events as a table (lazily where the engine can)."""

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        """A lookup's file as a table."""

    def keep(self, table: ir.Table) -> ir.Table:
        """Compute a table now and keep the result, so that later expressions do not compute it again."""

    def errors(self) -> tuple[type[Exception], ...]:
        """What this engine raises when a file or a query fails."""

    def share_done(self) -> float | None:
        """How far the running query is, from 0 to 1, where the engine can tell; asked from another thread."""


@contextmanager
def open_engine(
    name: str, source: Source, work: Path, threads: int | None, memory: str | None, master: str | None
) -> Iterator[Engine]:
    """Start an engine and stop it at the end.

    name: `duckdb` or `spark`; a source that is a table brings its own.
    work: a folder on the output's disk for what does not fit in memory.
    threads, memory: DuckDB's limits. master: a Spark master URL.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    if master is not None and name != "spark":
        raise ValueError(f"--master {master} is for --engine spark, not {name}")
    if source.kind == "table":
        yield Warehouse(source.url)
    elif name == "duckdb":
        from trope.data.engines.duckdb import DuckDB

        duckdb = DuckDB(work, threads, memory)
        try:
            yield duckdb
        finally:
            duckdb.close()
    else:
        try:
            from trope.data.engines.spark import Spark
        except ImportError:
            raise ValueError("--engine spark needs pyspark and Java 17; install trope[spark]") from None
        spark = Spark(master, work)
        try:
            yield spark
        finally:
            spark.close()


class Warehouse:
    """Any backend Ibis can connect to. Nothing but temporary tables is ever written there.

    A table has no row order, so ties in time are broken by the item's id.
    """

    def __init__(self, url: str) -> None:
        try:
            self._connection = ibis.connect(url)
        except Exception as error:  # each backend has its own; all mean that there is no connection
            raise ValueError(f"cannot connect to {url.split('@')[-1]}: {error}") from None
        self.label = f"{self._connection.name} {self._connection.version}"

    def read(self, source: Source) -> Read:
        try:
            table = self._connection.table(source.table)
        except Exception as error:  # as above
            raise ValueError(f"no table {source.table!r} in {source.name}: {error}") from None
        used = source.columns.used()
        for role, column in used.items():
            if column not in table.columns:
                raise ValueError(
                    f"table {source.table} has no column {column!r} for the {role}; it has "
                    f"{', '.join(table.columns)}: name it with --{role}-col"
                )
        time = table[source.columns.time]
        temporal = time.type().is_temporal()
        chosen = {role: table[column] for role, column in used.items()}
        if temporal:
            chosen["time"] = time.cast("timestamp").epoch_seconds().cast("int64")
        # Every place is 0: the order among equal times then falls to the item.
        return Read(table.select(**chosen, place=ibis.literal(0, "int64")), "s" if temporal else source.time_unit)

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        raise ValueError(f"items of a table cannot be looked up in {lookup.path}; join them there")

    def keep(self, table: ir.Table) -> ir.Table:
        return table.cache()

    def errors(self) -> tuple[type[Exception], ...]:
        return (ibis.common.exceptions.IbisError,)

    def share_done(self) -> float | None:
        return None
