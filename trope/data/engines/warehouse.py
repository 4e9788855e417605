"""A database that already holds the events: the expressions run there, and only the result is fetched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir

from trope.data.engines.base import RawEvents
from trope.data.engines.shard_tables import ShardWriter, write_by_ranges
from trope.data.sources.description import Lookup, Source
from trope.data.sources.urls import local_file, redacted, shown


class Warehouse:
    """A database that Ibis can connect to. Only temporary tables are written there.

    url: an Ibis connection URL.

    A table has no row order, so ties in time are broken by the item's id.
    """

    def __init__(self, url: str) -> None:
        file = local_file(url)
        if file is not None and not file.is_file():  # DuckDB and SQLite would make an empty one
            raise FileNotFoundError(f"no database file at {file}; check the path in {shown(url)}")
        try:
            self._connection = ibis.connect(url)
        except Exception as error:  # each backend has its own; all mean that there is no connection
            raise ValueError(f"cannot connect to {shown(url)}: {redacted(error, url)}") from None
        self.label = f"{self._connection.name} {self._connection.version}"

    def settle(self, source: Source) -> Source:
        return source.settled(self._table(source).columns)

    def read(self, source: Source) -> RawEvents:
        table = self._table(source)
        used = source.columns.used()
        for role, column in used.items():
            if column not in table.columns:
                raise ValueError(
                    f"table {source.table} has no column {source.wanted(role)} for the {role}; it has "
                    f"{', '.join(table.columns)}: name it with --{role}-col"
                )
        time = table[source.columns.time]
        temporal = time.type().is_temporal()
        chosen = {role: table[column] for role, column in used.items()}
        if temporal:
            chosen["time"] = time.cast("timestamp").epoch_seconds().cast("int64")
        # Every place is 0: the order among equal times then falls to the item.
        return RawEvents(table.select(**chosen, place=ibis.literal(0, "int64")), "s" if temporal else source.time_unit)

    def _table(self, source: Source) -> ir.Table:
        schema, dot, name = source.table.rpartition(".")
        try:
            return self._connection.table(source.table)
        except Exception as error:  # as above
            if dot:
                with suppress(Exception):
                    return self._connection.table(name, database=schema)
            said = redacted(error, source.url)
            raise ValueError(f"no table {source.table!r} in {source.name}: {said}; name one with --table") from None

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        raise ValueError(f"items of a table cannot be looked up in {lookup.path}; join them there")

    def scan(self, files: tuple[Path, ...], columns: tuple[str, ...]) -> ir.Table:
        raise ValueError(f"{self.label} cannot read {files[0].name} on this machine; use --engine duckdb or spark")

    def keep(self, table: ir.Table) -> ir.Table:
        return table.cache()

    def each_shard(
        self, users: ir.Table, events: ir.Table, shard_users: int, write: ShardWriter
    ) -> Iterator[dict[str, Any]]:
        return write_by_ranges(users, events, shard_users, write)

    def errors(self) -> tuple[type[Exception], ...]:
        # A driver keeps its errors under one class `Error`, in its module (PEP 249); Ibis passes them on as they are.
        connection = getattr(self._connection, "con", None)
        driver = sys.modules.get(type(connection).__module__.partition(".")[0])
        theirs = getattr(driver, "Error", None)
        ours = ibis.common.exceptions.IbisError
        return (ours, theirs) if isinstance(theirs, type) and issubclass(theirs, Exception) else (ours,)

    def share_done(self) -> float | None:
        return None
