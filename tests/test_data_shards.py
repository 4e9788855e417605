"""Shards: the same dataset in several folders, each whole or absent, and every reader takes it as one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_csv, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.engines import duckdb as duckdb_engine
from trope.data.engines.shard_tables import KEYS, cut
from trope.data.extend import extend, read_folder, write_extended
from trope.data.folder import checksum_of, read_meta, shard_folder
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.shards import ShardJob, in_order
from trope.data.stream import Stream

BASKETS = [f"b{n // 3}" for n in range(900)]


def log_of(folder: Path, text: bool = False) -> Path:
    rows = random_log(900, users=40, items=15, spread=3_000)
    if text:
        return write_csv(folder / "log.csv", [(f"ü{user}", f"i{item}", time) for user, item, time in rows])
    return write_parquet(folder / "log.parquet", rows, basket=BASKETS)


def same(one: Sequences, other: Sequences) -> None:
    """Two stores hold the same events, splits and ids."""
    assert one._tensors.keys() == other._tensors.keys()
    for name, tensor in one._tensors.items():
        assert torch.equal(tensor, other._tensors[name]), name
    for name in ("user_ids", "item_ids", "basket_ids"):
        ids = one.ids(name), other.ids(name)
        assert [each and each.to_list() for each in ids[:1]] == [each and each.to_list() for each in ids[1:]], name


@pytest.mark.parametrize("protocol", ["loo-strict", "loo-paper", "holdout", "next-basket"])
@pytest.mark.parametrize("kind", ["numbers and baskets", "text"])
def test_shards_hold_what_one_folder_holds(tmp_path: Path, protocol: str, kind: str) -> None:
    log, text = log_of(tmp_path, kind == "text"), kind == "text"
    how = Protocol(protocol, window=600 if protocol == "holdout" else None)
    extra = {} if text else {"basket_col": "basket"}
    whole = prepared(log, tmp_path / "whole", loose(protocol=how), **extra)
    sharded = prepared(log, tmp_path / "sharded", loose(protocol=how, shard_users=7), **extra)
    same(whole, sharded)
    assert len(sharded.meta["shards"]) == 6 and sharded.meta["shard_users"] == 7
    kept = ("source", "filters", "counts", "protocol", "time_span", "bad_rows", "dropped", "paper", "made_by")
    assert [whole.meta[key] for key in kept] == [sharded.meta[key] for key in kept]


def test_fewer_users_than_a_shard_may_have_are_one_shard(tmp_path: Path) -> None:
    """So that whoever asks for shards can stream them, however small the data are."""
    log = log_of(tmp_path)
    whole, one = (
        prepared(log, tmp_path / name, loose(shard_users=most)) for name, most in (("whole", None), ("one", 10**19))
    )
    same(whole, one)
    assert one.meta["shard_users"] == 40 and len(one.meta["shards"]) == 1
    assert Stream.open(one.path, None).num_users == 40


def test_what_a_killed_task_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark runs the task again, and the folder of the first attempt stays."""
    written = ShardJob.__call__

    def twice(self: ShardJob, number: int, users: pa.Table, events: pa.Table):
        left = shard_folder(Path(self.folder), number).with_name(f".{number:05d}.partial-0a1b2c3d")
        left.mkdir(parents=True)
        (left / "items.npy").write_bytes(b"half")
        return written(self, number, users, events)

    monkeypatch.setattr(ShardJob, "__call__", twice)
    found = prepared(log_of(tmp_path), tmp_path / "out", loose(shard_users=9))
    assert sorted(path.name for path in (found.path / "shards").iterdir()) == [f"{n:05d}" for n in range(5)]


