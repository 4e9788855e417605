"""Files that once gave a wrong dataset without a word: each is now refused, or read as it stands."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import signal
import threading
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, array_hashes, loose, prepared, unnumbered, write_csv, write_parquet
from test_data_bad_input import refused
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data import arrays
from trope.data.engines.failure import explain
from trope.data.engines.open import open_engine
from trope.data.prepare import Options
from trope.data.protocols import Protocol
from trope.data.sources.description import Columns, Source
from trope.data.sources.files import find_files

ROWS = [(1, n, START + n) for n in range(8)]
EVENTS = {1: [(n, START + n) for n in range(8)]}
HEAD = "user,item,timestamp\n"
MANY = HEAD + "".join(f"{n % 50},{n % 7},{START + n}\n" for n in range(20_000))
CODECS = {".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes()}


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Item 1: compressed streams are read to their end.


@pytest.mark.parametrize("suffix", CODECS)
@pytest.mark.parametrize("share", [0.5, 0.999])
@pytest.mark.parametrize("kind", [".csv", ".jsonl"])
def test_a_truncated_stream_is_refused(tmp_path: Path, suffix: str, share: float, kind: str) -> None:
    # Beyond the first megabyte, which is read for the header.
    lines = (
        MANY + MANY.removeprefix(HEAD) * 3
        if kind == ".csv"
        else '{"user": 1, "item": 2, "timestamp": 1600000000}\n' * 80_000
    )
    packed = CODECS[suffix](lines.encode())
    log = text(tmp_path / f"log{kind}{suffix}", packed)
    assert prepared(log, tmp_path / "whole").num_events == 80_000
    log.write_bytes(packed[: int(len(packed) * share)])
    for on_bad in ("fail", "skip"):
        refused(log, tmp_path / "out", "truncated", loose(on_bad=on_bad))


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(MANY.encode()))
    packed[-6] ^= 1
    refused(text(tmp_path / "log.csv.gz", bytes(packed)), tmp_path / "out", "incorrect data check.*damaged")


def test_streams_one_behind_the_other_are_one_file(tmp_path: Path) -> None:
    for suffix, pack in CODECS.items():
        log = text(tmp_path / f"log.csv{suffix}", pack(MANY.encode()) + pack(MANY.removeprefix(HEAD).encode()))
        assert prepared(log, tmp_path / suffix).num_events == 40_000


# Item 2: folder names are no columns.


@pytest.mark.parametrize("folder", ["user=77", "timestamp=1400000000", "item=3/user=4"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_a_folder_named_like_a_column(tmp_path: Path, folder: str, suffix: str) -> None:
    where = tmp_path / "log" / folder
    where.mkdir(parents=True)
    if suffix == ".jsonl":
        text(where / "log.jsonl", "".join(f'{{"user":{u},"item":{i},"timestamp":{t}}}\n' for u, i, t in ROWS))
    else:
        {".csv": write_csv, ".parquet": write_parquet}[suffix](where / f"log{suffix}", ROWS)
    assert unnumbered(prepared(tmp_path / "log", tmp_path / "out")) == EVENTS


# Item 3: names with the characters of a glob.


@pytest.mark.parametrize("name", ["log[1]", "lo*", "lo?1", "{log1}", "[!a]", "lo[g]'1", "**"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_name_with_the_characters_of_a_glob(tmp_path: Path, name: str, suffix: str) -> None:
    write = {".csv": write_csv, ".parquet": write_parquet}[suffix]
    logs = tmp_path / "logs"
    logs.mkdir()
    write(logs / f"log1{suffix}", [(2, 9, START)] * 3)
    log = write(logs / f"{name}{suffix}", ROWS)
    assert unnumbered(prepared(log, tmp_path / "out")) == EVENTS
    assert prepared(logs / f"lo*{suffix}" if name != "lo*" else logs, tmp_path / "all").num_events in (3, 11)


@pytest.mark.parametrize("name", ["log.csv.gz", "lo?.csv.gz", "lo?.x.csv.gz"])
def test_a_compressed_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    """DuckDB takes what follows a ? for a query, and missed that the file is compressed."""
    plain = write_csv(tmp_path / "plain.csv", ROWS)
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    assert unnumbered(prepared(tmp_path / name, tmp_path / "out")) == EVENTS


def test_a_folder_counts_every_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    for name in ("a*.csv", "ab.csv", "a?.csv"):
        write_csv(folder / name, ROWS)
    (folder / "latest.csv").symlink_to(folder / "ab.csv")
    (folder / "0.csv").symlink_to("ab.csv")
    assert [file.name for file in find_files(str(folder))] == ["a*.csv", "a?.csv", "ab.csv"]
    assert prepared(folder, tmp_path / "out").num_events == 24
    assert prepared(folder / "*.csv", tmp_path / "glob").num_events == 24


# Item 4: dates with and without zones.


@pytest.mark.parametrize("zone", ["America/New_York", "EST", "Europe/Berlin", "Asia/Kolkata", "utc+3", "nowhere"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_named_zone_is_a_bad_row_and_shifts_no_other(tmp_path: Path, zone: str, suffix: str) -> None:
    dates = [f"2020-01-01 00:00:{n:02}" for n in range(9)]
    dates[3] += f" {zone}"
    rows = [(1, n, date) for n, date in enumerate(dates)]
    log = {".csv": write_csv, ".parquet": write_parquet}[suffix](tmp_path / f"log{suffix}", rows)  # type: ignore[arg-type]
    refused(
        log,
        tmp_path / "out",
        f"time is missing or not a date.* is '2020-01-01 00:00:03 {re.escape(zone)}'",
        time_unit="iso",
    )
    data = prepared(log, tmp_path / "out", loose(on_bad="skip"), time_unit="iso")
    assert unnumbered(data)[1] == [(n, 1_577_836_800 + n) for n in range(9) if n != 3]


def test_dates_that_are_read(tmp_path: Path) -> None:
    dates = [
        "2020-09-13", "2020-9-13", "2020/09/13", " 2020-09-13 ", "2020-09-13 12:26", "2020-09-13T12:26:40",
        "2020-09-13 12:26:40.123456789", "2020-09-13T12:26:40Z", "2020-09-13 12:26:40 UTC", "2020-09-13 12:26:40 GMT",
        "2020-09-13 14:26:40+02", "2020-09-13 14:26:40.5+0200", "2020-09-13T10:26:40-02:00",
    ]  # fmt: skip
    log = write_csv(tmp_path / "log.csv", [(n, 1, date) for n, date in enumerate(dates) for _ in range(3)])  # type: ignore[misc]
    found = unnumbered(prepared(log, tmp_path / "out", time_unit="iso"))
    midnight = 1_599_955_200
    assert [found[n][0][1] - midnight for n in range(len(dates))] == [0, 0, 0, 0, 44_760, *[44_800] * 8]


# Item 5: columns that differ only in case.


def test_case_counts(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    users, items, times = ([row[part] for row in ROWS] for part in range(3))
    nines = [9] * 8
    first = {"Item": nines, "user": users, "item": items, "USER": nines, "timestamp": times}
    second = {"item": items, "Item": nines, "timestamp": times, "User": nines, "user": users}
    pq.write_table(pa.table(first), folder / "a.parquet")
    expected = prepared(write_parquet(tmp_path / "one.parquet", ROWS), tmp_path / "one")
    assert array_hashes(prepared(folder, tmp_path / "a")) == array_hashes(expected)
    pq.write_table(pa.table(second), folder / "b.parquet")
    write_parquet(folder / "c.parquet", ROWS)
    expected = prepared(write_parquet(tmp_path / "three.parquet", ROWS * 3), tmp_path / "three")
    assert array_hashes(prepared(folder, tmp_path / "b")) == array_hashes(expected)
    log = text(tmp_path / "log.csv", "Item,user,item,timestamp\n" + "".join(f"9,{u},{i},{t}\n" for u, i, t in ROWS))
    assert unnumbered(prepared(log, tmp_path / "csv")) == EVENTS


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_of_another_case_is_named(tmp_path: Path, suffix: str) -> None:
    log = {".csv": write_csv, ".parquet": write_parquet}[suffix](tmp_path / f"log{suffix}", ROWS)
    said = "no column 'ITEM' for the item; it has 'item', and case counts: pass --item-col item"
    refused(log, tmp_path / "out", said, item_col="ITEM")
    lines = "".join(f'{{"user":{u},"item":{i},"Item":9,"timestamp":{t}}}\n' for u, i, t in ROWS)
    log = text(tmp_path / "log.jsonl", lines)
    assert unnumbered(prepared(log, tmp_path / "json")) == EVENTS
    refused(log, tmp_path / "out", "differ only in case", user_col="Item")


# Item 6: lines that an engine loses.


@pytest.mark.parametrize("megabytes", [3, 20, 40])
@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_a_very_long_line(tmp_path: Path, megabytes: int, on_bad: str) -> None:
    log = write_csv(tmp_path / "log.csv", ROWS)
    with log.open("a") as file:
        file.write("1,")
        for _ in range(megabytes):
            file.write("x" * 10**6)
        file.write(f",{START}\n1,2,{START}\n")
    refused(log, tmp_path / "out", r"log\.csv line 10 is longer than 1,999,000 bytes", loose(on_bad=on_bad))


@pytest.mark.parametrize("cut", ['{"a":', '{"a": [ ', "[", '{"a":[{"b":1},\r'])
@pytest.mark.parametrize("blank", ["", "\n \n"])
def test_a_json_line_that_breaks_off_before_a_value(tmp_path: Path, cut: str, blank: str) -> None:
    """DuckDB reads on in the next line, which was then lost as a second bad row; in a file's last line it is one."""
    lines = [f'{{"user":{u},"item":{i},"timestamp":{t}}}\n' for u, i, t in ROWS]
    log = text(tmp_path / "log.jsonl", "".join([*lines[:3], cut, "\n", blank, *lines[3:]]))
    said = r"log\.jsonl line 4 breaks off where a value must follow; each line must be one whole"
    refused(log, tmp_path / "out", said, loose(on_bad="skip"))
    log = text(tmp_path / "log.jsonl", "".join([*lines, cut, "\n", blank]))
    assert unnumbered(prepared(log, tmp_path / "last", loose(on_bad="skip"))) == EVENTS


