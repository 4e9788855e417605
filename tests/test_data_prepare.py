"""Preparation against a plain Python version, and the promise of the same bytes from the same log."""

from __future__ import annotations

import gzip
import random
import shutil
import tempfile
from pathlib import Path

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import (
    START,
    Event,
    array_hashes,
    core,
    events,
    loose,
    prepared,
    prepared_plainly,
    random_log,
    sequences_of,
    unnumbered,
    write_csv,
    write_parquet,
)
from hypothesis import HealthCheck, given, settings

from trope.data.folder import checksum_of
from trope.data.prepare import Options
from trope.data.protocols import Protocol

QUICK = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(rows=events(min_size=30))
def test_it_equals_the_plain_version_ties_included(rows: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = write_parquet(Path(folder) / "log.parquet", [*rows, *[(9, item, START) for item in (3, 1, 2)]])
        data = prepared(log, Path(folder) / "out")
        assert unnumbered(data) == sequences_of([*rows, *[(9, item, START) for item in (3, 1, 2)]])
        assert array_hashes(prepared_plainly(log, Path(folder) / "plain")) == array_hashes(data)


@QUICK
@given(rows=events(min_size=40, max_size=80))
def test_the_core_is_a_fixed_point(rows: list[Event]) -> None:
    expected = core(rows, 4, 5)
    with tempfile.TemporaryDirectory() as folder:
        log = write_parquet(Path(folder) / "log.parquet", rows)
        options = Options(protocol=Protocol("loo-paper"), min_user=4, min_item=5)
        if not expected:
            with pytest.raises(ValueError, match="left after filtering"):
                prepared(log, Path(folder) / "out", options)
            return
        assert unnumbered(prepared(log, Path(folder) / "out", options)) == sequences_of(expected)


def test_the_core_needs_many_rounds_on_a_chain(tmp_path: Path) -> None:
    # User n shares an item with user n + 1: each removal frees the next, so a fixed point takes a round a link.
    chain = [(n, item, START + n) for n in range(12) for item in (n, n + 1)]
    solid = [(user, item, START + item) for user in (100, 101, 102) for item in (200, 201, 202)]
    data = prepared(
        write_parquet(tmp_path / "log.parquet", chain + solid), tmp_path / "out", Options(min_user=2, min_item=2)
    )
    assert unnumbered(data) == sequences_of(core(chain + solid, 2, 2)) == sequences_of(solid)


def test_one_pass_counts_once(tmp_path: Path) -> None:
    rows = random_log(140, users=20, items=20, seed=1)
    log = write_parquet(tmp_path / "log.parquet", rows)
    once = prepared(log, tmp_path / "once", Options(once=True))
    assert unnumbered(once) == sequences_of(core(rows, 5, 5, once=True))
    assert once.meta["filters"]["core"] == "once"
    assert once.num_events > prepared(log, tmp_path / "fixed", Options()).num_events


def test_two_runs_and_two_thread_counts_give_the_same_bytes(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log(200_000, users=5_000, items=900, spread=5_000))
    runs = [prepared(log, tmp_path / f"out{n}", Options(), threads=threads) for n, threads in enumerate((1, 2, 4, 4))]
    assert len({run.meta["checksum"] for run in runs}) == 1
    for run in runs[1:]:
        assert (run.path / "meta.json").read_bytes() == (runs[0].path / "meta.json").read_bytes()


def test_shuffled_rows_with_distinct_times_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [(user, item, START + n) for n, (user, item, _) in enumerate(random_log())]
    shuffled = random.Random(1).sample(rows, len(rows))
    first = prepared(write_parquet(tmp_path / "a.parquet", rows), tmp_path / "first")
    second = prepared(write_parquet(tmp_path / "b.parquet", shuffled), tmp_path / "second")
    assert array_hashes(first) == array_hashes(second)


def test_ties_keep_the_order_of_files_and_rows(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    for name, items in (("b", [5, 1, 4]), ("a", [9, 2, 7])):
        pq.write_table(pa.table({"user": [1] * 3, "item": items, "timestamp": [START] * 3}), folder / f"{name}.parquet")
    assert [item for item, _ in unnumbered(prepared(folder, tmp_path / "out"))[1]] == [9, 2, 7, 5, 1, 4]


@pytest.mark.parametrize("form", ["csv", "tsv", "csv.gz", "csv.zst", "folder", "glob"])
def test_every_form_of_one_log_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    rows = random_log(300, spread=50)
    expected = array_hashes(prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "expected"))
    source: Path | str = tmp_path / f"log.{form}"
    if form in ("csv", "tsv"):
        write_csv(tmp_path / f"log.{form}", rows, delimiter="\t" if form == "tsv" else ",")
    elif form in ("csv.gz", "csv.zst"):
        plain = write_csv(tmp_path / "plain.csv", rows)
        with (
            plain.open("rb") as reading,
            pa.output_stream(str(source), compression={"csv.gz": "gzip", "csv.zst": "zstd"}[form]) as writing,
        ):
            shutil.copyfileobj(reading, writing)
    else:
        source = tmp_path / "parts"
        source.mkdir()
        for part, first in enumerate(range(0, 300, 110)):
            write_parquet(source / f"{part}.parquet", rows[first : first + 110])
        source = source if form == "folder" else f"{source}/*.parquet"
    assert array_hashes(prepared(source, tmp_path / "out")) == expected


def test_text_ids_keep_their_spelling(tmp_path: Path) -> None:
    rows = [("b", "007", START), ("b", "7", START + 1), ("é", "07", START + 2), ("b", "7", START + 3)]
    data = prepared(write_csv(tmp_path / "log.csv", rows), tmp_path / "out", loose(protocol=Protocol("loo-paper")))
    assert unnumbered(data) == sequences_of(rows)
    users, items = data.ids("user_ids"), data.ids("item_ids")
    assert users is not None
    assert items is not None
    assert (users.to_list(), items.to_list()) == (["b", "é"], ["007", "07", "7"])
    assert (users.find("é"), users.find("c"), items.find("7")) == (1, None, 2)


@pytest.mark.parametrize(("unit", "ticks"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_units_are_cut_to_seconds_but_sort_by_themselves(tmp_path: Path, unit: str, ticks: int) -> None:
    times = [START * ticks + ticks - 1, START * ticks, (START + 5) * ticks]
    log = write_parquet(
        tmp_path / "log.parquet", [(1, item, time) for item, time in zip((3, 1, 2), times, strict=True)]
    )
    data = prepared(log, tmp_path / "out", time_unit=unit)
    expected = [(3, START), (1, START), (2, START + 5)] if unit == "s" else [(1, START), (3, START), (2, START + 5)]
    assert unnumbered(data)[1] == expected


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamp_columns_need_no_unit(tmp_path: Path, unit: str) -> None:
    ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array([(START + n) * ticks for n in range(3)], pa.timestamp(unit))
    pq.write_table(pa.table({"user": [1] * 3, "item": [1, 2, 3], "timestamp": times}), tmp_path / "log.parquet")
    assert unnumbered(prepared(tmp_path / "log.parquet", tmp_path / "out"))[1] == [(n + 1, START + n) for n in range(3)]


def test_dates_as_text(tmp_path: Path) -> None:
    dates = ["2020-09-13T12:26:40Z", "2020-09-13 12:26:41", "2020-09-13T14:26:42+02:00"]
    log = write_csv(tmp_path / "log.csv", [(1, n, date) for n, date in enumerate(dates)])  # type: ignore[misc]
    assert unnumbered(prepared(log, tmp_path / "out", time_unit="iso"))[1] == [(n, START + n) for n in range(3)]


def test_event_types_and_time_range(tmp_path: Path) -> None:
    rows = [(1, n, START + n) for n in range(10)]
    kinds = ["view", "buy"] * 5
    log = write_parquet(tmp_path / "log.parquet", rows, kind=kinds)
    options = loose(event_types=("buy",), since=START + 2, until=START + 9)
    assert [item for item, _ in unnumbered(prepared(log, tmp_path / "out", options, event_col="kind"))[1]] == [3, 5, 7]


def test_baskets_are_numbered_and_named(tmp_path: Path) -> None:
    rows = [(user, n, START + n // 2) for user in (1, 2) for n in range(6)]
    log = write_parquet(tmp_path / "log.parquet", rows, order=[f"o{user}{n // 2}" for user in (1, 2) for n in range(6)])
    data = prepared(log, tmp_path / "out", loose(protocol=Protocol("next-basket")), basket_col="order")
    assert data.baskets is not None
    assert data.baskets.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert data.meta["counts"]["baskets"] == 6
    baskets = data.ids("basket_ids")
    assert baskets is not None
    assert baskets.to_list() == ["o10", "o11", "o12", "o20", "o21", "o22"]


def test_a_warehouse_table_by_url(tmp_path: Path) -> None:
    rows = [(user, item, START + n) for n, (user, item, _) in enumerate(random_log())]
    expected = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "expected")
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    connection.create_table("clicks", pq.read_table(tmp_path / "log.parquet"))
    connection.disconnect()
    data = prepared(f"duckdb://{tmp_path}/shop.duckdb", tmp_path / "out", table="clicks")
    assert array_hashes(data) == array_hashes(expected)


def test_a_table_of_a_schema_and_one_with_a_dot_in_its_name(tmp_path: Path) -> None:
    rows = [(user, item, START + n) for n, (user, item, _) in enumerate(random_log())]
    expected = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "expected")
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    connection.create_database("web")
    connection.create_table("clicks", pq.read_table(tmp_path / "log.parquet"), database="web")
    connection.create_table("web.shop", pq.read_table(tmp_path / "log.parquet"))
    connection.disconnect()
    for table in ("web.clicks", "web.shop"):
        data = prepared(f"duckdb://{tmp_path}/shop.duckdb", tmp_path / table, table=table)
        assert array_hashes(data) == array_hashes(expected)


def test_json_lines_beside_gzip(tmp_path: Path) -> None:
    rows = random_log(60)
    expected = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "expected")
    with gzip.open(tmp_path / "log.jsonl.gz", "wt") as file:
        file.writelines(f'{{"user": {u}, "item": "{i}", "timestamp": {t}, "text": "a,b"}}\n' for u, i, t in rows)
    assert array_hashes(prepared(tmp_path / "log.jsonl.gz", tmp_path / "out")) == array_hashes(expected)


@settings(QUICK, max_examples=3)
@given(rows=events(min_size=40, max_size=80))
def test_every_row_is_kept_or_counted_as_dropped(rows: list[Event]) -> None:
    # Users 7 to 9 and item 99 are seen once, so that the filter always has something to take.
    rows = [*rows, *[(user, 99, START + 4) for user in (7, 8, 9)], *[(1, n, START + 4) for n in range(1, 7)] * 5]
    kinds: list[str | None] = [("view", "buy", "like", None)[n % 4] for n in range(len(rows))]
    chosen = [row for row, kind in zip(rows, kinds, strict=True) if kind in ("view", "buy")]
    inside = [row for row in chosen if START + 2 <= row[2] < START + 7]
    left = core(inside, 2, 3)
    options = Options(
        protocol=Protocol("loo-paper"), min_user=2, min_item=3, event_types=("view", "buy"), since=START + 2,
        until=START + 7, on_bad="skip",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bad = [(1, 1, 0)] * 3
        log = write_parquet(Path(folder) / "log.parquet", [*rows, *bad], kind=[*kinds, "buy", "view", None])
        meta = prepared(log, Path(folder) / "out", options, event_col="kind").meta
    found = meta["dropped"]
    assert found["rows"] == {
        "without_group": 0,
        "bad": 3,
        "other_event": len(rows) - len(chosen),
        "before_since": sum(row[2] < START + 2 for row in chosen),
        "from_until": sum(row[2] >= START + 7 for row in chosen),
        "core": len(inside) - len(left),
    }
    assert meta["source"]["rows"] == sum(found["rows"].values()) + meta["counts"]["events"]
    for side, name in enumerate(("users", "items")):
        assert found["core"][name] == [len({row[side] for row in part}) for part in (inside, left)]
    assert found["core"]["events"] == [len(inside), len(left)]


@pytest.mark.parametrize("once", [False, True])
def test_what_was_dropped_does_not_change_the_checksum(tmp_path: Path, once: bool) -> None:
    meta = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "out", Options(once=once)).meta
    assert meta["dropped"]["core"] == {"users": [20, 20], "items": [15, 15], "events": [400, 400]}
    assert checksum_of({key: value for key, value in meta.items() if key != "dropped"}) == meta["checksum"]


def test_without_a_filter_nothing_is_counted(tmp_path: Path) -> None:
    found = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "out").meta["dropped"]
    assert found == {"rows": dict.fromkeys(found["rows"], 0), "core": None}
