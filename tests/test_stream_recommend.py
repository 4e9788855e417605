"""`trope recommend` on a sharded dataset: the answers of one folder, from the shards that hold the users asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_parquet
from streams import MUCH
from training import one_thread, tiny
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.pick import pick
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.train.loop import train

__all__ = ["one_thread"]  # a fixture for every test in here
AT = str(START + 8 * 10**5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model, of a sharded dataset and of one in a folder."""
    folder = tmp_path_factory.mktemp("recommend")
    log = write_parquet(folder / "log.parquet", random_log(rows=700, users=40, items=25))
    found = []
    for name, users in (("sharded", 7), ("whole", None)):
        data = prepared(log, folder / name, loose(shard_users=users))
        train(data, tiny("train.epochs=1", model="trope"), folder / f"run-{name}", "cpu", progress=False)
        found.append(folder / f"run-{name}")
    return found[0], found[1]


def say(*words: str) -> str:
    done = CliRunner().invoke(app, ["recommend", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_users_get_the_same_from_their_shards_alone(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--user", "31", "--user", "2", "--user", "30", "--at", AT, "--at", str(START + 6 * 10**5)]
    expected = say(str(runs[1]), *asked)
    read, shards = Stream.read, []

    def watched(stream: Stream, numbers, *rest, **options):
        shards.extend(numbers)
        return read(stream, numbers, *rest, **options)

    monkeypatch.setattr(Stream, "read", watched)
    monkeypatch.setattr(Sequences, "load", None)  # not as a whole
    assert say(str(runs[0]), *asked) == expected and "user 31" in expected
    assert shards == [0, 4]


@pytest.mark.parametrize("index", [[], ["--index", "faiss"]])
def test_all_users_get_the_same(runs: tuple[Path, Path], tmp_path: Path, index: list[str]) -> None:
    tables = []
    for run in runs:
        out = tmp_path / f"{run.name}.parquet"
        say(str(run), "--all", "--at", AT, "--at", str(START + 5 * 10**5), "--out", str(out), "-k", "4", *index)
        tables.append(pq.read_table(out))
    assert tables[0].equals(tables[1]) and len(tables[0]) > 200


def test_unknown_users_and_a_missing_shard_are_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recommend", str(runs[0]), "--user", "99", "--at", AT])
    assert isinstance(done.exception, ValueError) and "no user '99' among its 40" in str(done.exception)
    copy = Path(shutil.copytree(runs[0].parent / "sharded", tmp_path / "copy"))
    (copy / "shards" / "00004" / "items.npy").unlink()
    words = ["recommend", str(runs[0]), "--data", str(copy), "--at", AT, "--user"]
    assert CliRunner().invoke(app, [*words, "2"]).exit_code == 0
    assert isinstance(CliRunner().invoke(app, [*words, "31"]).exception, FileNotFoundError)


def test_picked_users_have_their_events_and_splits(runs: tuple[Path, Path]) -> None:
    path = runs[0].parent / "sharded"
    data, users = Sequences.load(path), [0, 6, 7, 33, 39]
    small = pick(Stream.open(path, MUCH), users)
    assert small.num_users == len(users)
    for row, user in enumerate(users):
        mine, theirs = slice(*small.offsets[row : row + 2].tolist()), slice(*data.offsets[user : user + 2].tolist())
        assert torch.equal(small.items[mine], data.items[theirs]) and torch.equal(small.times[mine], data.times[theirs])
    np.testing.assert_array_equal(small._tensors["splits"], data._tensors["splits"][:, users])
