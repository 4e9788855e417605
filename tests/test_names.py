"""Item names from a file: `trope prepare --items`, and their way through a run to the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, loose, prepared, random_log, write_parquet
from test_recommender import NOW, make_run
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.item_names import read_names
from trope.serve.recommender import Recommender

ROWS = [("1", "Bread"), ("2", "Milk \x1b[2J\n2 l"), ("3", ""), ("2", "Milk again"), ("99", "Sofa")]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("log") / "log.parquet", random_log())


def write(path: Path, rows: list[tuple[Any, str]], columns: tuple[str, str] = ("item", "name")) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({columns[0]: [row[0] for row in rows], columns[1]: [row[1] for row in rows]}), path)
    else:
        pd.DataFrame(rows, columns=list(columns)).to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.mark.parametrize("name", ["items.csv", "items.tsv", "items.csv.gz", "items.parquet"])
@pytest.mark.parametrize("columns", [("item", "name"), ("sku", "title")])
def test_every_kind_of_file_gives_the_same_names(tmp_path: Path, name: str, columns: tuple[str, str]) -> None:
    found = read_names(write(tmp_path / name, ROWS, columns), "sku")
    assert found.by_id == {"1": "Bread", "2": r"Milk \x1b[2J\n2 l", "99": "Sofa"} and found.repeated == 1


def test_integers_of_a_parquet_file_are_their_text(tmp_path: Path) -> None:
    assert read_names(write(tmp_path / "items.parquet", [(7, "Jam")]), "item").by_id == {"7": "Jam"}


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        (
            "items.csv",
            ("article", "name"),
            "'item_id' or 'id' for the id; it has article, name: rename",
        ),
        (
            "items.csv",
            ("item", "text"),
            "'item_name' or 'title' for the name; it has item, text: name it with --name-col",
        ),
        ("items.xlsx", ("item", "name"), "cannot tell what items.xlsx holds; give a .csv, .tsv or .parquet"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, columns: tuple[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_names(write(tmp_path / name, ROWS, columns), "sku")


def test_semicolons_are_named(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item;name\n1;Bread\n")
    with pytest.raises(ValueError, match=r"items.csv has semicolons between its fields; write commas, or tabs"):
        read_names(tmp_path / "items.csv", "item")


def test_damaged_and_absent_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "items.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "items.csv").write_bytes(b"item,name\n1,\xff\xfe\n")
    for name in ("items.parquet", "items.csv"):
        with pytest.raises(ValueError, match="cannot read") as error:
            read_names(tmp_path / name, "item")
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_names(tmp_path / "nothing.csv", "item")
    floats = pa.table({"item": [1.0, 2.0], "name": ["a", "b"]})
    pq.write_table(floats, tmp_path / "floats.parquet")
    with pytest.raises(ValueError, match="must hold integers or text, got double"):
        read_names(tmp_path / "floats.parquet", "item")


def test_names_are_stored_counted_and_said(tmp_path: Path, log: Path) -> None:
    items = write(tmp_path / "items.csv", ROWS)
    arguments = ["prepare", str(log), "--out", str(tmp_path / "data"), "--items", str(items)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    said = "2 of 15 items by items.csv; it has 1 id not among the items; it has 1 row with an id that it had before"
    assert said in result.output
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    assert meta["names"] == {"file": "items.csv", "named": 2, "unknown": 1, "repeated": 1}


def test_a_column_of_names_by_its_name(tmp_path: Path, log: Path) -> None:
    file = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item": [1], "Description": ["Bread"], "name": ["no"]}), file)
    names = prepared(log, tmp_path / "data", items=file, name_col="Description").ids("item_names")
    assert names is not None and names[0] == "Bread"
    with pytest.raises(
        ValueError, match="one column 'Text' for the name; it has item, Description, name: name it with"
    ):
        prepared(log, tmp_path / "other", items=file, name_col="Text")
    with pytest.raises(ValueError, match="--name-col Text is a column of the file of item names; give that with"):
        prepared(log, tmp_path / "other", name_col="Text")
    flags = ("--out", str(tmp_path / "command"), "--items", str(file), "--name-col", "Description")
    assert CliRunner().invoke(app, ["prepare", str(log), *flags]).exit_code == 0


def test_without_items_nothing_changes(tmp_path: Path, log: Path) -> None:
    plain = prepared(log, tmp_path / "plain")
    named = prepared(log, tmp_path / "named", items=write(tmp_path / "items.csv", ROWS))
    assert "names" not in plain.meta and plain.ids("item_names") is None
    assert plain.meta["checksum"] != named.meta["checksum"]
    for array in ("items", "times", "offsets", "splits"):
        assert plain.meta["arrays"][array] == named.meta["arrays"][array]


def test_a_file_goes_before_the_sources_own_names(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "movies.dat").write_text("1::Film 1::Drama\n2::Film 2::Drama\n", encoding="latin-1")
    rows = [(1, 1 + n % 2, START + n) for n in range(9)]
    (raw / "ratings.dat").write_text("".join(f"{u}::{i}::5::{t}\n" for u, i, t in rows), encoding="latin-1")
    data = prepared("ml-1m", tmp_path / "data", loose(), raw=raw, items=write(tmp_path / "items.csv", [("2", "Jaws")]))
    names = data.ids("item_names")
    assert names is not None and names.to_list() == ["Film 1", "Jaws"]


def test_the_file_must_not_lie_where_the_dataset_goes(tmp_path: Path, log: Path) -> None:
    (tmp_path / "data").mkdir()
    items = write(tmp_path / "data" / "items.csv", ROWS)
    with pytest.raises((ValueError, FileExistsError)):
        prepared(log, tmp_path / "data", items=items, overwrite=True)
    assert items.is_file()


def test_names_come_with_the_answers(tmp_path: Path, log: Path) -> None:
    """By table and by terminal; an item without a name is shown by its id."""
    data = prepared(log, tmp_path / "data", items=write(tmp_path / "items.csv", ROWS))
    run = make_run(data, tmp_path / "run")
    events = pd.DataFrame(random_log(), columns=["user_id", "item_id", "timestamp"])
    out = Recommender.from_pretrained(run, device="cpu").recommend(events, NOW, k=15)
    assert list(out.columns) == ["user_id", "item_id", "score", "rank", "name"]
    expected = {1: "Bread", 2: r"Milk \x1b[2J\n2 l"}
    assert all(name == expected.get(item, str(item)) for item, name in zip(out["item_id"], out["name"], strict=True))
    result = CliRunner().invoke(app, ["recommend", str(run), "--user", "7", "--at", str(NOW), "-k", "15"])
    assert result.exit_code == 0, result.output
    assert "Bread" in result.output and "\x1b" not in result.output
    assert any(line.split()[1:3] == ["5", "5"] for line in result.output.splitlines() if line.strip())
