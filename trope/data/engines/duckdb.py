"""DuckDB, the embedded default: out of core, no server, all cores.

Intermediate tables live in a database file in the work folder, where DuckDB compresses them.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from trope.data.engines.base import ROW_BITS, UNREADABLE, BadRow, RawEvents, no_space
from trope.data.sources.description import Lookup, Source

# Most of a laptop's 8 GB; the process needs some beside DuckDB's own limit.
_MEMORY = "5GB"


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
            raise ValueError(f"DuckDB refused --threads {threads} or --memory {memory}: {error}") from None

    def close(self) -> None:
        self._connection.disconnect()

    def errors(self) -> tuple[type[Exception], ...]:
        return (duckdb.Error,)

    def share_done(self) -> float | None:
        percent = self._connection.con.query_progress()
        return percent / 100 if percent >= 0 else None

    def keep(self, table: ir.Table) -> ir.Table:
        # Row order is carried by `place`, so DuckDB need not preserve it, which saves memory.
        self._run("SET preserve_insertion_order = false")
        return self._connection.create_table(f"kept_{next(self._numbers)}", table)

    def read(self, source: Source) -> RawEvents:
        return self._read_parquet(source) if source.kind == "parquet" else self._read_text(source)

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        return self._connection.read_parquet(lookup.path)

    def _read_parquet(self, source: Source) -> RawEvents:
        time = _identifier(source.columns.time)
        kind = pq.read_schema(source.files[0]).field(source.columns.time).type
        iso = source.time_unit == "iso" and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        chosen = {role: _identifier(column) for role, column in source.columns.used().items()}
        if iso:
            chosen["written"], time = time, _date_of(time)
        elif pa.types.is_temporal(kind):
            # epoch_us rounds nanoseconds, Spark truncates them; neither may depend on the engine.
            nanos = pa.types.is_timestamp(kind) and kind.unit == "ns"
            time = f"epoch_ns({time}) // 1000" if nanos else f"epoch_us({time})"
        chosen["time"] = time
        columns = ", ".join(f"{expression} AS {role}" for role, expression in chosen.items())
        table = self._connection.sql(
            f"SELECT {columns}, (file_index::BIGINT << {ROW_BITS}) + file_row_number AS place "
            f"FROM read_parquet({_listed(source)})"
        )
        return RawEvents(table, "us" if iso or pa.types.is_temporal(kind) else source.time_unit)

    def _read_text(self, source: Source) -> RawEvents:
        """Load text files into a table: its row numbers are the rows' order, which a CSV scan alone does not give."""
        self._run("SET preserve_insertion_order = true")
        name = f"text_{next(self._numbers)}"
        scan = self._csv_scan(source) if source.kind == "csv" else self._json_scan(source)
        columns = ", ".join(f"{_identifier(c)} AS {role}" for role, c in source.columns.used().items())
        self._run(f"CREATE TABLE {name} AS SELECT {columns}, file_index AS file FROM {scan}")
        rejected = self._rejected() if source.kind == "csv" else []
        iso = source.time_unit == "iso"
        replaced = f"REPLACE ({_date_of('time')} AS time), time AS written" if iso else ""
        first = f"(SELECT file, min(rowid) AS first FROM {name} GROUP BY file)"
        table = self._connection.sql(
            f"SELECT t.* EXCLUDE (file) {replaced}, "
            f"(t.file::BIGINT << {ROW_BITS}) + t.rowid - f.first AS place FROM {name} t JOIN {first} f USING (file)"
        )
        return RawEvents(table, "us" if iso else source.time_unit, rejected, renumber=True)

    def _csv_scan(self, source: Source) -> str:
        fields = ", ".join(f"{_quoted(field)}: 'VARCHAR'" for field in source.fields)
        return (
            f"read_csv({_listed(source)}, auto_detect = false, header = {source.header}, columns = {{{fields}}}, "
            f"delim = {_quoted(source.delimiter)}, quote = {_quoted(source.quote)}, escape = {_quoted(source.quote)}, "
            "store_rejects = true)"
        )

    def _json_scan(self, source: Source) -> str:
        # A line that is no JSON becomes a row of nulls, which validation reports.
        fields = ", ".join(f"{_quoted(column)}: 'VARCHAR'" for column in source.columns.used().values())
        return (
            f"read_json({_listed(source)}, format = 'newline_delimited', columns = {{{fields}}}, ignore_errors = true)"
        )

    def _rejected(self) -> list[BadRow]:
        rows = self._run(
            "SELECT DISTINCT file_path, line FROM reject_errors JOIN reject_scans USING (scan_id, file_id) "
            "ORDER BY file_path, line"
        ).fetchall()
        return [BadRow(Path(path).name, line, UNREADABLE) for path, line in rows]

    def _run(self, sql: str) -> duckdb.DuckDBPyConnection:
        return self._connection.raw_sql(sql)


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _date_of(text: str) -> str:
    return f"epoch_us(TRY_CAST({text} AS TIMESTAMPTZ))"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _listed(source: Source) -> str:
    return "[" + ", ".join(_quoted(file) for file in source.files) + "]"