def test_json_behind_a_byte_order_mark(tmp_path: Path) -> None:
    """DuckDB lost the first row; Spark read it."""
    lines = "".join(f'{{"user":{u},"item":{i},"timestamp":{t}}}\n' for u, i, t in ROWS)
    log = text(tmp_path / "log.jsonl", "\ufeff" + lines)
    refused(log, tmp_path / "out", r"log\.jsonl begins with a byte order mark", loose(on_bad="skip"))


def test_a_json_line_that_breaks_off_between_blocks(tmp_path: Path) -> None:
    line, cut = f'{{"user":1,"item":2,"timestamp":{START}}}\n', '{"a":\n'
    before = 3_000_000 // len(line)
    log = text(tmp_path / "log.jsonl", line * before + cut + " " * 2_000_000 + "\n" + line)
    refused(log, tmp_path / "out", rf"line {before + 1:,} breaks off", loose(on_bad="skip"))


def test_a_line_of_a_megabyte_is_read(tmp_path: Path) -> None:
    log = text(tmp_path / "log.csv", HEAD + f"1,2,{START}\n" * 5 + f"1,{'x' * 1_900_000},{START}\n" + MANY[len(HEAD) :])
    assert prepared(log, tmp_path / "out").num_events == 20_006


@pytest.mark.parametrize(
    ("middle", "rest"),
    [
        ('1,"2,3\n', MANY),
        ('1,2,"3\n', ""),
        (f'1,"2,3\n{MANY}1,"x",{START}\n', MANY),
        (f'1,"2",3\n1,"x,{START}\n', MANY * 12),
        (f'1,"2"x,{START}\n', ""),
    ],
)
def test_a_quote_that_is_not_closed(tmp_path: Path, middle: str, rest: str) -> None:
    log = text(tmp_path / "log.csv", MANY + middle + rest.removeprefix(HEAD))
    line = 20_003 if middle.startswith('1,"2",3') else 20_002
    for on_bad in ("fail", "skip"):
        refused(log, tmp_path / "out", f"the quote in line {line:,} is ", loose(on_bad=on_bad))


