"""Processes of one training: they begin with the same, ask each other often enough, and one alone tests the model."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from ranks import makes_group, on_ranks
from streams import ALONE, memory_for
from torch.distributed.distributed_c10d import _set_pg_timeout
from training import last_step, one_thread, tiny, tiny_data  # noqa: F401, an automatic fixture

from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.runs import read_metrics
from trope.train import rounds, score
from trope.train.agreement import _who_sees, check_same_command, check_same_start
from trope.train.distributed import Group, process_group
from trope.train.loop import Interrupted, Trainer, train
from trope.train.process import StopRequest
from trope.train.rounds import MOST_STEPS, Rounds
from trope.train.step import Feed
from trope.train.streamed import StreamFeed

WHOLE = ("train.loss=full", "model.pulse=false", "train.early_stop=9", "train.epochs=2")  # of the table, on each rank


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("together"), items=41)


class Start(NamedTuple):
    """What one process begins with. memory: None for data in memory."""

    data: Path
    run: Path
    settings: tuple[str, ...] = WHOLE
    memory: int | None = None


@makes_group
def begin(starts: list[Start]) -> str:
    """What this process refuses to train with; it says nothing where it trained."""
    mine = starts[int(os.environ["RANK"])]
    data = Sequences.load(mine.data) if mine.memory is None else Stream.open(mine.data, mine.memory)
    try:
        train(data, tiny(*mine.settings), mine.run, "cpu", resume=True, progress=False)
    except ValueError as error:
        return str(error)
    return ""


ADVICE = "give every process the same command, and keep RUN and DATA on a file system that all see"


def test_processes_with_another_command_all_refuse(data: Sequences, tmp_path: Path) -> None:
    """Every process says the same, in one line, and no folder appears."""
    usual, other = Start(data.path, tmp_path / "run"), tiny_data(tmp_path / "other", items=41, seed=1)
    starts = [usual, usual._replace(settings=(*WHOLE, "train.lr=0.5")), usual._replace(data=other.path)]
    (message,) = set(on_ranks(3, begin, starts))
    assert message == (
        "process 1 sees another config than process 0; process 2 sees another dataset than process 0; " + ADVICE
    )
    assert not usual.run.exists()


@makes_group
def begin_with_threads(start: Start) -> str:
    """The first process has one thread, the second two, as with another OMP_NUM_THREADS on another machine."""
    torch.set_num_threads(1 + int(os.environ["RANK"]))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return begin([start, start])


def test_processes_with_other_threads_refuse_to_train_in_parts(data: Sequences, tmp_path: Path) -> None:
    """Their parts would have other bits than those of one process."""
    start = Start(data.path, tmp_path / "run", (*WHOLE, "train.parts=2"))
    assert set(on_ranks(2, begin_with_threads, start)) == {
        f"process 1 sees another OMP_NUM_THREADS than process 0; {ADVICE}"
    }
    assert set(on_ranks(2, begin_with_threads, start._replace(settings=WHOLE))) == {""}


def test_processes_with_another_checkpoint_all_refuse(data: Sequences, tmp_path: Path) -> None:
    """Each machine has RUN on its own disk; the first has trained an epoch, the second has not."""
    usual = Start(data.path, tmp_path / "run")
    train(data, tiny(*WHOLE[:-1], "train.epochs=1"), usual.run, "cpu", progress=False)
    trained = last_step(usual.run)
    (message,) = set(on_ranks(2, begin, [usual, usual._replace(run=tmp_path / "own disk")]))
    assert message == (
        f"process 1 sees another checkpoint than process 0; process 1 sees another RUN than process 0; {ADVICE}"
    )
    assert last_step(usual.run) == trained


def test_processes_with_a_run_folder_each_refuse_before_they_train(data: Sequences, tmp_path: Path) -> None:
    """Also a new run, of which there is no checkpoint yet."""
    usual = Start(data.path, tmp_path / "run")
    (message,) = set(on_ranks(2, begin, [usual, usual._replace(run=tmp_path / "own disk")]))
    assert message == f"process 1 sees another RUN than process 0; {ADVICE}"
    assert not (usual.run / "checkpoints").exists()


def test_processes_with_other_blocks_refuse(tmp_path: Path) -> None:
    """Which memory they have is their own affair, as long as their blocks are the same."""
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=700, users=40, items=25, spread=3_000))
    path = prepared(log, tmp_path / "data", loose(shard_users=7)).path
    two, three = (memory_for(path, shards, tiny(*WHOLE)) for shards in (2, 3))
    starts = [Start(path, tmp_path / "run", WHOLE, memory) for memory in (two, two + 1, three, None)]
    (message,) = set(on_ranks(4, begin, starts))
    assert message == f"processes 2, 3 see another --memory than process 0; {ADVICE}"
    assert set(on_ranks(2, begin, starts[:2])) == {""}


def test_processes_that_validate_in_other_blocks_refuse(tmp_path: Path) -> None:
    """They rank the users of a block together, each among its own items; a block of training may be the same."""
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=700, users=40, items=25, spread=3_000))
    path = prepared(log, tmp_path / "data", loose(shard_users=4)).path
    settings = ("model.pulse=false", "train.epochs=1", "train.batch=16")
    memories = [memory_for(path, shards, tiny(*settings)) - less for shards, less in ((2, 0), (3, 1))]
    feeds = [StreamFeed(Stream.open(path, memory), tiny(*settings), ALONE) for memory in memories]
    assert [feed.window for feed in feeds] == [2, 2]
    assert len({feed.stream.window() for feed in feeds}) == 2
    starts = [Start(path, tmp_path / "run", settings, memory) for memory in memories]
    (message,) = set(on_ranks(2, begin, starts))
    assert message == f"process 1 sees another --memory than process 0; {ADVICE}"


def test_one_process_compares_nothing(data: Sequences) -> None:
    """Not even the checkpoint, which is not there, is read."""
    alone = Group(0, 1, torch.device("cpu"))
    check_same_command(alone, tiny(), None, data)
    check_same_start(alone, Path("nowhere"), Feed(data, tiny(), alone), Path("nowhere"))


def test_a_thousand_processes_are_named_in_a_line() -> None:
    assert _who_sees([4]) == "process 4 sees"
    assert _who_sees(list(range(1, 1_024))) == "processes 1, 2, 3, 4, 5, 6, 7, 8 and 1,015 more see"


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
        return group.first_does(work)


def test_work_of_the_first_process_may_take_longer_than_a_collective() -> None:
    first, *others = on_ranks(3, wait_for_first, 2.0)
    assert others == [first] * 2 and first[1:] == [0.1, None]


@makes_group
def fail_in_the_first() -> str:
    """What each process sees when the first one's work fails; the others do not wait for torchrun to end them."""

    def work() -> None:
        raise ValueError("the disk is full")

    with process_group("cpu") as group:
        assert group.first_does(lambda: 7) == 7
        try:
            group.first_does(work)
        except (ValueError, ConnectionError) as error:
            return str(error)
        return "nothing"


