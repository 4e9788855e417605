"""A run, and what it learns of new events: for tests of `trope update`."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_logs import Event, loose, prepared, random_log, write_parquet
from test_fit import invoke
from training import tiny

from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.train.loop import train

ROWS = random_log(rows=400, users=30, items=20, seed=0)
LAST = max(row[2] for row in ROWS)
# More of an old user, a new user between old ones and one behind, an old item, new ones on both sides of the old.
NEW: list[Event] = [
    (3, 0, LAST + 10), (3, 7, LAST + 20), (2_000, 99, LAST + 5), (2_000, 7, LAST + 6), (0, 99, LAST + 30),
    (0, 0, LAST + 31), (5, 99, LAST - 1_000),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("update")
    return prepared(write_parquet(folder / "log.parquet", ROWS), folder / "data", loose(protocol=Protocol("holdout")))


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(data, tiny("train.refit=true", model="trope"), folder, "cpu", progress=False)
    return folder


@pytest.fixture(scope="module")
def updated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("updated")
    out = folder / "out"
    code, said = invoke(*command(run, write_parquet(folder / "new.parquet", NEW), out))
    assert code == 0, said
    assert "7 new events (0 more known already), 2 new users, 2 new items" in said
    assert "1 of them is earlier than the last event of" in said
    return out


def command(run: Path, events: Path | str, out: Path, *more: object) -> tuple[object, ...]:
    return ("update", run, "--events", events, "--out", out, "--device", "cpu", "--no-progress", *more)
