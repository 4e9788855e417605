"""`trope serve` with a sharded dataset: the answers of one folder, while the shards stay on disk."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from serving import NOW, client_of, make_run
from streams import MUCH
from training import one_thread

from trope.data.folder import shard_folder
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.user_events import UserEvents

__all__ = ["one_thread"]  # a fixture for every test in here
ASKED = [{"user_id": f"u{user:02}", "k": 5, "moment": NOW} for user in (1, 9, 20)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequences, Sequences]:
    """The same events in six shards and in one folder, both opened in memory."""
    folder = tmp_path_factory.mktemp("serve")
    log = [(f"u{user:02}", f"item {item}", time) for user, item, time in random_log()]
    file = write_parquet(folder / "log.parquet", log)
    sharded, whole = (prepared(file, folder / str(users), loose(shard_users=users)) for users in (4, None))
    return sharded, whole


@pytest.mark.parametrize("model", ["trope", "hstu-trope"])
def test_a_server_answers_the_same(
    both: tuple[Sequences, Sequences], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a pulse, when what is popular is counted from the dataset."""
    answers = []
    runs = [make_run(data, tmp_path / f"run-{number}", model) for number, data in enumerate(both)]
    load = Sequences.load
    for number, run in enumerate(runs):
        monkeypatch.setattr(Sequences, "load", None if number == 0 else load)  # the sharded one not as a whole
        with client_of(run, tmp_path / f"events-{number}.sqlite") as client:
            found = [client.post("/recommend", json=asked).json() for asked in ASKED]
            new = client.post("/recommend", json={"user_id": "nobody", "k": 5, "moment": NOW}).json()
            answers.append([[answer["items"] for answer in (*found, new)], client.get("/users?prefix=u1").json()])
    assert answers[0] == answers[1]


def test_a_users_events_are_read_from_the_shard(both: tuple[Sequences, Sequences]) -> None:
    sharded, whole = both
    stream, data = UserEvents(Stream.open(sharded.path, MUCH)), UserEvents(whole)
    for user in range(whole.num_users):
        for most in (None, 3):
            for one, other in zip(stream.of(user, most), data.of(user, most), strict=True):
                np.testing.assert_array_equal(one, other)
        assert torch.equal(torch.from_numpy(stream.of(user)[0]), whole.items[slice(*whole.offsets[user : user + 2])])


def test_a_damaged_shard_is_refused_when_the_server_starts(both: tuple[Sequences, Sequences], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(both[0].path, tmp_path / "copy"))
    file = shard_folder(copy, 1) / "items.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"00001/items\.npy does not match its checksum"):
        UserEvents(Stream.open(copy, MUCH))


@contextmanager
def at_most_more_files(count: int) -> Iterator[None]:
    """Inside, the process may open so many files more than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(taken) + count) if number not in taken][:count]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, hard))  # numbers are given out from below
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_there_may_be_more_shards_than_open_files(both: tuple[Sequences, Sequences]) -> None:
    """A process may have 1,024, often; each shard has an array of items, of times and so on."""
    stream = Stream.open(both[0].path, MUCH)
    assert 2 * len(stream.sizes) > 8
    with at_most_more_files(8):
        ids, events = stream.ids("user_ids"), UserEvents(stream)
        assert ids is not None and len(ids) == stream.num_users
        assert sum(len(events.of(user)[0]) for user in range(stream.num_users)) == stream.num_events
