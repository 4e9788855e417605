"""Spark in local mode gives the same bytes as DuckDB. Run by `make test-spark`: it needs pyspark and Java 17."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, array_hashes, loose, prepared, random_log, write_csv, write_parquet
from test_data_sources import grocery, ml_1m, recbole

from trope.data.folder import read_meta
from trope.data.prepare import Options
from trope.data.protocols import Protocol

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One session for all tests. Blocks of 2 kB cut even a small CSV into many tasks, dealt out of order."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.files.maxPartitionBytes", "2048")
        .config("spark.sql.files.openCostInBytes", "0")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield
    session.stop()


def both(source: Path | str, folder: Path, options: Options | None = None, **settings: object) -> None:
    """Both engines write the same arrays and the same `meta.json`, but for the engine's name."""
    duckdb = prepared(source, folder / "duckdb", options, **settings)
    spark = prepared(source, folder / "spark", options, engine="spark", **settings)
    assert array_hashes(spark) == array_hashes(duckdb)
    assert spark.meta["checksum"] == duckdb.meta["checksum"]
    assert spark.meta["dropped"] == duckdb.meta["dropped"]
    assert spark.meta["made_by"]["engine"].startswith("spark")


@pytest.mark.parametrize("protocol", ["loo-strict", "holdout"])
def test_parquet_files_with_ties(tmp_path: Path, protocol: str) -> None:
    rows = random_log(3_000, users=120, items=70, spread=400_000)
    tied = [(user, item, time // 1_000 * 1_000) for user, item, time in rows]
    folder = tmp_path / "log"
    folder.mkdir()
    for part, first in enumerate(range(0, 3_000, 700)):
        write_parquet(folder / f"part {part}%.parquet", tied[first : first + 700])
    both(folder, tmp_path, Options(protocol=Protocol(protocol)))


def test_csv_in_many_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    rows = random_log(4_000, users=60, items=40, spread=30)
    for part, (first, last) in enumerate(((0, 300), (300, 3_500), (3_500, 4_000))):
        write_csv(folder / f"{part}.csv", rows[first:last])
    both(folder, tmp_path, Options())


def test_text_ids_and_gzip(tmp_path: Path) -> None:
    rows = [(f"ü{user}", f"{item:03}", time) for user, item, time in random_log(500, spread=60)]
    log = write_csv(tmp_path / "log.csv", rows)
    with log.open("rb") as plain, gzip.open(tmp_path / "log.csv.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    both(tmp_path / "log.csv.gz", tmp_path)


def test_fractions_and_dates_as_text(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "user,item,timestamp\n" + "".join(f"1,{n},{START + n}.{n}\n" for n in range(9)) + f"1,7,{START}e0\n"
    )
    both(tmp_path / "log.csv", tmp_path)
    (tmp_path / "iso.csv").write_text(
        "user,item,timestamp\n1,1,2020-09-13T14:26:42+02:00\n1,2,2020-09-13 12:26:40\n1,3,2020-09-13\n"
    )
    (tmp_path / "iso").mkdir()
    both(tmp_path / "iso.csv", tmp_path / "iso", time_unit="iso")
    dates = ["2020-09-13T14:26:42+02:00", "2020-09-13 12:26:40", "2020-09-13", "soon", None]
    pq.write_table(pa.table({"user": [1] * 5, "item": range(5), "timestamp": dates}), tmp_path / "iso.parquet")
    (tmp_path / "parquet").mkdir()
    both(tmp_path / "iso.parquet", tmp_path / "parquet", loose(on_bad="skip"), time_unit="iso")


def test_times_of_another_kind_are_recognised(tmp_path: Path) -> None:
    numbers = write_csv(tmp_path / "numbers.csv", random_log(20))
    dates = write_csv(tmp_path / "dates.csv", [(1, n, f"2020-09-{n:02}") for n in range(1, 9)])
    for log, unit, said in ((numbers, "iso", "--time-unit s"), (dates, "s", "--time-unit iso")):
        with pytest.raises(ValueError, match=f"The times look like .*: pass {said}"):
            prepared(log, tmp_path / "out", engine="spark", time_unit=unit)


def test_bad_rows_are_counted_and_located_alike(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", random_log(200, users=4))
    lines = log.read_text().splitlines()
    lines[50], lines[90], lines[120], lines[150] = "1,2", "1,2,3,4", "1,2,soon", ",2,1600000000"
    log.write_text("\n".join(lines) + "\n")
    both(log, tmp_path, loose(on_bad="skip"))
    assert [row["row"] for row in read_meta(tmp_path / "spark")["bad_rows"]["first"]] == [51, 91, 121, 151]


def test_timestamp_columns(tmp_path: Path) -> None:
    for unit, ticks in (("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        times = pa.array([(START + n // 3) * ticks + ticks - 1 - n for n in range(30)], pa.timestamp(unit))
        log = {"user": [1, 2] * 15, "item": range(30), "timestamp": times}
        folder = tmp_path / unit
        folder.mkdir()
        pq.write_table(pa.table(log), folder / "log.parquet")
        both(folder / "log.parquet", folder)


def test_named_sources(tmp_path: Path) -> None:
    options = loose(protocol=Protocol("loo-paper"))
    for name, write in (("ml-1m", ml_1m), ("recbole:ml-100k", recbole)):
        folder = tmp_path / name
        (folder / "raw").mkdir(parents=True)
        write(folder / "raw")
        both(name, folder, options, raw=folder / "raw")
    raw = grocery(tmp_path)
    for level in ("product", "type"):
        (tmp_path / level).mkdir()
        both("complete-journey", tmp_path / level, options, raw=raw, level=level)


def test_json_lines(tmp_path: Path) -> None:
    lines = [f'{{"user": {u}, "item": "{i}", "timestamp": {t}}}' for u, i, t in random_log(300, spread=20)]
    lines[7] = '{"user": 1, oops'
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    both(tmp_path / "log.jsonl", tmp_path, loose(on_bad="skip"))
