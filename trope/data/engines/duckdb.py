"""DuckDB, the embedded default: out of core, no server, all cores.

Intermediate tables live in a database file in the work folder, where DuckDB compresses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir
import pyarrow as pa

from trope.data.dates import microseconds
from trope.data.engines.base import ROW_BITS, UNREADABLE, BadRow, RawEvents, no_space
from trope.data.engines.shard_tables import KEYS, ShardWriter, cut
from trope.data.sources import parquet
from trope.data.sources.description import Lookup, Source
from trope.data.sources.text import check_text

# Most of a laptop's 8 GB; the process needs some beside DuckDB's own limit.
_MEMORY = "5GB"
# Rows fetched at a time of a result that is not held as a whole.
_ROWS = 1 << 18
# Events sorted at a time: about 4 GB with what DuckDB needs beside them.
_SORTED = 1 << 26
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class DuckDB:
    """An embedded database in `work`, removed with it.

    threads: how many cores to use, all by default. memory: DuckDB's own limit, for example `5GB`.
    """

    def __init__(self, work: Path, threads: int | None = None, memory: str | None = None) -> None:
        self.label = f"duckdb {duckdb.__version__}"
        self._numbers = count()
        try:
            self._connection = ibis.duckdb.connect(work / "work.duckdb")
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            raise ValueError(no_space(error, said) or f"DuckDB cannot make a file for its tables: {said}") from None
        self._run("SET TimeZone = 'UTC'")
        # Keep count of a query's progress for `share_done`, but draw no bar of DuckDB's own.
        self._run("SET enable_progress_bar = true")
        self._run("SET enable_progress_bar_print = false")
        self._run(f"SET temp_directory = {_quoted(work / 'spill')}")
        try:
            self._run(f"SET memory_limit = {_quoted(memory or _MEMORY)}")
            if threads is not None:
                self._run(f"SET threads = {int(threads)}")
        except duckdb.Error as error:
            self.close()
            given = {"--threads": threads, "--memory": memory}
            said = " or ".join(f"{option} {value}" for option, value in given.items() if value is not None)
            raise ValueError(f"DuckDB refused {said}: {error}") from None

    def close(self) -> None:
        self._connection.disconnect()

    def errors(self) -> tuple[type[Exception], ...]:
        return (duckdb.Error, MemoryError)

    def share_done(self) -> float | None:
        percent = self._connection.con.query_progress()
        return percent / 100 if percent >= 0 else None

    def keep(self, table: ir.Table) -> ir.Table:
        # Row order is carried by `place`, so DuckDB need not preserve it, which saves memory.
        self._run("SET preserve_insertion_order = false")
        return self._connection.create_table(f"kept_{next(self._numbers)}", table)

    def each_shard(
        self, users: ir.Table, events: ir.Table, shard_users: int, write: ShardWriter
    ) -> Iterator[dict[str, Any]]:
        # Sorted some shards at a time: a query for each shard would read all events each time, and one sort of all of
        # them would spill several times their size to disk.
        total, most = (int(table.count().to_pyarrow().as_py()) for table in (events, users))
        step = shard_users * max(1, most * _SORTED // max(total * shard_users, 1))
        for low in range(0, most, step):
            here = (users.user_id >= low) & (users.user_id < low + step)
            who = cut(self._stream(users.filter(here).order_by("user_id")), "user_id", shard_users)
            rows = events.filter((events.user >= low) & (events.user < low + step)).order_by(*KEYS)
            for shard, (number, rows_here) in zip(who, cut(self._stream(rows), "user", shard_users), strict=True):
                assert number == shard[0], "every user has events"
                yield write(number, shard[1], rows_here)

    def _stream(self, table: ir.Table) -> Iterator[pa.RecordBatch]:
        """The rows of a query as they come; on a connection of its own, since another query would end the stream."""
        with self._connection.con.cursor() as cursor:
            try:
                yield from cursor.execute(self._connection.compile(table)).fetch_record_batch(_ROWS)
            except (pa.ArrowException, OSError) as error:  # how Arrow hands on what DuckDB raises in a stream
                raise duckdb.Error(str(error)) from None

    def settle(self, source: Source) -> Source:
        return source

    def read(self, source: Source) -> RawEvents:
        return self._read_parquet(source) if source.kind == "parquet" else self._read_text(source)

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        name = f"lookup_{next(self._numbers)}"
        self._run(f"CREATE VIEW {name} AS FROM read_parquet({_listed((lookup.path,))}, hive_partitioning = false)")
        return self._connection.table(name)

    def scan(self, files: tuple[Path, ...], columns: tuple[str, ...]) -> ir.Table:
        chosen = ", ".join('"' + column.replace('"', '""') + '"' for column in columns)
        return self._connection.sql(f"SELECT {chosen} FROM read_parquet({_listed(files)}, hive_partitioning = false)")

    def _read_parquet(self, source: Source) -> RawEvents:
        schema = parquet.schema(source.files[0])
        kind = schema.field(source.columns.time).type
        dates = source.time_unit == "iso" and (parquet.is_text(kind) or bool(source.time_format))
        temporal = pa.types.is_temporal(kind) and not dates
        if source.by_file:
            scans = [self._parquet_scan(source, n, 1, parquet.schema(f)) for n, f in enumerate(source.files)]
        else:
            scans = [self._parquet_scan(source, 0, len(source.files), schema)]
        table = self._connection.sql(" UNION ALL ".join(scans))
        if dates:
            table = _dated(table, source)
        return RawEvents(table, "us" if dates or temporal else source.time_unit)

    def _parquet_scan(self, source: Source, first: int, files: int, schema: pa.Schema) -> str:
        """A query of some files' events. Columns go by position: names may clash with each other or with DuckDB's."""
        chosen = {role: f"c{schema.names.index(column)}" for role, column in source.columns.used().items()}
        if source.by_file:
            narrow = [
                role for role, column in source.columns.used().items() if parquet.is_narrow(schema.field(column).type)
            ]
            chosen |= {role: f"{chosen[role]}::BIGINT" for role in narrow}
        kind = schema.field(source.columns.time).type
        if source.time_format:
            chosen["time"] = f"{chosen['time']}::VARCHAR"
        elif pa.types.is_temporal(kind):
            # epoch_us rounds nanoseconds, Spark truncates them; neither may depend on the engine.
            nanos = pa.types.is_timestamp(kind) and kind.unit == "ns"
            chosen["time"] = f"epoch_ns({chosen['time']}) // 1000" if nanos else f"epoch_us({chosen['time']})"
        columns = ", ".join(f"{expression} AS {role}" for role, expression in chosen.items())
        return (
            f"SELECT {columns}, ((scan.file_index::BIGINT + {first}) << {ROW_BITS}) + scan.file_row_number AS place "
            f"FROM read_parquet({_listed(source.files[first : first + files])}, hive_partitioning = false) "
            f"AS scan({', '.join(f'c{place}' for place in range(len(schema.names)))})"
        )

    def _read_text(self, source: Source) -> RawEvents:
        """Load text files into a table: its row numbers are the rows' order, which a CSV scan alone does not give."""
        check_text(source)
        self._run("SET preserve_insertion_order = true")
        name = f"text_{next(self._numbers)}"
        scan, chosen = self._csv_scan(source) if source.kind == "csv" else self._json_scan(source)
        columns = ", ".join(f"scan.{column} AS {role}" for role, column in chosen.items())
        self._run(f"CREATE TABLE {name} AS SELECT {columns}, scan.file_index AS file FROM {scan}")
        rejected = self._rejected(source) if source.kind == "csv" else []
        first = f"(SELECT file, min(rowid) AS first FROM {name} GROUP BY file)"
        table = self._connection.sql(
            "SELECT t.* EXCLUDE (file), "
            f"(t.file::BIGINT << {ROW_BITS}) + t.rowid - f.first AS place FROM {name} t JOIN {first} f USING (file)"
        )
        if source.time_unit == "iso":
            return RawEvents(_dated(table, source), "us", rejected, renumber=True)
        return RawEvents(table, source.time_unit, rejected, renumber=True)

    def _csv_scan(self, source: Source) -> tuple[str, dict[str, str]]:
        """A scan of CSV files, and its column of each role. Columns go by position, as in `_parquet_scan`."""
        fields = ", ".join(f"c{place}: 'VARCHAR'" for place in range(len(source.fields)))
        scan = (
            f"read_csv({_listed(source.files)}, auto_detect = false, header = {source.header}, columns = {{{fields}}}, "
            f"delim = {_quoted(source.delimiter)}, quote = {_quoted(source.quote)}, escape = {_quoted(source.quote)}, "
            f"compression = '{_compression(source.files)}', hive_partitioning = false, store_rejects = true) AS scan"
        )
        return scan, {role: f"c{source.fields.index(column)}" for role, column in source.columns.used().items()}

    def _json_scan(self, source: Source) -> tuple[str, dict[str, str]]:
        """A scan of JSON lines, and its column of each role. A line that is no JSON becomes a row of nulls."""
        names = list(dict.fromkeys(source.columns.used().values()))
        fields = ", ".join(f"{_quoted(name)}: 'VARCHAR'" for name in names)
        scan = (
            f"read_json({_listed(source.files)}, format = 'newline_delimited', records = true, columns = {{{fields}}}, "
            f"compression = '{_compression(source.files, plain='uncompressed')}', hive_partitioning = false, "
            "ignore_errors = true) "
            f"AS scan({', '.join(f'c{place}' for place in range(len(names)))})"
        )
        return scan, {role: f"c{names.index(column)}" for role, column in source.columns.used().items()}

    def _rejected(self, source: Source) -> list[BadRow]:
        rows = self._run(
            "SELECT DISTINCT file_path, line FROM reject_errors JOIN reject_scans USING (scan_id, file_id) "
            "ORDER BY file_path, line"
        ).fetchall()
        labels = dict(zip(map(str, source.files), source.labels, strict=True))
        return [BadRow(labels[path], line, UNREADABLE) for path, line in rows]

    def _run(self, sql: str) -> duckdb.DuckDBPyConnection:
        return self._connection.raw_sql(sql)


@ibis.udf.scalar.builtin(signature=((dt.Timestamp(timezone="UTC"),), dt.int64))
def epoch_us(moment):  # type: ignore[no-untyped-def]
    """DuckDB's own function."""


def _dated(table: ir.Table, source: Source) -> ir.Table:
    """The table with `time` in microseconds, and its text as `written`."""
    time = microseconds(table.time, source.time_format, "\\", lambda iso: epoch_us(iso.try_cast("timestamp('UTC')")))
    return table.mutate(written=table.time, time=time)


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _compression(files: tuple[Path, ...], plain: str = "none") -> str:
    """Said, not left to DuckDB, which takes what follows a ? in a file's name for a query and misses its ending.

    plain: what the reader calls files that are not compressed.
    """
    found = {_COMPRESSIONS.get(file.suffix.lower(), plain) for file in files}
    return found.pop() if len(found) == 1 else "auto_detect"


def _listed(files: tuple[Path, ...]) -> str:
    """The files as a list that DuckDB takes literally: a glob's characters stand for themselves in brackets."""
    return "[" + ", ".join(_quoted(re.sub(r"([*?\[])", r"[\1]", str(file))) for file in files) + "]"
