"""Bad input: an error that says what, got what, do what, and nothing half-written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, loose, prepared, random_log, unnumbered, write_csv, write_parquet

from trope.data import arrays
from trope.data.prepare import Options
from trope.data.protocols import Protocol
from trope.data.sources.published import NAMES, named

ROWS = [(1, n, START + n) for n in range(8)]


def refused(source: Path | str, out: Path, message: str, options: Options | None = None, **settings: object) -> None:
    """Preparing raises `message` and leaves nothing behind in the output's folder."""
    before = set(out.parent.iterdir())
    with pytest.raises((ValueError, FileNotFoundError, FileExistsError), match=message):
        prepared(source, out, options, **settings)
    assert set(out.parent.iterdir()) == before


@pytest.mark.parametrize(("unit", "ticks"), [("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_times_in_another_unit(tmp_path: Path, unit: str, ticks: int) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(u, i, t * ticks) for u, i, t in ROWS])
    refused(log, tmp_path / "out", f"pass --time-unit {unit}")
    refused(write_parquet(log, ROWS), tmp_path / "out", "look like seconds: pass --time-unit s", time_unit=unit)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_dates_read_as_numbers(tmp_path: Path, suffix: str) -> None:
    dated = [(u, i, datetime.fromtimestamp(t, UTC).isoformat()) for u, i, t in ROWS]
    log = {".csv": write_csv, ".parquet": write_parquet}[suffix](tmp_path / f"log{suffix}", dated)
    said = r"8 bad rows: .*; and 7 more\. The times look like dates \('2020-09-13T.*'\): pass --time-unit iso"
    refused(log, tmp_path / "out", said)
    refused(log, tmp_path / "out", said, loose(on_bad="skip"))
    assert unnumbered(prepared(log, tmp_path / "out", time_unit="iso"))[1] == [(i, t) for _, i, t in ROWS]


@pytest.mark.parametrize(("unit", "ticks"), [("s", 1), ("ms", 1_000)])
def test_numbers_read_as_dates(tmp_path: Path, unit: str, ticks: int) -> None:
    rows = [(u, i, t * ticks) for u, i, t in ROWS]
    log = write_csv(tmp_path / "log.csv", rows)
    refused(log, tmp_path / "out", f"not a date; and 7 more.*look like .*: pass --time-unit {unit}", time_unit="iso")
    refused(
        write_parquet(tmp_path / "log.parquet", rows), tmp_path / "out", "is int64; pass --time-unit", time_unit="iso"
    )


def test_a_few_bad_times_are_no_reason_for_another_unit(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [*ROWS, (1, 9, "2020-09-13"), (1, 10, "soon")])
    refused(log, tmp_path / "out", "2 bad rows: .* Mend them, or pass --on-bad skip")
    assert prepared(log, tmp_path / "out", loose(on_bad="skip")).num_events == 8
    log = write_csv(log, [(u, i, "13.09.2020") for u, i, _ in ROWS])
    refused(log, tmp_path / "other", r"not a number; and 7 more\. .*'13.09.2020'.*: pass --time-format '%d.%m.%Y'")


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        (0, "time is zero or negative"),
        (-5, "time is zero or negative"),
        (None, "time is missing"),
        (5_000_000_000, "time is after the year 2099"),
        (float("nan"), "time is missing or not a number"),
        (float("inf"), "time is missing or not a number"),
    ],
)
def test_a_bad_time_is_named_with_its_row(tmp_path: Path, time: float | None, reason: str) -> None:
    kind = pa.float64() if isinstance(time, float) else pa.int64()
    times = pa.array([START, START + 1, time, START + 3, START + 4], kind, from_pandas=False)
    pq.write_table(pa.table({"user": [1] * 5, "item": range(5), "timestamp": times}), tmp_path / "log.parquet")
    refused(tmp_path / "log.parquet", tmp_path / "out", f"log.parquet row 3: {reason}")
    data = prepared(tmp_path / "log.parquet", tmp_path / "out", loose(on_bad="skip"))
    assert [item for item, _ in unnumbered(data)[1]] == [0, 1, 3, 4]
    assert data.meta["bad_rows"]["count"] == 1


@pytest.mark.parametrize("column", ["user", "item"])
def test_a_missing_id(tmp_path: Path, column: str) -> None:
    table = {"user": [1] * 4, "item": [1, 2, 3, 4], "timestamp": [START] * 4}
    table[column] = [1, None, 2, 3]
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    refused(tmp_path / "log.parquet", tmp_path / "out", f"row 2: {column} is missing")


def test_ids_that_are_floats(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1.0], "item": [2], "timestamp": [START]}), tmp_path / "log.parquet")
    refused(tmp_path / "log.parquet", tmp_path / "out", "ids must be integers or text")


