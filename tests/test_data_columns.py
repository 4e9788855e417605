"""Which columns are read where nobody names them."""

from __future__ import annotations

import json
from pathlib import Path

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import array_hashes, prepared, random_log, write_csv

ROWS = random_log(60)


def write_log(path: Path, columns: tuple[str, ...]) -> Path:
    """A log with these columns before `timestamp`; a user column holds users, any other holds items."""
    place = {"user": 0, "user_id": 0, "item": 1, "item_id": 1, "page": 1}
    table = {name: [row[place[name]] for row in ROWS] for name in columns} | {"timestamp": [row[2] for row in ROWS]}
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    elif path.suffix == ".jsonl":
        lines = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        lines = [",".join(map(str, values)) for values in zip(*table.values(), strict=True)]
        path.write_text("\n".join([",".join(table), *lines]) + "\n")
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_the_names_of_our_own_answers_are_read_too(tmp_path: Path, kind: str) -> None:
    expected = prepared(write_csv(tmp_path / "plain.csv", ROWS), tmp_path / "plain")
    for number, columns in enumerate([("user_id", "item_id"), ("item", "user_id"), ("user", "item_id")]):
        data = prepared(write_log(tmp_path / f"{number}.{kind}", columns), tmp_path / str(number))
        assert array_hashes(data) == array_hashes(expected)
        assert set(data.meta["source"]["columns"].values()) == {*columns, "timestamp"}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_user_and_item_go_first(tmp_path: Path, kind: str) -> None:
    log = write_log(tmp_path / f"log.{kind}", ("user_id", "item_id", "item", "user"))
    columns = prepared(log, tmp_path / "out").meta["source"]["columns"]
    assert columns == {"user": "user", "item": "item", "time": "timestamp"}


def test_a_json_line_without_a_user_is_no_reason_for_another_column(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ("user", "item"))
    log.write_text('[1]\nno JSON\n{"user_id": 5, "item": 1}\n' + log.read_text())
    with pytest.raises(ValueError, match="user is missing"):
        prepared(log, tmp_path / "out")


def test_a_table_of_a_database(tmp_path: Path) -> None:
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    connection.create_table("clicks", pq.read_table(write_log(tmp_path / "log.parquet", ("user_id", "item_id"))))
    connection.create_table("views", pq.read_table(write_log(tmp_path / "views.parquet", ("item_id",))))
    connection.disconnect()
    url = f"duckdb://{tmp_path}/shop.duckdb"
    columns = prepared(url, tmp_path / "out", table="clicks").meta["source"]["columns"]
    assert columns == {"user": "user_id", "item": "item_id", "time": "timestamp"}
    with pytest.raises(ValueError, match="views has no column 'user' or 'user_id' for the user; it has item_id"):
        prepared(url, tmp_path / "views", table="views")


def test_a_column_that_is_named_is_the_only_one(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", ("user_id", "page"))
    with pytest.raises(ValueError, match="has no column 'user' for the user"):
        prepared(log, tmp_path / "out", user_col="user", item_col="page")
    with pytest.raises(ValueError, match="has no column 'item' or 'item_id' for the item"):
        prepared(log, tmp_path / "out")
    with pytest.raises(ValueError, match="has no column 'user' or 'user_id' for the user"):  # taken: it is the item
        prepared(log, tmp_path / "out", item_col="user_id")


@pytest.mark.parametrize("columns", [{}, {"user_col": "196", "item_col": "242", "time_col": "881250949"}])
def test_a_first_line_that_is_an_event(tmp_path: Path, columns: dict[str, str]) -> None:
    (tmp_path / "u.tsv").write_text("196\t242\t3.5\t881250949\n186\t302\t3\t891717742\n")
    with pytest.raises(ValueError, match=r"looks like data, not a header \(196, 242, 3.5, 881.*; add a header line"):
        prepared(tmp_path / "u.tsv", tmp_path / "out", **columns)


def test_a_first_line_that_may_be_an_event(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("u259,255,874724710\nu259,286,874724727\n")
    with pytest.raises(
        ValueError, match=r"it has u259, 255, 874724710: .*; if that line is data, add a header such as"
    ):
        prepared(tmp_path / "log.csv", tmp_path / "out")


def test_numbers_from_0_on_are_a_header(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", ROWS)
    log.write_text(log.read_text().replace("user,item,timestamp", "0,1,2", 1))
    assert prepared(log, tmp_path / "out", user_col="0", item_col="1", time_col="2").num_events == len(ROWS)
    with pytest.raises(ValueError, match="it has 0, 1, 2: name it with --user-col"):
        prepared(log, tmp_path / "other")
