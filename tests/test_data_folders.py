"""What `trope prepare` and `trope generate` may replace, where they write, and what a full disk or a rival does."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ibis
import pyarrow.parquet as pq
import pytest
from data_logs import START, loose, prepared, random_log, write_csv, write_parquet

from trope.data.prepare import Options, prepare
from trope.data.sources.resolve import Request, resolve
from trope.data.synthetic import CalendarShop, write_events

ROWS = [(1, n, START + n) for n in range(8)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(source: Path | str, out: Path, message: str, options: Options | None = None, **settings: object) -> str:
    """Preparing raises one line, and changes nothing in the output's folder; returns the line."""
    before = contents(out.parent)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        prepared(source, out, options, **settings)
    assert contents(out.parent) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


FOREIGN = [
    "{}", "[]", '"x"', "not JSON", "", '{"format": 1}', '{"format": "1", "arrays": {}, "checksum": ""}', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("meta", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_folder_with_a_meta_json_is_not_replaced(tmp_path: Path, meta: str) -> None:
    out = tmp_path / "site"
    out.mkdir()
    (out / "meta.json").write_text(meta)
    refused(write_parquet(tmp_path / "log.parquet", ROWS), out, "not a prepared dataset", overwrite=True)


@pytest.mark.parametrize("name", ["thesis.tex", "notes/a.txt", ".hidden", "items.npy.bak", "items.npy/inside"])
def test_a_dataset_with_something_foreign_inside_is_not_replaced(tmp_path: Path, name: str) -> None:
    log, out = write_parquet(tmp_path / "log.parquet", ROWS), tmp_path / "out"
    prepared(log, out)
    foreign = out / name
    if foreign.parent.is_file():
        foreign.parent.unlink()
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("precious")
    said = refused(log, out, "which trope prepare did not write", overwrite=True)
    assert name.partition("/")[0] in said


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_source_inside_the_output_is_refused(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    prepared(write_parquet(tmp_path / "log.parquet", ROWS), out)
    inside = write_parquet(out / "log.parquet", ROWS)
    (tmp_path / "link.parquet").symlink_to(inside)
    for source in (inside, out, tmp_path / "link.parquet"):
        refused(source, out, "lies inside --out", overwrite=overwrite)
    (tmp_path / "same").symlink_to(out)
    refused(inside, tmp_path / "same", "lies inside --out", overwrite=overwrite)


def test_a_database_inside_the_output_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared(write_parquet(tmp_path / "log.parquet", ROWS), out)
    connection = ibis.duckdb.connect(out / "shop.duckdb")
    connection.create_table("clicks", pq.read_table(tmp_path / "log.parquet"))
    connection.disconnect()
    refused(f"duckdb://{out}/shop.duckdb", out, "lies inside --out", overwrite=True, table="clicks")


def test_an_output_inside_the_source_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    (folder / "deep").mkdir(parents=True)
    log = write_csv(folder / "deep" / "log.csv", ROWS)
    for out in (folder / "out", folder / "deep" / "out", folder / "new" / "out"):
        with pytest.raises(ValueError, match="lies inside the source"):
            prepared(folder, out)
    assert list(contents(tmp_path)) == ["logs/deep/log.csv"]
    assert prepared(log, folder / "out").num_events == 8  # beside a file is fine


def test_a_folder_that_turned_foreign_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    log, out = write_parquet(tmp_path / "log.parquet", ROWS), tmp_path / "out"

    def make_foreign(stage: str, share: float | None) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_text("precious")

    with pytest.raises(FileExistsError, match="not a prepared dataset"):
        prepare(resolve(Request(str(log))), out, loose(), overwrite=True, progress=make_foreign)
    assert contents(tmp_path).keys() == {"log.parquet", "out/thesis.tex"}


def test_of_two_preparations_into_one_new_folder_the_later_refuses(tmp_path: Path) -> None:
    first, second = (write_parquet(tmp_path / f"{n}.parquet", ROWS[n:]) for n in (0, 1))
    out = tmp_path / "out"

    def rival(stage: str, share: float | None) -> None:
        if not out.exists():
            prepared(first, out)

    with pytest.raises(FileExistsError, match="another process made it meanwhile"):
        prepare(resolve(Request(str(second))), out, loose(), progress=rival)
    assert prepared(first, tmp_path / "same").meta == json.loads((out / "meta.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.parquet", "1.parquet", "out", "same"]


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_a_dataset_gets_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    log, before = write_parquet(tmp_path / "log.parquet", ROWS), os.umask(umask)
    try:
        prepared(log, tmp_path / "out")
        write_events(tmp_path / "shop", CalendarShop(users=50), progress=False)
        write_events(tmp_path / "shop.parquet", CalendarShop(users=50), progress=False)
    finally:
        os.umask(before)
    for made in ("out", "shop"):
        assert (tmp_path / made).stat().st_mode & 0o777 == 0o777 & ~umask
    for path in (*(tmp_path / "out").iterdir(), *(tmp_path / "shop").iterdir(), *tmp_path.glob("shop.*")):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every file may have `size` bytes; a write past that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The engine's file cannot be made, cannot take a table, and has room where the largest array has none.
@pytest.mark.parametrize("size", [5_000, 50_000, 400_000])
def test_a_disk_that_fills_up_is_one_line(tmp_path: Path, size: int) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log(60_000, users=2_000, items=500))
    with largest_file(size):
        refused(log, tmp_path / "out", "^no space left .*free some", Options())


def test_a_shop_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    for name in ("shop", "shop.parquet"):
        with largest_file(5_000), pytest.raises(ValueError, match="no space left while writing"):
            write_events(tmp_path / name, CalendarShop(users=2_000), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_only_a_generated_log_is_replaced_by_another(tmp_path: Path) -> None:
    shop = CalendarShop(users=50)
    folder = write_events(tmp_path / "shop", shop, progress=False)
    file = write_parquet(tmp_path / "log.parquet", ROWS)  # a log of the user's own
    (folder / "thesis.tex").write_text("precious")
    before = contents(tmp_path)
    for path in (folder, file):
        with pytest.raises(FileExistsError, match="not a generated log"):
            write_events(path, shop, overwrite=True, progress=False)
    (folder / "thesis.tex").unlink()
    (folder / "_ground_truth.json").write_text('{"of": "another tool"}')
    with pytest.raises(FileExistsError, match="not a generated log"):
        write_events(folder, shop, overwrite=True, progress=False)
    (tmp_path / "log.truth.json").write_text("[]")
    with pytest.raises(FileExistsError, match="not a generated log"):
        write_events(file, shop, overwrite=True, progress=False)
    assert contents(tmp_path)["log.parquet"] == before["log.parquet"]


def test_a_shop_that_appeared_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trope.data.synthetic import write

    shop, real = CalendarShop(users=50), write.ground_truth
    for path in (tmp_path / "shop", tmp_path / "shop.parquet"):

        def rival(given: CalendarShop, path: Path = path) -> object:
            monkeypatch.setattr(write, "ground_truth", real)
            write_events(path, CalendarShop(users=60), progress=False)
            return real(given)

        monkeypatch.setattr(write, "ground_truth", rival)
        with pytest.raises(FileExistsError, match="exists"):
            write_events(path, shop, progress=False)
        assert len(pq.read_table(path, columns=["user"])["user"].unique()) == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop", "shop.parquet", "shop.truth.json"]


SECRETS = [
    "postgres://ann:hunter2@db.example/shop",
    "postgres://db.example/shop?user=ann&password=hunter2",
    "postgres://db.example/shop?password=a@hunter2",
    "postgres://ann:p?hunter2@db.example/shop",
    "postgres://ann:p#hunter2@db.example/shop",
    "postgres://ann:p/hunter2@db.example/shop",
    "postgres://db.example/shop#hunter2",
    "mssql://db.example;PWD=hunter2",
    "postgres://ann:hunter%32@db.example/shop",
    "nosuch://ann:hunter2@db.example/shop?token=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_secret_of_a_url_is_shown(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def says_all(resource: str) -> None:
        raise RuntimeError(f"cannot reach {resource}: password 'hunter2' of {url} was refused\nand more")

    with pytest.raises(ValueError, match="is a connection") as caught:
        resolve(Request(url))
    said = [str(caught.value)]
    source = resolve(Request(url, table="clicks"))
    said += [source.name, repr(source)]
    for connect in (ibis.connect, says_all):
        monkeypatch.setattr(ibis, "connect", connect)
        if "postgres" in url and connect is not says_all:
            continue  # it would ask the network
        said.append(refused(url, tmp_path / "out", "^cannot connect to ", table="clicks"))
    for line in said:
        assert "hunter" not in line


def test_the_query_of_a_url_is_not_recorded(tmp_path: Path) -> None:
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    connection.create_table("clicks", pq.read_table(write_parquet(tmp_path / "log.parquet", ROWS)))
    connection.create_table("bad", ibis.memtable({"user": ["x"], "item": [1], "timestamp": ["hunter2"]}))
    connection.disconnect()
    url = f"duckdb://{tmp_path}/shop.duckdb?threads=2&custom_user_agent=hunter2"
    prepared(url, tmp_path / "out", table="clicks")
    meta = (tmp_path / "out" / "meta.json").read_text()
    assert "hunter2" not in meta and "threads" not in meta
    assert "hunter2" not in refused(url, tmp_path / "other", "no table 'hunter2'|no table '", table="none")


@pytest.mark.parametrize("scheme", ["duckdb", "sqlite"])
def test_a_missing_database_file_is_refused_and_not_created(tmp_path: Path, scheme: str) -> None:
    refused(f"{scheme}://{tmp_path}/shop.db", tmp_path / "out", "no database file at .*shop.db", table="clicks")
    refused(f"{scheme}://{tmp_path}/shop.db?x=hunter2", tmp_path / "out", "no database file", table="clicks")
    (tmp_path / "folder.db").mkdir()
    refused(f"{scheme}://{tmp_path}/folder.db", tmp_path / "out", "no database file at", table="clicks")


def test_a_failing_query_of_a_database_is_one_line(tmp_path: Path) -> None:
    connection = ibis.duckdb.connect(tmp_path / "shop.duckdb")
    connection.raw_sql("CREATE VIEW clicks AS SELECT 1 AS user, error('hunter2') AS item, 1600000000 AS timestamp")
    connection.disconnect()
    url = f"duckdb://{tmp_path}/shop.duckdb?custom_user_agent=hunter2"
    assert "hunter2" not in refused(url, tmp_path / "out", "cannot read duckdb://", table="clicks")