def test_quotes_that_are_right(tmp_path: Path) -> None:
    """Every way of quoting, across the edges of the blocks that are checked."""
    ways = ['"{}"', "{}", '"a ""{}"" b"', '5" pipe {}', '"{}, x"', '"a\nb {}"', '"a\r\n{}"', '"{}" ', ' "{}"', '""""']
    items = [way.format(n) for n, way in zip(range(60_000), itertools.cycle(ways), strict=False)]
    items[7_000] = '"' + "line\n" * 300_000 + '"'
    log = text(tmp_path / "log.csv", HEAD + "".join(f"{n % 9},{item},{START + n}\n" for n, item in enumerate(items)))
    assert log.stat().st_size > 2 << 20
    data = prepared(log, tmp_path / "out")
    assert (data.num_events, data.meta["bad_rows"]["count"]) == (60_000, 0)


# Item 7: files of one source with columns of several types.


@pytest.mark.parametrize("column", ["user", "item", "timestamp"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_mixed_types_are_refused(tmp_path: Path, column: str, order: str) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    table = pa.table({"user": [1] * 3, "item": [1, 2, 3], "timestamp": [START] * 3})
    values = pa.array([1.5, 2.5, 3.5] if column != "timestamp" else [START + 0.7] * 3)
    pq.write_table(table, folder / f"{order[0]}.parquet")
    pq.write_table(
        table.set_column(table.schema.get_field_index(column), column, values), folder / f"{order[1]}.parquet"
    )
    refused(folder, tmp_path / "out", f"b.parquet has column '{column}' as .*, but a.parquet has it as .*must agree")


@pytest.mark.parametrize(
    ("kinds", "agree"),
    [
        ((pa.int32(), pa.int64()), True),
        ((pa.int64(), pa.uint8(), pa.int16()), True),
        ((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())), True),
        ((pa.int64(), pa.string()), False),
        ((pa.int64(), pa.uint64()), False),
    ],
)
def test_types_that_mix_exactly(tmp_path: Path, kinds: tuple[pa.DataType, ...], agree: bool) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    values = [1, 2, 100] if pa.types.is_integer(kinds[0]) else ["1", "2", "x"]
    for part, kind in enumerate(kinds):
        users = pa.array(list(map(str, values)) if kind == pa.string() else values).cast(kind)
        pq.write_table(
            pa.table({"user": users, "item": [1, 2, 3], "timestamp": [START] * 3}), folder / f"{part}.parquet"
        )
    if not agree:
        refused(folder, tmp_path / "out", "must agree")
        return
    found = unnumbered(prepared(folder, tmp_path / "out", loose(protocol=Protocol("loo-paper"))))
    assert list(found) == values
    assert all(len(events) == len(kinds) for events in found.values())


# Item 8: columns that have the names of an engine's own.

_TAKEN = [
    "file_row_number",
    "file_index",
    "filename",
    "place",
    "file",
    "rowid",
    "path",
    "id",
    "block",
    "c0",
    "_metadata",
]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("used", [False, True])
def test_columns_with_an_engines_own_names(tmp_path: Path, suffix: str, used: bool) -> None:
    rows = [(1, n, START) for n in (5, 3, 9, 1, 7)]  # all ties: only the place in the file orders them
    columns: dict[str, list] = {name: [9 - n for n in range(5)] for name in _TAKEN}
    columns |= dict(zip(("user", "item", "timestamp"), map(list, zip(*rows, strict=True)), strict=True))
    settings = {}
    if used:
        columns["file_row_number"], columns["item"] = columns["item"], columns["file_row_number"]
        columns["file_index"], columns["user"] = columns["user"], columns["file_index"]
        settings = {"item_col": "file_row_number", "user_col": "file_index"}
    for part in "ab":
        (tmp_path / "log").mkdir(exist_ok=True)
        log = tmp_path / "log" / f"{part}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.table(columns), log)
        else:
            lines = [columns, *zip(*columns.values(), strict=True)]
            text(log, "".join(",".join(map(str, line)) + "\n" for line in lines))
    found = unnumbered(prepared(tmp_path / "log", tmp_path / "out", **settings))
    assert found == {1: [(n, START) for n in (5, 3, 9, 1, 7) * 2]}


def test_json_keys_with_an_engines_own_names(tmp_path: Path) -> None:
    lines = "".join(f'{{"file_index":1,"id":{n},"file":{START},"rowid":3}}\n' for n in (5, 3, 9))
    log = text(tmp_path / "log.jsonl", lines)
    data = prepared(log, tmp_path / "out", user_col="file_index", item_col="id", time_col="file")
    assert unnumbered(data) == {1: [(n, START) for n in (5, 3, 9)]}


def test_bad_rows_of_files_with_one_name(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / "log" / folder).mkdir(parents=True)
        write_csv(tmp_path / "log" / folder / "log.csv", ROWS)
    log = tmp_path / "log" / "a" / "log.csv"
    log.write_text(log.read_text().replace("1,2,", "1,2,3,4,").replace("1,5,", "1,"))
    other = tmp_path / "log" / "b" / "log.csv"
    other.write_text(other.read_text().replace(f"1,6,{START + 6}", "1,6,soon"))
    refused(
        tmp_path / "log",
        tmp_path / "out",
        r"3 bad rows: a/log\.csv line 4: .*; a/log\.csv line 7: .*; b/log\.csv line 8",
    )


# Items 19 and 20: one line that names what helps.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x" * 200_000 + ",user,item,timestamp\n1,2,3,4\n", r"first line must name the columns.*field larger"),
        (MANY.replace("\n", "\r")[:200], r"carriage returns alone .* tr "),
        (MANY.replace("\n", "\r"), r"carriage returns alone .* tr "),
        (MANY + f"1,2,3\r4,5,{START}\n", r"carriage returns alone"),
        (MANY.replace("\n", "\r\n", 100), r"mixes line ends, CRLF and LF, from about line 1 on"),
        (MANY + f"1,2,{START}\r\n", r"mixes line ends, CRLF and LF,.* dos2unix"),
        (MANY.replace("timestamp\n", "timestamp,\n"), r"header has 4 fields, the last one empty: .*delimiter too many"),
        (MANY.replace(",", ";"), r"no column 'user' or 'user_id' .*; .*'user;item;timestamp' .*--delimiter ';'"),
        (MANY.replace(",", "\t"), r"--delimiter '\\t'"),
        ("user,item,timestamp\n" + "1,2,30/03/2023\n" * 9, r"\('30/03/2023'\): pass --time-format '%d/%m/%Y'$"),
        ("user,item,timestamp\n" + "1,2,03/30/2023 4:05 PM\n" * 9, r"pass --time-format '%m/%d/%Y %I:%M %p'$"),
        ("user,item,timestamp\n" + "1,2,03.04.2023\n" * 9, r"pass --time-format '%d\.%m\.%Y' or '%m\.%d\.%Y'$"),
        ("user,item,timestamp\n" + "1,2,20230330\n" * 9, r"look like days: pass --time-format %Y%m%d"),
        (MANY + "1,2,soon\n", r"cannot be read is 'soon'\. Mend"),
        (MANY + "1,2,1e300\n", r"cannot be read is '1e300'\. Mend"),
    ],
)  # fmt: skip
def test_the_line_names_what_helps(tmp_path: Path, content: str, message: str) -> None:
    refused(text(tmp_path / "log.csv", content), tmp_path / "out", message)


