"""Spark in local mode gives the same bytes as DuckDB. Run by `make test-spark`: it needs pyspark and Java 17."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, array_hashes, loose, prepared, random_log, write_csv, write_parquet
from test_data_hostile import FORMATS
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


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def both_refuse(source: Path | str, folder: Path, message: str, **settings: object) -> None:
    for engine in ("duckdb", "spark"):
        for on_bad in ("fail", "skip"):
            with pytest.raises((ValueError, OSError), match=message):
                prepared(source, folder / "refused", loose(on_bad=on_bad), engine=engine, **settings)


MANY = "user,item,timestamp\n" + "".join(f"{n % 9},{n % 7},{START + n // 5}\n" for n in range(2_000))


def test_hostile_files_are_refused_by_both(tmp_path: Path) -> None:
    both_refuse(text(tmp_path / "half.csv.gz", gzip.compress(MANY.encode())[:-20]), tmp_path, "truncated")
    both_refuse(text(tmp_path / "quote.csv", MANY + f'1,"2,3\n1,2,{START}\n'), tmp_path, "quote in line 2,002 is never")
    both_refuse(text(tmp_path / "long.csv", MANY + f"1,{'x' * 2_000_000},{START}\n"), tmp_path, "line 2,002 is longer")
    both_refuse(text(tmp_path / "ends.csv", MANY + f"1,2,{START}\r\n"), tmp_path, "mixes line ends")
    both_refuse(text(tmp_path / "cr.csv", MANY.replace("\n", "\r")), tmp_path, "carriage returns alone")
    both_refuse(text(tmp_path / "cut.jsonl", '{"user": 1}\n{"user":\n{"user": 1}\n'), tmp_path, "line 2 breaks off")
    (tmp_path / "mixed").mkdir()
    write_parquet(tmp_path / "mixed" / "a.parquet", [(1, 2, START)] * 3)
    write_parquet(tmp_path / "mixed" / "b.parquet", [(1.5, 2, START)] * 3)  # type: ignore[list-item]
    both_refuse(tmp_path / "mixed", tmp_path, "must agree")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MANY.encode() + b"\xff,2,1600000000\n", "line 2,002 is not UTF-8"),
        (MANY.encode() + b"  \n1,2,1600000000\n", "line 2,002 holds only spaces"),
        (MANY.encode() + b'1, "2",1600000000\n', "line 2,002 has spaces before a quote"),
    ],
)
def test_what_spark_alone_misreads_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    log = text(tmp_path / "log.csv", content)
    with pytest.raises(ValueError, match=f"{message}, which Spark reads differently; .*--engine duckdb"):
        prepared(log, tmp_path / "out", loose(on_bad="skip"), engine="spark")
    with pytest.raises(ValueError, match="names begin with _"):
        prepared(text(tmp_path / "_log.csv", MANY), tmp_path / "out", engine="spark")
    row = f'{{"user": 1, "item": 2, "timestamp": {START}}}'
    with pytest.raises(ValueError, match="line 3 is an array, which Spark reads differently"):
        prepared(text(tmp_path / "log.jsonl", f"{row}\n{row}\n [{row}]\n"), tmp_path / "out", engine="spark")


def test_json_in_single_quotes_is_a_bad_row(tmp_path: Path) -> None:
    row = f'{{"user": 1, "item": 2, "timestamp": {START}}}\n'
    log = text(tmp_path / "log.jsonl", row * 3 + row.replace('"', "'") + row)
    both(log, tmp_path, loose(on_bad="skip"))
    assert read_meta(tmp_path / "spark")["bad_rows"]["count"] == 1


# A session of its own, since Spark sets its handler of Ctrl-C when one starts.
_INTERRUPTED = """
import logging, os, signal, sys, threading
from py4j.protocol import Py4JNetworkError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from pathlib import Path
from trope.data.engines.open import open_engine
from trope.data.sources.description import Columns, Source
try:
    with open_engine("spark", Source("log", "csv", Columns()), Path(sys.argv[1]), None, None, "local[1]") as engine:
        for name in ("py4j.clientserver", "py4j.java_gateway"):  # now and then, as when a pipe breaks
            logging.getLogger(name).error("Traceback")
        client = engine._session.sparkContext._gateway._gateway_client
        connect = client._create_new_connection
        fails = iter(range(int(sys.argv[2])))
        def closed():  # now and then Java closes the connections that come first after Ctrl-C
            if next(fails, None) is None:
                return connect()
            raise Py4JNetworkError("Answer from Java side is empty")
        client._create_new_connection = closed
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        engine._session.sql("SELECT count(*) FROM range(1000000000000) WHERE hash(id) = 3").collect()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("closed", [1, 1000])
def test_ctrl_c_prints_no_traceback(tmp_path: Path, closed: int) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, str(tmp_path), str(closed)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**kept, "PYTHONPATH": "."})
    assert done.stdout.strip() == "interrupted", done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_files_folders_and_columns(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "user=77" / "timestamp=3"
    folder.mkdir(parents=True)
    names = ("a*.csv", "ab.csv", "l[1].csv", "l1.csv", "{x}.csv", "q?.csv", "b#c d.csv")
    for place, name in enumerate(names):
        columns = "Item,path,id,block,_broken,_metadata,user,item,timestamp"
        rows = "".join(f"9,8,{9 - n},6,5,4,1,{place * 10 + n},{START}\n" for n in (3, 1, 2))
        text(folder / name, f"{columns}\n{rows}")
    both(tmp_path / "log", tmp_path)
    assert read_meta(tmp_path / "spark")["counts"]["events"] == 21
    folder = tmp_path / "parquet" / "item=3"
    folder.mkdir(parents=True)
    for place, name in enumerate(("a*.parquet", "ab.parquet", "l[1].parquet")):
        taken = {
            name: [9 - n for n in range(5)] for name in ("Item", "file_row_number", "file_index", "_metadata", "row")
        }
        kind = (pa.int32(), pa.int64(), pa.int16())[place]
        users = pa.array([1, 2, 1, 2, 1], kind)
        table = {"user": users, "item": [place * 10 + n for n in (5, 3, 9, 1, 7)], "timestamp": [START] * 5}
        pq.write_table(pa.table({**taken, **table} if place else {**table, **taken}), folder / name)
    (tmp_path / "two").mkdir()
    both(tmp_path / "parquet", tmp_path / "two")
    (tmp_path / "three").mkdir()
    both(tmp_path / "parquet", tmp_path / "three", basket_col="_metadata", event_col="Item")


def test_columns_that_nobody_names(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", random_log(200))
    log.write_text(log.read_text().replace("user,item", "user_id,item_id", 1))
    both(log, tmp_path)


def test_quoted_line_breaks(tmp_path: Path) -> None:
    ways = ['"{}"', "{}", '"a ""{}"" b"', '5" pipe {}', '"{}, x"', '"a\nb {}"', '"{}" ', '""""']
    rows = [f"{n % 9},{ways[n % len(ways)].format(n % 40)},{START + n // 50}\n" for n in range(900)]
    both(text(tmp_path / "log.csv", "user,item,timestamp\n" + "".join(rows)), tmp_path)


def test_dates_and_delimiters(tmp_path: Path) -> None:
    dates = [
        "2020-09-13", "2020-9-13", "2020/09/13", " 2020-09-13 ", "2020-09-13 12:26", "2020-09-13 12:26:40.123456789",
        "2020-09-13T12:26:40Z", "2020-09-13 12:26:40 UTC", "2020-09-13 12:26:40 GMT", "2020-09-13 14:26:40+02",
        "2020-09-13 14:26:40.5+0200", "2020-09-13T10:26:40-02:00", "2020-09-13 12:26:40.", "2020-09-13 1:2:3",
        "2020-09-13 00:00:00 America/New_York", "2020-09-13 EST", "2020", "2020-09", "2020-09-13 24:00:00", "epoch",
        "2020-09-13 00:00:00+19:00", "12:30", "2020-02-30", "infinity", "2020-09-13T", "20200913",
        "2020-09-13 03:04:60",
    ]  # fmt: skip
    rows = "".join(f"{n % 2};{n};{date}\n" for n, date in enumerate(dates))
    log = text(tmp_path / "log.csv", f"user;item;timestamp\n{rows}")
    both(log, tmp_path, loose(on_bad="skip"), time_unit="iso", delimiter=";")
    assert read_meta(tmp_path / "spark")["bad_rows"]["count"] == 13
    for place, (form, date, second) in enumerate(FORMATS[3::4]):
        folder = tmp_path / str(place)
        folder.mkdir()
        log = text(folder / "log.csv", "user;item;timestamp\n" + f"1;2;{date}\n" * 3 + "1;2;2020-09-13\n1;2;1/1/1\n")
        both(log, folder, loose(on_bad="skip"), time_format=form, delimiter=";")
        meta = read_meta(folder / "spark")
        assert (meta["bad_rows"]["count"], meta["time_span"]["all"]) == (2, [1_599_955_200 + second] * 2)


def test_times_beyond_all_integers(tmp_path: Path) -> None:
    times = [float(START)] * 5 + [1e300, -1e300, 1e19, float("nan")]
    write_parquet(tmp_path / "log.parquet", [(1, n, time) for n, time in enumerate(times)])  # type: ignore[misc]
    both(tmp_path / "log.parquet", tmp_path, loose(on_bad="skip"))
    assert read_meta(tmp_path / "spark")["bad_rows"]["count"] == 4


@pytest.mark.parametrize("kind", ["numbers", "text and baskets"])
def test_executors_write_the_shards_that_duckdb_writes(tmp_path: Path, kind: str) -> None:
    rows = random_log(3_000, users=90, items=40, spread=5_000)
    extra: dict[str, list] = {}
    if kind != "numbers":
        rows = [(f"ü{user}", f"{item:03}", time) for user, item, time in rows]
        extra = {"basket": [f"b{n // 4}" for n in range(len(rows))]}
    log = write_parquet(tmp_path / "log.parquet", rows, **extra)
    columns = {"basket_col": "basket"} if extra else {}
    both(log, tmp_path, loose(shard_users=11, protocol=Protocol("next-basket")), **columns)
    assert len(read_meta(tmp_path / "spark")["shards"]) == 9
    written = sorted(path.relative_to(tmp_path / "spark") for path in (tmp_path / "spark").rglob("*.npy"))
    assert written == sorted(path.relative_to(tmp_path / "duckdb") for path in (tmp_path / "duckdb").rglob("*.npy"))


def test_the_driver_writes_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's own copy of the writer does is not what happens: executors run theirs."""
    from trope.data import shards

    def refuse(*_: object) -> None:
        raise AssertionError("the driver wrote a shard")

    log = write_parquet(tmp_path / "log.parquet", random_log(400, users=20))
    monkeypatch.setattr(shards, "write_array", refuse)
    data = prepared(log, tmp_path / "out", loose(shard_users=6), engine="spark")
    assert len(data.meta["shards"]) == 4