def test_others_end_with_the_first_processs_work() -> None:
    first, *others = on_ranks(3, fail_in_the_first)
    assert first == "the disk is full"
    assert others == ["another process was lost: the first one; see its line"] * 2


def rounds_of(group: Group, runs: list[list[float]], patience: float) -> list[list[tuple[int, bool]]]:
    """Of each run, after which steps this process asks, and whether it is then to save.

    runs: the seconds of each step by the first process's clock; the others' clocks run otherwise.
    """
    now = [1e6 * group.rank]
    rounds.time = SimpleNamespace(monotonic=lambda: now[0])  # this process ends with the test
    found = []
    for seconds in runs:
        asked, when = [], Rounds(group, StopRequest(), patience)
        for step, duration in enumerate(seconds, start=1):
            now[0] += duration if group.is_first else 1_000.0
            if when.is_due(is_last=step == len(seconds)):
                assert when.ask() == 0
                asked.append((step, when.is_late))
                if when.is_late:
                    when.saved()
        found.append(asked)
    return found


def test_rounds_are_five_seconds_apart_and_the_same_for_all() -> None:
    """And after the last step of an epoch."""
    cases = [
        ([0.5] * 25, [1, 11, 21, 25]),
        ([0.001] * 120, [1, 1 + MOST_STEPS, 1 + 2 * MOST_STEPS, 120]),
        ([7.0] * 4, [1, 2, 3, 4]),
        # Steps become slow, which shows at 11 and 16, and then quick, which shows at 18.
        ([0.5] * 9 + [3.0] * 4 + [1.0] * 10, [1, 11, 16, 18, 23]),
    ]
    first, other = on_ranks(2, rounds_of, [seconds for seconds, _ in cases], 1e9)
    assert first == other
    assert [[step for step, _ in asked] for asked in first] == [steps for _, steps in cases]


def test_the_clock_of_the_first_process_says_when_to_save() -> None:
    first, other = on_ranks(2, rounds_of, [[1.0] * 22], 9.0)
    assert first == other == [[(1, False), (6, False), (11, True), (16, False), (21, True), (22, False)]]


@makes_group
def train_until_killed(path: Path, run: Path, at: int) -> int:
    """After which step this process stopped, as one of the processes gets SIGTERM in the middle of step `at`."""
    now, step, done = [0.0], Trainer.step, [0]
    rounds.time = SimpleNamespace(monotonic=lambda: now[0])

    def slow(self: Trainer) -> Any:
        now[0] += 2.5
        done[0] = self.state.step + 1
        if done[0] == at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    Trainer.step = slow
    with pytest.raises(Interrupted):
        train(Sequences.load(path), tiny("train.batch=1"), run, "cpu", progress=False)
    return done[0]


def test_a_signal_stops_all_processes_within_seconds(data: Sequences, tmp_path: Path) -> None:
    """Of two steps, with 2.5 seconds each. torchrun waits for thirty seconds."""
    assert on_ranks(2, train_until_killed, data.path, tmp_path / "run", 8) == [9, 9]
    assert last_step(tmp_path / "run") == 9
