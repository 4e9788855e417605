"""Choose an engine, start it and stop it. Each engine is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trope.data.engines.base import Engine
from trope.data.sources.description import Source

ENGINES = ("duckdb", "spark")


@contextmanager
def open_engine(
    name: str, source: Source, work: Path, threads: int | None, memory: str | None, master: str | None
) -> Iterator[Engine]:
    """Start the engine for a source, and stop it when the block ends.

    name: `duckdb` or `spark`. A source that is a table is read by its own database.
    work: a folder on the output's disk, for tables that do not fit in memory.
    threads, memory: limits of DuckDB. master: a Spark master URL.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; choose one of {', '.join(ENGINES)}")
    if master is not None and name != "spark":
        raise ValueError(f"--master {master} is for --engine spark, not {name}")
    for flag, value in (("--threads", threads), ("--memory", memory)):
        if value is not None and (name != "duckdb" or source.kind == "table"):
            reader = "the table's own database" if source.kind == "table" else name
            raise ValueError(
                f"{flag} {value} is a limit of --engine duckdb, and {reader} reads {source.name}; leave it out"
            )
    if source.kind == "table":
        from trope.data.engines.warehouse import Warehouse

        yield Warehouse(source.url)
    elif name == "duckdb":
        from trope.data.engines.duckdb import DuckDB

        duckdb = DuckDB(work, threads, memory)
        try:
            yield duckdb
        except RuntimeError as error:
            # Ctrl-C in the middle of a query: DuckDB stops it and raises this.
            if "Query interrupted" in str(error):
                raise KeyboardInterrupt from None
            raise
        finally:
            duckdb.close()
    else:
        try:
            from trope.data.engines.spark import Spark
        except ImportError:
            raise ValueError("--engine spark needs pyspark and Java 17; install trope[spark]") from None
        spark = Spark(master, work)
        try:
            try:
                yield spark
            finally:
                spark.close()
        except Exception as error:
            # Ctrl-C in the middle of a call to Java: the calls that clean up after it may fail, and hide it.
            if _was_interrupted(error):
                raise KeyboardInterrupt from None
            raise


def _was_interrupted(error: BaseException) -> bool:
    """Whether an error was raised while a Ctrl-C was handled."""
    earlier = error.__context__
    return earlier is not None and (isinstance(earlier, KeyboardInterrupt) or _was_interrupted(earlier))