def test_times_that_are_rounded(tmp_path: Path) -> None:
    users, items, times = zip(*ROWS, strict=True)
    log = tmp_path / "log.parquet"
    pq.write_table(pa.table({"user": users, "item": items, "timestamp": np.array(times, np.float32)}), log)
    refused(log, tmp_path / "out", "'timestamp' is float32, which rounds Unix seconds to multiples of 128")


@pytest.mark.parametrize(("kind", "last", "said"), [
    ("float32", START, "'timestamp' is float32, which rounds"), ("uint64", 2**64 - 1, "1 bad row: .* not a number"),
])  # fmt: skip
def test_times_of_a_column_that_is_never_null(tmp_path: Path, kind: str, last: int, said: str) -> None:
    """A table's column may say so, and its type is not equal to the usual one then."""
    times = pa.array(np.array([START, START + 1, last], kind))
    field = pa.field("timestamp", times.type, nullable=False)
    schema = pa.schema([("user", pa.int64()), ("item", pa.int64()), field])
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    events = pa.table([[1, 1, 1], [1, 2, 3], times], schema=schema)
    connection.create_table("clicks", events, schema=ibis.Schema.from_pyarrow(schema))
    connection.disconnect()
    refused(f"duckdb://{tmp_path}/shop.duckdb", tmp_path / "out", said, table="clicks")


def test_first_lines_of_spreadsheets(tmp_path: Path) -> None:
    rows = "".join(f"{u};{i};{t}\r\n" for u, i, t in ROWS)
    (tmp_path / "excel.csv").write_text(f"sep=;\r\nuser;item;timestamp\r\n{rows}", newline="")
    refused(tmp_path / "excel.csv", tmp_path / "out", "begins with a line for Excel, 'sep=;'; remove that line")
    spaced = "user, item, timestamp\n" + rows.replace(";", ", ").replace("\r", "")
    (tmp_path / "spaces.csv").write_text(spaced)
    said = "for the item; it has ' item', and spaces count: pass --item-col ' item'"
    refused(tmp_path / "spaces.csv", tmp_path / "out", said)


def test_nobody_has_three_baskets(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [(user, item, START) for user in range(3) for item in range(9)])
    said = "to test: nobody has three baskets, the longest of 3 users has 9 events; choose another --protocol"
    refused(log, tmp_path / "out", said, options=loose(protocol=Protocol("next-basket")))


def test_bad_rows_in_the_middle_of_a_csv(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", ROWS)
    lines = log.read_text().splitlines()
    lines[3:3] = ["1,2", "1,2,3,4"]  # lines 4 and 5: too few and too many fields
    lines[7] = "1,99,soon"  # line 8: no number
    log.write_text("\n".join(lines) + "\n")
    refused(log, tmp_path / "out", r"3 bad rows: log\.csv line 4: .*; log\.csv line 5: .*; log\.csv line 8: time")
    bad = prepared(log, tmp_path / "out", loose(on_bad="skip")).meta["bad_rows"]
    assert bad["count"] == 3
    assert [row["row"] for row in bad["first"]] == [4, 5, 8]
    assert sum(bad["reasons"].values()) == 3


def test_many_bad_rows_are_counted_but_not_all_listed(tmp_path: Path) -> None:
    rows = [*ROWS, *[(1, n, 0) for n in range(500)]]
    bad = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "out", loose(on_bad="skip")).meta[
        "bad_rows"
    ]
    assert (bad["count"], len(bad["first"])) == (500, 20)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log())
    log.write_bytes(log.read_bytes()[:-50])
    refused(log, tmp_path / "out", "is it truncated or not Parquet")


def test_a_parquet_file_damaged_in_the_middle(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log(5_000))
    content = bytearray(log.read_bytes())
    content[200:2_000] = os.urandom(1_800)
    log.write_bytes(content)
    refused(log, tmp_path / "out", "truncated or damaged")


