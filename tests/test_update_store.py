"""trope update from the store of trope serve, and what is told of it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from data_logs import loose, prepared, unnumbered, write_csv, write_parquet
from test_fit import invoke
from training import one_thread
from updates import LAST, NEW, ROWS, command, data, run, updated

import trope.server.store_log
from trope.cli.update import read_new
from trope.data.extend import extend, read_folder
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.server.schema import Event as Stored
from trope.server.sqlite_store import SqliteStore

__all__ = ["data", "one_thread", "run", "updated"]  # fixtures


def test_the_store_of_a_server_gives_the_same(run: Path, updated: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "events.sqlite")
    store.append([[Stored(str(user), item, time) for user, item, time in NEW[:4]]])
    store.append([[Stored(str(user), item, time) for user, item, time in NEW[4:]]])
    code, said = invoke(*command(run, store.path, tmp_path / "out"))  # the server may go on meanwhile
    store.close()
    assert code == 0 and "7 new events (0 more known already), 2 new users, 2 new items" in said
    assert unnumbered(Sequences.of_run(tmp_path / "out")) == unnumbered(Sequences.of_run(updated))
    # Later, with what came since: what was learned is known.
    store = SqliteStore(store.path)
    store.append([[Stored("3", 1, LAST + 50)]])
    store.close()
    code, said = invoke(*command(tmp_path / "out", store.path, tmp_path / "later"))
    assert code == 0 and "1 new event (7 more known already), 0 new users, 0 new items" in said


def test_a_server_may_have_users_that_are_no_integers(run: Path, updated: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "events.sqlite")
    store.append([[Stored(user, item, time) for user, item, time in [("ann", 7, LAST + 10), ("3", 7, LAST + 10)]]])
    store.close()
    code, said = invoke(*command(run, store.path, tmp_path / "out"))
    assert code == 0 and "2 new events (0 more known already), 1 new user, 0 new items" in said, said
    new, old = (read_folder(data.path, data.meta) for data in map(Sequences.of_run, (tmp_path / "out", run)))
    assert new.users == sorted(["ann", *map(str, old.users)])
    # A log with integers is still understood.
    log = write_parquet(tmp_path / "new.parquet", [(3, 7, LAST + 20)])
    code, said = invoke(*command(tmp_path / "out", log, tmp_path / "later"))
    assert code == 0 and "1 new event (0 more known already), 0 new users, 0 new items" in said, said


def test_a_stores_password_is_nowhere(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, where = SqliteStore(tmp_path / "events.sqlite"), "redis://:s3cret@127.0.0.1:6399/0?password=s3cret"
    monkeypatch.setattr(trope.server.store_log, "open_store", lambda *_, **__: SqliteStore(store.path))
    said = [invoke(*command(run, where, tmp_path / "none"))]
    store.append([[Stored("3", 7, LAST + 20)]])
    store.close()
    said += [invoke(*command(run, where, tmp_path / "out", *more)) for more in (["--time-unit", "s"], [])]
    said += [invoke(*command(tmp_path / "out", where, tmp_path / "later"))]
    assert [code for code, _ in said] == [2, 2, 0, 2], said
    written = (path.read_bytes() for path in (tmp_path / "out").rglob("*.json"))
    assert not any(b"s3cret" in text for text in (*(text.encode() for _, text in said), *written))
    assert "127.0.0.1" in said[-1][1]


@pytest.mark.parametrize("url", [
    "redis://:s3cret@127.0.0.1:1", "redis://127.0.0.1:1/0?password=s3cret", "unix:///nowhere.sock?password=s3cret",
    "redis://127.0.0.1:1/0?nothing=s3cret", "redis://:s3cret@127.0.0.1:what", "postgres://ann:s3cret@127.0.0.1:1/db",
])  # fmt: skip
def test_no_error_tells_a_password(run: Path, tmp_path: Path, url: str) -> None:
    for more in ([], ["--delimiter", ","], ["--table", "clicks"]):
        code, said = invoke(*command(run, url, tmp_path / "out", *more))
        assert code == 2 and "s3cret" not in said, said


def test_asking_for_a_store_needs_no_server() -> None:
    """A prepared dataset is enough for an update, and trope[serve] may not be installed."""
    asked = "import trope.server.store_log, trope.server.open_store as stores; stores.is_store('a.csv')"
    seen = "import sys; print({'orjson', 'redis'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{asked}; {seen}"], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_text_among_users_that_are_integers_is_refused_in_a_log(run: Path, tmp_path: Path) -> None:
    log = write_csv(tmp_path / "new.csv", [("ann", 7, LAST + 10)])
    code, said = invoke(*command(run, log, tmp_path / "out"))
    assert code == 2 and "has the user 'ann', and all users of the dataset are integers" in said, said


def test_a_database_without_tables_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE x (y)")
        database.execute("DROP TABLE x")
    database.close()
    before = path.read_bytes()
    code, said = invoke(*command(run, path, tmp_path / "out"))
    assert code == 2 and "has no event" in said and path.read_bytes() == before


def test_what_a_store_has_of_one_second_is_a_basket(tmp_path: Path) -> None:
    rows = [(user, f"i{item}", 1_500_000_000 + 1_000 * n) for n, (user, item, _) in enumerate(ROWS[:40])]
    log = write_parquet(tmp_path / "log.parquet", rows, basket=[f"b{n}" for n in range(40)])
    data = prepared(log, tmp_path / "data", loose(protocol=Protocol("loo-paper")), basket_col="basket")
    user, bought = str(ROWS[0][0]), [("i1", 1_600_000_000), ("new", 1_600_000_000), ("i2", 1_600_000_005)]
    store = SqliteStore(tmp_path / "events.sqlite")
    store.append([[Stored(user, item, time) for item, time in bought]])
    store.close()
    before = read_folder(data.path, data.meta)
    columns = dict.fromkeys(("user_col", "time_unit", "time_format"))
    new = read_new(str(store.path), data, tmp_path, "fail", columns)
    assert new.users == [ROWS[0][0]] and sorted(map(str, new.items)) == ["i1", "i2", "new"]
    assert new.baskets_N is not None and new.baskets_N.tolist() == [0, 0, 1]
    assert new.baskets == [1_600_000_000, 1_600_000_005]
    assert extend(before, new, "the store").added == 3
    with pytest.raises(ValueError, match="leave out --time-unit"):
        read_new(str(store.path), data, tmp_path, "fail", {**columns, "time_unit": "s"})