def test_a_shard_that_a_killed_task_was_replacing_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may run a task twice; on NFS the second attempt takes the first one's folder away for a moment."""
    written = ShardJob.__call__
    log = log_of(tmp_path)
    expected = prepared(log, tmp_path / "expected", loose(shard_users=9))

    def killed(self: ShardJob, number: int, users: pa.Table, events: pa.Table):
        entry = written(self, number, users, events)
        shard = shard_folder(Path(self.folder), number)
        shard.rename(shard.with_name(f".{shard.name}.old-0a1b2c3d"))
        return entry

    monkeypatch.setattr(ShardJob, "__call__", killed)
    found = prepared(log, tmp_path / "out", loose(shard_users=9))
    assert sorted(path.name for path in (found.path / "shards").iterdir()) == [f"{n:05d}" for n in range(5)]
    same(found, expected)


def lost_shard(shard: Path, disk: Path) -> None:
    """As if an executor had written to its own disk: what it wrote is under another path here."""
    shard.rename(disk / shard.name)


def lost_array(shard: Path, disk: Path) -> None:
    (shard / "offsets.npy").unlink()


def short_array(shard: Path, disk: Path) -> None:
    os.truncate(shard / "times.npy", 100)


@pytest.mark.parametrize("lose", [lost_shard, lost_array, short_array])
@pytest.mark.parametrize("lost", [range(5), [3]])
def test_shards_that_the_driver_does_not_see_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path, Path], None], lost: Collection[int]
) -> None:
    written, disk = ShardJob.__call__, tmp_path / "another machine's disk"
    disk.mkdir()

    def elsewhere(self: ShardJob, number: int, users: pa.Table, events: pa.Table):
        entry = written(self, number, users, events)
        if number in lost:
            lose(shard_folder(Path(self.folder), number), disk)
        return entry

    monkeypatch.setattr(ShardJob, "__call__", elsewhere)
    with pytest.raises(ValueError, match=rf"did not write shard {min(lost)} into {tmp_path}/.*all machines share$"):
        prepared(log_of(tmp_path), tmp_path / "out", loose(shard_users=9))
    assert not (tmp_path / "out").exists()


def test_a_database_writes_the_same_shards(tmp_path: Path) -> None:
    import duckdb

    # A table has no row order: distinct times leave nothing to it.
    rows = [(user, item, START + n) for n, (user, item, _) in enumerate(random_log(600, users=30))]
    log = write_parquet(tmp_path / "log.parquet", rows)
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as connection:
        connection.execute(f"CREATE TABLE events AS FROM '{log}'")
    files = prepared(log, tmp_path / "files", loose(shard_users=8))
    table = prepared(f"duckdb:///{tmp_path}/shop.duckdb", tmp_path / "table", loose(shard_users=8), table="events")
    assert files.meta["shards"] == table.meta["shards"]


@pytest.mark.parametrize("events", [1, 200, 10**6])
def test_how_many_events_are_sorted_at_a_time_does_not_matter(
    tmp_path: Path, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path)
    whole = prepared(log, tmp_path / "whole")
    monkeypatch.setattr(duckdb_engine, "_SORTED", events)
    same(whole, prepared(log, tmp_path / "sharded", loose(shard_users=7)))


def test_a_failure_in_the_middle_of_a_stream_is_the_engines(tmp_path: Path) -> None:
    """Arrow would hand it on as its own, which nobody turns into a line."""
    engine = duckdb_engine.DuckDB(tmp_path)
    query = "SELECT CASE WHEN range = 900000 THEN error('broken') ELSE range::VARCHAR END AS x FROM range(1000000)"
    try:
        with pytest.raises(engine.errors(), match="broken"):
            list(engine._stream(engine._connection.sql(query)))
    finally:
        engine.close()