def test_a_header_with_a_delimiter_too_many_like_its_rows(tmp_path: Path) -> None:
    log = text(tmp_path / "log.csv", "user,item,timestamp,,\n" + "".join(f"{u},{i},{t},,\n" for u, i, t in ROWS))
    assert unnumbered(prepared(log, tmp_path / "out")) == EVENTS


@pytest.mark.parametrize("delimiter", [";", "|", " ", "\\t", "¦"])
def test_a_delimiter(tmp_path: Path, delimiter: str) -> None:
    log = write_csv(tmp_path / "log.csv", ROWS, "\t" if delimiter == "\\t" else delimiter)
    assert unnumbered(prepared(log, tmp_path / "out", delimiter=delimiter)) == EVENTS


def test_a_delimiter_that_is_none(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", ROWS)
    for delimiter in ("", ";;", '"', "\n"):
        refused(log, tmp_path / "out", "--delimiter must be one character", delimiter=delimiter)
    refused(write_parquet(tmp_path / "log.parquet", ROWS), tmp_path / "out", "for CSV files", delimiter=";")
    refused("ml-1m", tmp_path / "out", "for CSV files given by their path", delimiter=";", raw=tmp_path)


FORMATS = [
    ("%d/%m/%Y", "13/09/2020", 0),
    ("%d/%m/%Y %H:%M", "13/9/2020 12:26", 44_760),
    ("%m-%d-%Y %H:%M:%S", "09-13-2020 12:26:40", 44_800),
    ("%m/%d/%y %I:%M %p", "9/13/20 12:26 AM", 1_560),
    ("%m/%d/%Y %I:%M:%S %p", "9/13/2020 1:26:40 pm", 48_400),
    ("%m/%d/%Y %I %p", "9/13/2020 12 PM", 43_200),
    ("%d %b %Y", "13 Sep 2020", 0),
    ("%B %d, %Y", "September 13, 2020", 0),
    ("%Y%m%d", "20200913", 0),
    ("%Y%m%d%H%M%S", "20200913122640", 44_800),
    ("%d.%m.%Y %H:%M:%S.%f", "13.09.2020 12:26:40.75", 44_800),
    ("%d/%b/%Y:%H:%M:%S %z", "13/Sep/2020:14:26:40 +0200", 44_800),
    ("(%Y) [%m] %d%%", "(2020) [9] 13%", 0),
]


@pytest.mark.parametrize(("form", "date", "second"), FORMATS)
def test_a_time_format(tmp_path: Path, form: str, date: str, second: int) -> None:
    rows = [(1, n, f'"{date}"') for n in range(3)] + [(1, 9, "2020-09-13"), (1, 9, '"99/99/9999"')]
    log = text(tmp_path / "log.csv", HEAD + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    if form == "%d/%m/%Y":
        refused(log, tmp_path / "out", "line 5: .*not a date; log.csv line 6: .* is '2020-09-13'", time_format=form)
    data = prepared(log, tmp_path / "out", loose(on_bad="skip"), time_format=form)
    assert unnumbered(data)[1] == [(n, 1_599_955_200 + second) for n in range(3)]
    assert data.meta["source"]["time_format"] == form


def test_time_formats_of_parquet_columns(tmp_path: Path) -> None:
    for name, times in (("text", ["30/03/2023"] * 3), ("days", [20230330] * 3)):
        log = write_parquet(tmp_path / f"{name}.parquet", [(1, n, t) for n, t in enumerate(times)])  # type: ignore[misc]
        form = "%d/%m/%Y" if name == "text" else "%Y%m%d"
        assert unnumbered(prepared(log, tmp_path / name, time_format=form))[1][0] == (0, 1_680_134_400)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("%H:%M", "must have one year"),
        ("%d/%m/%Q", "has %Q; it may have %Y"),
        ("%d/%m/%Y %I", "goes with %p"),
        ("%d/%m/%Y %", "has %;"),
        ("%d/%m/%Y %M %M", "has %M besides another"),
    ],
)
def test_a_time_format_that_is_none(tmp_path: Path, form: str, message: str) -> None:
    refused(write_csv(tmp_path / "log.csv", ROWS), tmp_path / "out", message, time_format=form)
    refused(tmp_path / "log.csv", tmp_path / "out", "leave one out", time_format="%d/%m/%Y", time_unit="ms")


