"""Spark, for logs that outgrow one machine: the same expressions, a different read step."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from trope.data.engines.base import ROW_BITS, UNREADABLE, BadRow, RawEvents
from trope.data.sources.description import Lookup, Source

_BROKEN = "_broken"


class Spark:
    """A Spark session, the running one if there is one.

    master: a master URL; None leaves it to Spark's own configuration, which is this machine's cores by default.
    work: a folder for what a session of our own spills.
    """

    def __init__(self, master: str | None, work: Path) -> None:
        builder = SparkSession.builder.appName("trope prepare")
        self._own = SparkSession.getActiveSession() is None
        if self._own:
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
            .config("spark.sql.execution.arrow.pyspark.enabled", "true")
            .getOrCreate()
        )
        if self._own and str(self._session.sparkContext.master).startswith("local"):
            # 200 tasks a shuffle, Spark's default, is made for a cluster.
            self._session.conf.set("spark.sql.shuffle.partitions", "8")
        self._connection = ibis.pyspark.connect(self._session)
        self.label = f"spark {pyspark.__version__}"

    def close(self) -> None:
        if self._own:
            self._session.stop()

    def errors(self) -> tuple[type[Exception], ...]:
        return (PySparkException, Py4JError)

    def share_done(self) -> float | None:
        return None

    def keep(self, table: ir.Table) -> ir.Table:
        kept = table.cache()
        kept.count().to_pyarrow()  # Spark caches when first asked
        return kept

    def read(self, source: Source) -> RawEvents:
        return self._read_parquet(source) if source.kind == "parquet" else self._read_text(source)

    def read_lookup(self, lookup: Lookup) -> ir.Table:
        return self._table(self._session.read.parquet(str(lookup.path)))

    def _read_parquet(self, source: Source) -> RawEvents:
        frame = self._session.read.parquet(*map(str, source.files))
        kind = pq.read_schema(source.files[0]).field(source.columns.time).type
        chosen = {role: F.col(f"`{column}`") for role, column in source.columns.used().items()}
        iso = source.time_unit == "iso" and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
        if iso:
            chosen["written"], chosen["time"] = chosen["time"], _date_of(source.columns.time)
        elif pa.types.is_timestamp(kind) and kind.unit == "ns":
            chosen["time"] = F.expr(f"`{source.columns.time}` div 1000")
        elif pa.types.is_temporal(kind):
            chosen["time"] = F.unix_micros(chosen["time"].cast("timestamp"))
        files = self._file_numbers(frame.select(F.col("_metadata.file_path").alias("path")).distinct(), source)
        frame = frame.select(
            *(column.alias(role) for role, column in chosen.items()),
            F.col("_metadata.file_path").alias("path"),
            F.col("_metadata.row_index").alias("row"),
        ).join(F.broadcast(files), "path")
        frame = frame.withColumn("place", _place(F.col("file"), F.col("row"))).drop("path", "file", "row")
        return RawEvents(self._table(frame), "us" if iso or pa.types.is_temporal(kind) else source.time_unit)

    def _read_text(self, source: Source) -> RawEvents:
        frame = self._csv(source) if source.kind == "csv" else self._json(source)
        frame = frame.select(
            "*",
            F.col("_metadata.file_path").alias("path"),
            F.col("_metadata.file_block_start").alias("block"),
            F.monotonically_increasing_id().alias("id"),
        ).persist(StorageLevel.MEMORY_AND_DISK)
        frame = frame.join(F.broadcast(self._blocks(frame, source)), ["path", "block"])
        frame = frame.withColumn("place", _place(F.col("file"), F.col("id") - F.col("first")))
        rejected = self._rejected(frame, source) if source.kind == "csv" else []
        iso = source.time_unit == "iso"
        chosen = {role: F.col(f"`{column}`") for role, column in source.columns.used().items()}
        if iso:
            chosen["written"], chosen["time"] = chosen["time"], _date_of(source.columns.time)
        if source.kind == "csv":
            frame = frame.filter(F.col(_BROKEN).isNull())
        table = self._table(frame.select(*(column.alias(role) for role, column in chosen.items()), "place"))
        return RawEvents(table, "us" if iso else source.time_unit, rejected)

    def _csv(self, source: Source) -> DataFrame:
        schema = ", ".join(f"`{field}` string" for field in (*source.fields, _BROKEN))
        options: dict[str, bool | str] = {
            "header": source.header,
            "sep": source.delimiter,
            "quote": source.quote,
            "escape": source.quote,
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _BROKEN,
            "enforceSchema": True,
        }
        return self._session.read.options(**options).schema(schema).csv([str(file) for file in source.files])

    def _json(self, source: Source) -> DataFrame:
        schema = ", ".join(f"`{column}` string" for column in source.columns.used().values())
        return self._session.read.schema(schema).json([str(file) for file in source.files])

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
        return [
            BadRow(source.files[row.file].name, row.row + 1 + source.header_lines, UNREADABLE)
            for row in rows.orderBy("file", "row").collect()
        ]

    def _table(self, frame: DataFrame) -> ir.Table:
        name = ibis.util.gen_name("trope")
        frame.createOrReplaceTempView(name)
        return self._connection.table(name)


def _date_of(column: str) -> Column:
    return F.unix_micros(F.expr(f"try_cast(`{column}` as timestamp)"))


def _place(file: Column, row: Column) -> Column:
    return F.shiftleft(file.cast("bigint"), ROW_BITS) + row
