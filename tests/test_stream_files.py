"""A stream and its files: which shards it reads, what it refuses, and how its memory is said."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from streams import ALONE, MUCH, BlockFeed, memory_for, same_work
from training import one_thread, tiny

from trope.data import folder, shard_files
from trope.data.by_time import _Run
from trope.data.folder import META, shard_folder
from trope.data.sequences import Sequences
from trope.data.stream import Stream, parse_bytes, say_bytes
from trope.data.writer import write_meta
from trope.train.checkpoint import written_into
from trope.train.streamed import StreamFeed

__all__ = ["one_thread"]  # a fixture for every test in here


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 users in 6 shards."""
    folder = tmp_path_factory.mktemp("stream")
    log = write_parquet(folder / "log.parquet", random_log(rows=700, users=40, items=25, spread=3_000))
    return prepared(log, folder / "data", loose(shard_users=7)).path


def test_blocks_without_windows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is read ahead in validation, which has two blocks of its own."""
    rows = [(user, n % 5, START + n) for user in range(12) for n in range(3 if user >= 4 else 9)]
    log = write_parquet(tmp_path / "log.parquet", rows)
    path = prepared(log, tmp_path / "data", loose(shard_users=2)).path
    config = tiny("train.batch=3", "train.stride=2")
    feed = StreamFeed(Stream.open(path, memory_for(path, 1, config)), config, ALONE)
    memory = BlockFeed(Sequences.load(path), config, feed)
    assert [count > 0 for count in feed.counts] == [True] * 2 + [False] * 4 and feed.window == 1
    numbers: list[int] = []
    load = Stream.load

    def watched(self: Stream, shards, *args, **options):
        numbers.extend(shards)
        return load(self, shards, *args, **options)

    monkeypatch.setattr(Stream, "load", watched)
    for epoch in range(6):
        for index in range(feed.steps):
            assert same_work(feed(epoch, index, index), memory(epoch, index, index)), (epoch, index)
        assert feed._held is None and feed._ahead._next is None
    assert sorted(numbers) == [0] * 6 + [1] * 6
    feed.close()


def test_a_damaged_shard_is_refused_when_it_is_read(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    flip_last_byte(shard_folder(copy, 3) / "items.npy")
    stream = Stream.open(copy, memory_for(path, 1, tiny()))
    stream.read([2])
    with pytest.raises(ValueError, match=r"00003/items.npy does not match its checksum"):
        list(stream.over_blocks(lambda user, block: None))


def test_events_are_checked_when_they_are_read_and_users_before(path: Path, tmp_path: Path) -> None:
    """Counting windows reads no events: at the paper's size they are 72 GB, and every restart counts."""
    config, hashed = tiny(), []
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    stream = Stream.open(copy, memory_for(path, 2, config))
    with pytest.MonkeyPatch.context() as patch:
        whole = folder.sha256_of
        patch.setattr(folder, "sha256_of", lambda file: (hashed.append(file.name), whole(file))[1])
        feed = StreamFeed(stream, config, ALONE)
        assert sorted(set(hashed)) == ["offsets.npy", "splits.npy"]
        feed(0, 0, 0)
        feed.close()
        assert {"items.npy", "times.npy"} <= set(hashed)
    flip_last_byte(shard_folder(copy, 3) / "times.npy")
    damaged = StreamFeed(Stream.open(copy, memory_for(path, 2, config)), config, ALONE)
    with pytest.raises(ValueError, match=r"00003/times.npy does not match its checksum"):
        deque((damaged(0, index, index) for index in range(damaged.steps)), maxlen=0)
    damaged.close()
    flip_last_byte(shard_folder(copy, 4) / "splits.npy")
    with pytest.raises(ValueError, match=r"00004/splits.npy does not match its checksum"):
        StreamFeed(Stream.open(copy, MUCH), config, ALONE)


def test_offsets_and_splits_that_nobody_writes_are_refused_without_events(path: Path, tmp_path: Path) -> None:
    """Whoever changed the arrays may have changed the checksums too."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    meta = json.loads((copy / META).read_text())
    file = shard_folder(copy, 1) / "splits.npy"
    splits = np.load(file)
    splits[0, 0] = 2**30
    np.save(file, splits)
    meta["shards"][1]["splits"]["sha256"] = folder.sha256_of(file)
    write_meta(copy, {name: value for name, value in meta.items() if name != "checksum"})
    with pytest.raises(ValueError, match=r"the arrays in .*00001 do not fit together"):
        StreamFeed(Stream.open(copy, MUCH), tiny(), ALONE)


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def replace_file(file: Path) -> None:
    """Put a file of the same size in its place, as a dataset that is prepared again."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.with_name("other").write_bytes(data)
    file.with_name("other").replace(file)