@pytest.mark.parametrize("value", [1e300, -1e300, 1e19, float(2**63)])
def test_a_time_beyond_all_integers(tmp_path: Path, value: float) -> None:
    log = write_parquet(tmp_path / "log.parquet", [*((1, n, float(START)) for n in range(5)), (1, 9, value)])  # type: ignore[list-item]
    refused(log, tmp_path / "out", "row 6: time is missing or not a number")
    assert prepared(log, tmp_path / "out", loose(on_bad="skip")).num_events == 5
    pq.write_table(
        pa.table({"user": [1] * 4, "item": [1] * 4, "timestamp": pa.array([START] * 3 + [2**63 + 1], pa.uint64())}), log
    )
    refused(log, tmp_path / "other", "row 4: time is missing or not a number")


@pytest.mark.parametrize("side", ["user", "item"])
def test_a_threshold_of_23_digits(side: str) -> None:
    with pytest.raises(ValueError, match=f"--min-{side} 9{{23}} is more events than a log can have"):
        Options(**{f"min_{side}": int("9" * 23)})


def test_a_memory_error_names_the_right_direction(tmp_path: Path) -> None:
    source = Source("log", "csv", Columns())
    own = "Out of Memory Error: could not allocate block of size 256.0 KiB (28.3 MiB/28.6 MiB used)"
    assert "raise it with --memory" in str(explain(RuntimeError(own), source))
    for outer in (
        "Out of Memory Error: Failed to allocate block of 33554432 bytes (bad allocation)",
        "malloc of size 1",
    ):
        said = str(explain(MemoryError(outer), source))
        assert "lower --memory" in said
        assert "raise" not in said