def test_duplicate_columns(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,timestamp,item\n1,2,1600000000,3\n")
    refused(tmp_path / "log.csv", tmp_path / "out", "duplicate columns item")


def test_unknown_columns(tmp_path: Path) -> None:
    refused(write_csv(tmp_path / "log.csv", ROWS), tmp_path / "out", "no column 'who'.*--user-col", user_col="who")
    refused(
        write_parquet(tmp_path / "log.parquet", ROWS), tmp_path / "out", "no column 'b' for the basket", basket_col="b"
    )


def test_files_that_disagree(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    write_csv(folder / "a.csv", ROWS)
    (folder / "b.csv").write_text("item,user,timestamp\n1,2,1600000000\n")
    refused(folder, tmp_path / "out", "must agree")
    write_parquet(folder / "c.parquet", ROWS)
    refused(folder, tmp_path / "out", "files of one kind")


def test_no_files_and_foreign_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.csv", tmp_path / "out", "no file at")
    (tmp_path / "log.xlsx").write_text("x")
    refused(tmp_path / "log.xlsx", tmp_path / "out", "cannot tell what")
    (tmp_path / "log.parquet").write_text("this is no Parquet")
    refused(tmp_path / "log.parquet", tmp_path / "out", "not Parquet")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("")
    refused(tmp_path / "log.csv", tmp_path / "out", r"log\.csv is empty; its first line must name the columns")
    (tmp_path / "log.csv").write_text("\nuser,item,timestamp\n")
    refused(tmp_path / "log.csv", tmp_path / "out", "begins with an empty line")


def test_a_folder_without_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "clicks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_csv(folder / "a.csv", ROWS)
    assert prepared(".", tmp_path / "out").meta["source"]["name"] == "clicks"
    write_parquet(folder / "b.parquet", ROWS)
    refused(".", tmp_path / "other", r"clicks: cannot tell what \.csv, \.parquet holds")


def test_a_misspelt_name_lists_the_names(tmp_path: Path) -> None:
    refused("complete-jurney", tmp_path / "out", "no file at complete-jurney, and no dataset .*complete-journey, ml-1m")
    for name in NAMES:
        with pytest.raises((ValueError, FileNotFoundError), match=r"--raw PATH|complete-journey: no file"):
            named(name, tmp_path if name == "complete-journey" else None, "product")


def test_nothing_left_after_filtering(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", ROWS)
    refused(
        log, tmp_path / "out", "left after filtering with --min-user 5, --min-item 5; loosen one of them$", Options()
    )
    said = "left after filtering with --since 2020-09-25T02:13:20Z; loosen"
    refused(log, tmp_path / "out", said, loose(since=START + 10**6))
    kinds = write_parquet(tmp_path / "kinds.parquet", ROWS, kind=["view"] * len(ROWS))
    said = "with --event buy, --event sell, --until 2020"
    options = loose(event_types=("buy", "sell"), until=START + 9)
    refused(kinds, tmp_path / "out", said, options, event_col="kind")
    (tmp_path / "bad.csv").write_text("user,item,timestamp\n1,2,never\n")
    refused(tmp_path / "bad.csv", tmp_path / "out", "filtering with --on-bad skip; loosen", loose(on_bad="skip"))
    (tmp_path / "empty.csv").write_text("user,item,timestamp\n")
    refused(tmp_path / "empty.csv", tmp_path / "out", "has no events")


def test_an_existing_folder_is_refused_or_replaced_at_the_end(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", ROWS)
    first = prepared(log, tmp_path / "out")
    refused(log, tmp_path / "out", "exists already")
    refused(log, tmp_path / "out", "left after filtering", Options(), overwrite=True)
    assert unnumbered(first) == unnumbered(prepared(log, tmp_path / "out", overwrite=True))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    refused(log, tmp_path / "letters", "not a prepared dataset", overwrite=True)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrays.ArrayWriter, "append", full)
    refused(write_parquet(tmp_path / "log.parquet", ROWS), tmp_path / "out", "no space left")


def test_a_kill_in_the_middle_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log(300_000, users=30_000, items=5_000))
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "trope", "prepare", str(log), "--out", str(out)])
    while process.poll() is None and not list(tmp_path.glob(".out.partial-*/work/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert prepared(log, out, Options()).num_users  # what the killed run left does not stand in the way


def test_arrays_are_whole_or_an_assertion(tmp_path: Path) -> None:
    with arrays.ArrayWriter(tmp_path, "items", (3,)) as writer:
        writer.append(np.arange(2))
        with pytest.raises(AssertionError, match="1 values short"):
            writer.close()