@pytest.mark.parametrize("verify", [True, False])
def test_a_shard_that_was_replaced_since_is_refused(path: Path, tmp_path: Path, verify: bool) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    stream = Stream.open(copy, MUCH, verify)
    stream.read(range(6))
    stream.to("cpu").read([3])
    replace_file(shard_folder(copy, 3) / "times.npy")
    stream.read([2])
    with pytest.raises(ValueError, match=r"00003/times.npy was replaced while it was read"):
        stream.to("cpu").read([3], ("offsets", "splits"))


@pytest.mark.parametrize("kept", [0, 130, -8])
def test_a_shard_that_is_cut_short_while_it_is_read_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """As a copy into the same files does. Of a mapped file, what is gone would end the process."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    stream = Stream.open(copy, MUCH)
    stream.read([3])
    look = folder._header

    def cut(file: Path):
        found = look(file)
        if file.name == "times.npy":
            os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
        return found

    monkeypatch.setattr(folder, "_header", cut)
    with pytest.raises(ValueError, match=r"00003/times.npy was cut short while it was read; copy or prepare it again"):
        stream.read([3])


@pytest.mark.parametrize("where", ["block", "by time"])
def test_a_disk_of_the_data_that_fails_is_not_taken_for_that_of_the_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody should make room in the run's folder for it."""

    def failing(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    stream = Stream.open(path, MUCH)
    if where == "block":
        monkeypatch.setattr(folder, "read_into", failing)
    else:
        monkeypatch.setattr(_Run, "_part", failing)
    said = rf"^{path}/shards/0000\d cannot be read: Input/output error; bring its disk back and run the command again$"
    with pytest.raises(ValueError, match=said), written_into(tmp_path):
        stream.read([3]) if where == "block" else list(stream.in_time("test").until([START * 2]).__next__())


@pytest.mark.parametrize(("text", "count"), [("1000", 1000), ("2K", 2048), ("1.5 MB", 1_572_864), ("8GiB", 8 * 2**30)])
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text, "--memory") == count
    for wrong in ("", "much", "-1GB", "0", "0.1", "1 XB", "9" * 400, "9" * 5_000, "99999999T"):
        with pytest.raises(ValueError, match="--memory must be a number of bytes") as caught:
            parse_bytes(wrong, "--memory")
        assert len(str(caught.value)) < 150


def test_bytes_are_said() -> None:
    assert [say_bytes(count) for count in (12, 1536, 3 * 2**20, 5 * 2**30)] == ["12 B", "1.5 KiB", "3 MiB", "5 GiB"]
    assert [say_bytes(count) for count in (7_080, 20_000 * 2**30)] == ["6.915 KiB", "20000 GiB"]


@given(st.integers(1, 2**50))
def test_who_allows_what_is_said_allows_enough(count: int) -> None:
    found = parse_bytes(say_bytes(count), "--memory")
    assert count <= found <= 1.001 * count + 1


def test_the_memory_that_a_refusal_names_is_enough(path: Path) -> None:
    for config in (tiny(), tiny("train.batch=7"), tiny("train.batch=9", "train.stride=2")):
        stream = Stream.open(path, None)
        with pytest.raises(ValueError, match="needs at least") as refused:
            StreamFeed(stream, config, ALONE)
        named = re.search(r"at least (.*) for two", str(refused.value))
        assert named is not None
        stream.memory = parse_bytes(named[1], "--memory")
        StreamFeed(stream, config, ALONE).close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's memory in /proc")
def test_large_arrays_are_private_memory_of_their_own() -> None:
    """malloc would keep what a block has left; shared memory would not count as the process's."""
    for shape, dtype in (((1 << 20,), np.int64), ((4, 1 << 18), np.int32)):
        room = shard_files._room(shape, np.dtype(dtype))
        assert room.shape == shape and room.dtype == dtype and room.flags.writeable
        assert torch.from_numpy(room).fill_(7).sum() == 7 * room.size
        first = room.ctypes.data

        def permissions(first: int = first) -> list[str]:
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            bounds = [[int(bound, 16) for bound in line[0].split("-")] for line in maps]
            return [line[1] for line, (low, high) in zip(maps, bounds, strict=True) if low <= first < high]

        assert permissions() == ["rw-p"]
        del room
        assert permissions() == [], "it went back to the system"
    assert shard_files._room((0,), np.dtype(np.int32)).size == 0
