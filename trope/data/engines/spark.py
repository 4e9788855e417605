"""Spark, for logs that outgrow one machine: the same expressions, a different read step."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir
import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ByteType, IntegerType, LongType, ShortType, StringType, StructField, StructType
from pyspark.storagelevel import StorageLevel

from trope.data.dates import microseconds
from trope.data.engines.base import ROW_BITS, UNREADABLE, BadRow, RawEvents
from trope.data.engines.shard_tables import ShardWriter
from trope.data.sources import parquet
from trope.data.sources.description import Lookup, Source
from trope.data.sources.text import check_text

_BROKEN = "_broken"

# The loggers that py4j writes to, the root among them; a filter concerns only what is logged at its own logger.
_PY4J_LOGGERS = (None, "py4j.java_gateway", "py4j.clientserver")


class Spark:
    """A Spark session, the running one if there is one.

    master: a master URL; None leaves it to Spark's own configuration, which is this machine's cores by default.
    work: a folder for what a session of our own spills.
    """

    def __init__(self, master: str | None, work: Path) -> None:
        builder = SparkSession.builder.appName("trope prepare")
        self._own = SparkSession.getActiveSession() is None
        before = signal.getsignal(signal.SIGINT)
        if self._own:
            for name in _PY4J_LOGGERS:
                logging.getLogger(name).addFilter(_is_not_py4j)
            builder = builder.config("spark.local.dir", str(work / "spill"))
            # The warehouse folder is never used, but Spark makes it where it is told.
            builder = builder.config("spark.sql.warehouse.dir", str(work / "warehouse"))
            builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
        if master is not None:
            builder = builder.master(master)
        self._session = (
            builder.config("spark.sql.session.timeZone", "UTC")
            # Times of day without a zone are UTC on every engine; nanoseconds are otherwise unreadable.
            .config("spark.sql.parquet.inferTimestampNTZ.enabled", "true")
            .config("spark.sql.legacy.parquet.nanosAsLong", "true")
            # As Parquet has it: columns may differ only in case.
            .config("spark.sql.caseSensitive", "true")
            .config("spark.sql.execution.arrow.pyspark.enabled", "true")
            .getOrCreate()
        )
        if self._own and str(self._session.sparkContext.master).startswith("local"):
            # 200 tasks a shuffle, Spark's default, is made for a cluster.
            self._session.conf.set("spark.sql.shuffle.partitions", "8")
        if "PYSPARK_PYTHON" not in os.environ and str(self._session.sparkContext.master).startswith("local"):
            # The workers on this machine need what this process has; Spark would start the `python3` of the PATH.
            self._session.sparkContext.pythonExec = sys.executable
        if self._own and threading.current_thread() is threading.main_thread():
            # Spark's handler of Ctrl-C calls Java in the middle of another call, which fails.
            signal.signal(signal.SIGINT, before)
        self._connection = ibis.pyspark.connect(self._session)
        self.label = f"spark {pyspark.__version__}"

    def close(self) -> None:
        if not self._own:
            return
        try:
            self._stop()
        except Py4JNetworkError:
            # After Ctrl-C py4j lets Java close the call's connection, and now and then the next one too.
            self._stop()
        for name in _PY4J_LOGGERS:
            logging.getLogger(name).removeFilter(_is_not_py4j)

    def _stop(self) -> None:
        self._session.sparkContext.setLogLevel("OFF")  # tasks that Ctrl-C ends die noisily
        self._session.stop()

    def errors(self) -> tuple[type[Exception], ...]:
        return (PySparkException, Py4JError, MemoryError)

    def share_done(self) -> float | None:
        return None

    def keep(self, table: ir.Table) -> ir.Table:
        kept = table.cache()
        kept.count().to_pyarrow()  # Spark caches when first asked
        return kept

    def each_shard(
        self, users: ir.Table, events: ir.Table, shard_users: int, write: ShardWriter
    ) -> Iterator[dict[str, Any]]:
        """The executors write: they need this package, and a folder that they and the driver see under one name."""

        def task(key: tuple[pa.Scalar, ...], who: pa.Table, rows: pa.Table) -> pa.Table:
            number = int(key[0].as_py())
            return pa.table({"found": [json.dumps(write(number, who.drop(["shard"]), rows.drop(["shard"])))]})

        who, rows = (
            self._frame(table).withColumn("shard", F.floor(F.col(user) / shard_users))
            for table, user in ((users, "user_id"), (events, "user"))
        )
        written = who.groupBy("shard").cogroup(rows.groupBy("shard")).applyInArrow(task, "found string")
        for row in written.collect():
            yield json.loads(row.found)

    def settle(self, source: Source) -> Source:
        return source

    def read(self, source: Source) -> RawEvents:
        hidden = [file.name for file in source.files if file.name.startswith(("_", "."))]
        if hidden:
            raise ValueError(
                f"Spark leaves out files whose names begin with _ or a dot: rename {hidden[0]}, or use --engine duckdb"
            )
        return self._read_parquet(source) if source.kind == "parquet" else self._read_text(source)

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        return self._table(self._reader().parquet(str(lookup.path)))

    def scan(self, files: tuple[Path, ...], columns: tuple[str, ...]) -> ir.Table:
        return self._table(self._reader().parquet(*map(str, files)).select(*map(_column, columns)))

    def _read_parquet(self, source: Source) -> RawEvents:
        schema = self._reader().parquet(str(source.files[0])).schema
        used = source.columns.used()
        if source.by_file:  # integers of several widths: all fit into the widest
            narrow = (ByteType, ShortType, IntegerType)
            schema = StructType(
                [StructField(f.name, LongType()) if isinstance(f.dataType, narrow) else f for f in schema]
            )
        schema = StructType([schema[column] for column in dict.fromkeys(used.values())])
        frame = self._reader().schema(schema).parquet(*map(str, source.files))
        kind = parquet.schema(source.files[0]).field(source.columns.time).type
        chosen = {role: _column(column) for role, column in used.items()}
        dates = source.time_unit == "iso" and (parquet.is_text(kind) or bool(source.time_format))
        if source.time_format:
            chosen["time"] = chosen["time"].cast("string")
        elif pa.types.is_timestamp(kind) and kind.unit == "ns":
            chosen["time"] = F.expr(f"{_identifier(source.columns.time)} div 1000")
        elif pa.types.is_temporal(kind):
            chosen["time"] = F.unix_micros(chosen["time"].cast("timestamp"))
        metadata = frame.metadataColumn("_metadata")
        files = self._file_numbers(frame.select(metadata["file_path"].alias("path")).distinct(), source)
        frame = frame.select(
            *(column.alias(role) for role, column in chosen.items()),
            metadata["file_path"].alias("path"),
            metadata["row_index"].alias("row"),
        ).join(F.broadcast(files), "path")
        frame = frame.withColumn("place", _place(F.col("file"), F.col("row"))).drop("path", "file", "row")
        table = _dated(self._table(frame), source) if dates else self._table(frame)
        temporal = pa.types.is_temporal(kind) and not source.time_format
        return RawEvents(table, "us" if dates or temporal else source.time_unit)

    def _read_text(self, source: Source) -> RawEvents:
        multiline = check_text(source, strict=True)
        frame, used = self._csv(source, multiline) if source.kind == "csv" else self._json(source)
        metadata = frame.metadataColumn("_metadata")
        frame = frame.select(
            "*",
            metadata["file_path"].alias("path"),
            metadata["file_block_start"].alias("block"),
            F.monotonically_increasing_id().alias("id"),
        ).persist(StorageLevel.MEMORY_AND_DISK)
        frame = frame.join(F.broadcast(self._blocks(frame, source)), ["path", "block"])
        frame = frame.withColumn("place", _place(F.col("file"), F.col("id") - F.col("first")))
        rejected = self._rejected(frame, source) if source.kind == "csv" else []
        if source.kind == "csv":
            frame = frame.filter(F.col(_BROKEN).isNull())
        table = self._table(frame.select(*(F.col(column).alias(role) for role, column in used.items()), "place"))
        if source.time_unit == "iso":
            return RawEvents(_dated(table, source), "us", rejected)
        return RawEvents(table, source.time_unit, rejected)

    def _csv(self, source: Source, multiline: bool) -> tuple[DataFrame, dict[str, str]]:
        """The rows of CSV files, and the column of each role. Columns go by position: names may clash with ours."""
        schema = ", ".join(f"{field} string" for field in (*(f"c{n}" for n in range(len(source.fields))), _BROKEN))
        options: dict[str, bool | str] = {
            "header": source.header,
            "sep": source.delimiter,
            "quote": source.quote,
            "escape": source.quote,
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _BROKEN,
            "enforceSchema": True,
            "multiLine": multiline,
        }
        frame = self._reader().options(**options).schema(schema).csv([str(file) for file in source.files])
        return frame, {role: f"c{source.fields.index(column)}" for role, column in source.columns.used().items()}

    def _json(self, source: Source) -> tuple[DataFrame, dict[str, str]]:
        names = list(dict.fromkeys(source.columns.used().values()))
        schema = StructType([StructField(name, StringType()) for name in names])
        frame = (
            self._reader().option("allowSingleQuotes", False).schema(schema).json([str(file) for file in source.files])
        )
        frame = frame.toDF(*(f"c{place}" for place in range(len(names))))
        return frame, {role: f"c{names.index(column)}" for role, column in source.columns.used().items()}

    def _reader(self) -> DataFrameReader:
        """A reader that takes paths literally: no glob, no columns from folder names."""
        # The first option holds where the paths are checked. The second avoids a listing that expands globs again.
        return self._session.read.option("__globPaths__", "false").option("recursiveFileLookup", "true")

    def _blocks(self, frame: DataFrame, source: Source) -> DataFrame:
        """For every block of every file, the id that row 0 of that file would have had in it.

        Ids rise by one through a block, but blocks are dealt to tasks by size: counting the rows of the blocks before
        gives every row its number in its file, however the files were cut.
        """
        counted = frame.groupBy("path", "block").agg(F.count("*").alias("rows"), F.min("id").alias("low")).collect()
        firsts: list[tuple[str, int, int]] = []
        before: dict[str, int] = {}
        for block in sorted(counted, key=lambda block: (block.path, block.block)):
            firsts.append((block.path, block.block, block.low - before.get(block.path, 0)))
            before[block.path] = before.get(block.path, 0) + block.rows
        blocks = self._session.createDataFrame(firsts, "path string, block bigint, first bigint")
        return blocks.join(self._file_numbers(blocks.select("path").distinct(), source), "path")

    def _file_numbers(self, paths: DataFrame, source: Source) -> DataFrame:
        numbers = {str(file): place for place, file in enumerate(source.files)}
        rows = [(row.path, numbers[unquote(urlsplit(row.path).path)]) for row in paths.collect()]
        return self._session.createDataFrame(rows, "path string, file int")

    def _rejected(self, frame: DataFrame, source: Source) -> list[BadRow]:
        rows = frame.filter(F.col(_BROKEN).isNotNull()).select("file", (F.col("id") - F.col("first")).alias("row"))
        labels = source.labels
        return [
            BadRow(labels[row.file], row.row + 1 + source.header_lines, UNREADABLE)
            for row in rows.orderBy("file", "row").collect()
        ]

    def _frame(self, table: ir.Table) -> DataFrame:
        return self._session.sql(self._connection.compile(table))

    def _table(self, frame: DataFrame) -> ir.Table:
        name = ibis.util.gen_name("trope")
        frame.createOrReplaceTempView(name)
        return self._connection.table(name)


@ibis.udf.scalar.builtin(signature=((dt.Timestamp(timezone="UTC"),), dt.int64))
def unix_micros(moment):  # type: ignore[no-untyped-def]
    """Spark's own function."""


def _dated(table: ir.Table, source: Source) -> ir.Table:
    """The table with `time` in microseconds, and its text as `written`."""
    time = microseconds(table.time, source.time_format, "$", lambda iso: unix_micros(iso.try_cast("timestamp('UTC')")))
    return table.mutate(written=table.time, time=time)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """Whether a message is not py4j's, which logs a traceback for every Ctrl-C."""
    return not record.name.startswith("py4j") and "py4j" not in Path(record.pathname).parts


def _identifier(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _column(name: str) -> Column:
    return F.col(_identifier(name))


def _place(file: Column, row: Column) -> Column:
    return F.shiftleft(file.cast("bigint"), ROW_BITS) + row
