"""Processes of one training: they begin with the same, ask each other often enough, and one alone tests the model."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import makes_group, on_ranks
from torch.distributed.distributed_c10d import _set_pg_timeout
from training import last_step, one_thread, tiny, tiny_data  # noqa: F401, an automatic fixture

from trope.data.sequences import Sequences
from trope.runs import read_metrics
from trope.train import score
from trope.train.distributed import process_group
from trope.train.loop import train

WHOLE = ("train.loss=full", "model.pulse=false", "train.early_stop=9", "train.epochs=2")  # of the table, on each rank


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("together"), items=41)


@makes_group
def train_and_count(path: Path, run: Path) -> tuple[int, dict[str, Any]]:
    """How often this process has tested the model, and what the training returned to it."""
    tests, evaluate = [], score.evaluate

    def counted(*arguments: Any) -> Any:
        tests.append(arguments[2])
        return evaluate(*arguments)

    score.evaluate = counted  # this process ends with the test
    found = train(Sequences.load(path), tiny(*WHOLE), run, "cpu", progress=False)
    return len(tests), found


def test_the_first_process_alone_tests_the_model(data: Sequences, tmp_path: Path) -> None:
    """And all return what it wrote."""
    (tests, first), (others, other) = on_ranks(2, train_and_count, data.path, tmp_path / "run")
    assert (tests, others) == (1, 0)
    assert first == other and read_metrics(tmp_path / "run").items() <= first.items()


@makes_group
def wait_for_first(patience: float) -> list[Any]:
    """The result of work that takes longer than a collective waits."""

    def work() -> list[Any]:
        time.sleep(1.5 * patience)
        return [os.getpid(), 0.1, None]

    with process_group("cpu") as group:
        _set_pg_timeout(timedelta(seconds=patience))
        return group.first_does("work", work)


def test_work_of_the_first_process_may_take_longer_than_a_collective() -> None:
    first, *others = on_ranks(3, wait_for_first, 2.0)
    assert others == [first] * 2 and first[1:] == [0.1, None]