@given(st.lists(st.tuples(*(st.integers(0, 3),) * 4), min_size=1, max_size=30))
def test_events_are_sorted_as_python_sorts_them(rows: list[tuple[int, int, int, int]]) -> None:
    table = pa.table({name: [row[at] for row in rows] for at, name in enumerate(KEYS)})
    found = in_order(table)
    assert [tuple(row.values()) for row in found.to_pylist()] == sorted(rows)
    assert in_order(found) is found, "sorted events are not sorted again"


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 7))
def test_rows_are_cut_at_the_edges_of_shards(users: list[int], shard_users: int, size: int) -> None:
    users = sorted(users)
    batches = pa.table({"user": users}).to_batches(max_chunksize=size)
    found = {number: table["user"].to_pylist() for number, table in cut(batches, "user", shard_users)}
    expected: dict[int, list[int]] = {}
    for user in users:
        expected.setdefault(user // shard_users, []).append(user)
    assert found == expected


def test_nobody_to_test_is_one_line(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(user, 1, START) for user in range(9)])
    with pytest.raises(
        ValueError, match=r"leaves no user of .* to test: nobody has three events, the longest of 9 users has 1 event;"
    ):
        prepared(log, tmp_path / "out", loose(shard_users=2))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    return prepared(log_of(folder), folder / "data", loose(shard_users=7), basket_col="basket").path


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def test_a_damaged_or_missing_shard_is_refused(copy: Path) -> None:
    file = shard_folder(copy, 2) / "times.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"shards/00002/times.npy does not match its checksum"):
        Sequences.load(copy)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"00002/times.npy is missing"):
        Sequences.load(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda meta: meta.update(shards=[]), "lists no shards"),
        (lambda meta: meta.update(shards={}), "shards"),
        (lambda meta: meta["shards"][0].pop("items"), "lists no arrays"),
        (lambda meta: meta["shards"][1].pop("baskets"), "other arrays than the first"),
        (lambda meta: meta["shards"][1]["times"].update(shape=[3]), "shard 1 .* do not fit together"),
        (lambda meta: meta["shards"].pop(), "counts other users or events"),
        (lambda meta: meta["shards"][0].update({"../../x": {}}), "does not know"),
        (lambda meta: meta["shards"][0].update(items=3), "damaged or foreign"),
    ],
)
def test_a_wrong_list_of_shards_is_refused(copy: Path, change, said: str) -> None:
    meta = json.loads((copy / "meta.json").read_text())
    change(meta)
    meta["checksum"] = checksum_of(meta)
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=said):
        Sequences.load(copy)


def test_overwriting_takes_away_shards_and_nothing_else(copy: Path, tmp_path: Path) -> None:
    log = log_of(tmp_path)
    (shard_folder(copy, 1) / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"holds 'notes.txt'"):
        prepared(log, copy, loose(), overwrite=True)
    (shard_folder(copy, 1) / "notes.txt").unlink()
    prepared(log, copy, loose(), overwrite=True)
    assert not (copy / "shards").exists() and "shards" not in read_meta(copy)


def test_the_command_says_how_many_shards(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    words = ["prepare", str(log), "--out", str(tmp_path / "out"), "--min-user", "1", "--min-item", "1"]
    done = CliRunner().invoke(app, [*words, "--shard-users", "9"])
    assert done.exit_code == 0 and "in 5 shards of 9 users" in done.output, done.output
    assert f"next: `trope train {tmp_path / 'out'} --model trope --memory 2GB --out" in done.output
    done = CliRunner().invoke(app, [*words, "--shard-users", "500", "--overwrite"])
    assert done.exit_code == 0 and "in 1 shard of 40 users" in done.output, done.output
    done = CliRunner().invoke(app, [*words, "--shard-users", "0"])
    assert isinstance(done.exception, ValueError) and "--shard-users must be at least 1" in str(done.exception)


def test_a_sharded_dataset_can_be_extended(sharded: Path, tmp_path: Path) -> None:
    data = Sequences.load(sharded)
    log = read_folder(data.path, data.meta)
    found = extend(log, log, "itself")
    assert found.added == 0 and found.repeated == data.num_events
    meta = write_extended(found, data.meta, "itself", tmp_path / "out")
    assert meta["format"] == 1 and "shards" not in meta
    np.testing.assert_array_equal(Sequences.load(tmp_path / "out").items, data.items)