@pytest.mark.parametrize(
    ("text", "is_setup"),
    [
        ("from the Python worker:\nTraceback:\n  import trope\nModuleNotFoundError: No module named 'trope'", True),
        ("from the Python worker:\nTraceback:\nPermissionError: [Errno 13] Permission denied: '/data'", False),
        ('o7.getResult\nCaused by: java.io.IOException:\nCannot run program "/x/python3"', True),
    ],
)
def test_an_executor_that_fails_is_not_a_damaged_file(text: str, is_setup: bool) -> None:
    said = str(explain(RuntimeError(f"An exception was thrown {text}"), Source("log", "csv", Columns())))
    assert said.startswith(f"an executor of Spark failed on log: {text.splitlines()[-1]}")
    assert ("PYSPARK_PYTHON" in said) == is_setup
    assert "damaged" not in said


@pytest.mark.parametrize(("flag", "threads", "memory"), [("--threads 8", 8, None), ("--memory 5GB", None, "5GB")])
def test_limits_of_another_engine_are_refused(tmp_path: Path, flag: str, threads: int | None, memory: str) -> None:
    for name, kind, reader in (("spark", "csv", "spark"), ("duckdb", "table", "the table's own database")):
        opened = open_engine(name, Source("log", kind, Columns()), tmp_path, threads, memory, None)
        with pytest.raises(ValueError, match=f"{flag} is a limit of --engine duckdb, and {reader} reads log"), opened:
            pass


def test_ctrl_c_in_a_query(tmp_path: Path) -> None:
    # A shell's background job ignores SIGINT, and its children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def query() -> None:
        with open_engine("duckdb", Source("log", "csv", Columns()), tmp_path, 1, None, None) as engine:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            engine._run("SELECT count(*) FROM range(1000000000000) r(n) WHERE hash(n) = 3")  # type: ignore[attr-defined]

    try:
        with pytest.raises(KeyboardInterrupt):
            query()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), duckdb.InterruptException("INTERRUPT Error: Interrupted!")])
def test_ctrl_c_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(arrays.ArrayWriter, "append", interrupted)
    log = write_csv(tmp_path / "log.csv", ROWS)
    flags = ["--min-user", "1", "--min-item", "1"]
    done = CliRunner().invoke(app, ["prepare", str(log), "--out", str(tmp_path / "out"), *flags])
    assert done.exit_code == 130
    assert done.stderr.strip().splitlines()[-1] == "trope: interrupted; nothing was written"
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]
