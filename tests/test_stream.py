"""A stream: the batches, losses and ranks of the same data in memory, within a number of bytes; and its cursor."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import on_gpu
from data_logs import loose, prepared, random_log, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from streams import ALONE, CPU, MUCH, BlockFeed, memory_for, same_work
from torch.utils._python_dispatch import TorchDispatchMode
from training import SIZE, one_thread, tiny, weights
from typer.testing import CliRunner

from trope.cli.main import app
from trope.config import Config
from trope.data.ahead import Ahead
from trope.data.sequences import Sequences
from trope.data.stream import EVENT_BYTES, USER_BYTES, Stream
from trope.evaluate import evaluation
from trope.evaluate.streamed import evaluate
from trope.kernels.batch import BatchShape, gather_batch
from trope.models.recommender import SequentialRecommender
from trope.runs import REFIT
from trope.train import loop
from trope.train.balance import token_part
from trope.train.block_order import Cursor, epoch_order, whole_order
from trope.train.distributed import Group
from trope.train.fused import FusedStep
from trope.train.loop import Interrupted, train
from trope.train.optimizer import make_optimizer
from trope.train.step import Feed
from trope.train.stepper import Stepper
from trope.train.streamed import StreamFeed

__all__ = ["one_thread"]  # a fixture for every test in here
USERS = 7  # of a shard


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 users in 6 shards."""
    folder = tmp_path_factory.mktemp("stream")
    log = write_parquet(folder / "log.parquet", random_log(rows=700, users=40, items=25, spread=3_000))
    return prepared(log, folder / "data", loose(shard_users=USERS)).path


@pytest.mark.parametrize("shards", [1, 2, 4, 6])
@pytest.mark.parametrize("settings", [(), ("train.stride=3",), ("train.batch=17",)])
def test_batches_are_those_of_a_store_in_memory_in_the_same_order(
    path: Path, shards: int, settings: tuple[str, ...]
) -> None:
    config = tiny(*settings)
    feed = StreamFeed(Stream.open(path, memory_for(path, shards, config)), config, ALONE)
    assert feed.window == shards
    memory = BlockFeed(Sequences.load(path), config, feed)
    assert feed.steps == memory.steps and feed.size == memory.size
    step = 0
    for epoch in (0, 1):
        for index in range(feed.steps):
            assert feed.tokens(epoch, index) == memory.tokens(epoch, index)
            assert same_work(feed(epoch, index, step), memory(epoch, index, step)), (epoch, index)
            step += 1
    feed.close()


def test_a_feed_begins_anywhere(path: Path) -> None:
    config = tiny("train.batch=5")
    stream = Stream.open(path, memory_for(path, 2, config))
    feed, other = StreamFeed(stream, config, ALONE), StreamFeed(stream, config, ALONE)
    works = [feed(1, index, index) for index in range(feed.steps)]
    for index in (3, 0, feed.steps - 1, feed.steps - 2, 4):
        assert same_work(other(1, index, index), works[index]), index
    feed.close()
    other.close()


def targets(batch) -> list[tuple[int, int, int, int]]:
    """Every (item, time, target, target's time) of a batch."""
    there = torch.arange(batch.items.shape[1]) < batch.lengths[:, None]
    return list(
        zip(*(x[there].tolist() for x in (batch.items, batch.times, batch.targets, batch.target_times)), strict=True)
    )


def test_next_moments_are_carried_over_blocks(path: Path) -> None:
    """Every input comes once, and its target is an event of its user's next later time."""
    config = tiny("model.predicts=next-moment", "train.stride=8", "train.batch=11")
    feed = StreamFeed(Stream.open(path, memory_for(path, 1, config)), config, ALONE)
    memory = Feed(Sequences.load(path), config, ALONE)
    assert feed.steps == memory.steps
    streamed = [pair for index in range(feed.steps) for pair in targets(feed(0, index, index).batch)]
    whole = [pair for index in range(memory.steps) for pair in targets(memory(0, index, index).batch)]
    assert sorted((i, t, at) for i, t, _, at in streamed) == sorted((i, t, at) for i, t, _, at in whole)
    data = Sequences.load(path)
    there = set(zip(data.items.tolist(), data.times.tolist(), strict=True))
    assert {(item, at) for _, _, item, at in streamed} <= there
    again = StreamFeed(feed.stream, config, ALONE)
    assert same_work(again(0, 3, 3), feed(0, 3, 3)), "a feed that begins in the middle draws the same targets"
    feed.close()
    again.close()


@pytest.mark.parametrize("predicts", ["next-event", "next-moment"])
def test_the_fused_step_reads_the_same_tokens(path: Path, predicts: str) -> None:
    config = tiny("train.batch=9", f"model.predicts={predicts}")
    stream = Stream.open(path, memory_for(path, 2, config))
    feed, plain = StreamFeed(stream, config, ALONE), StreamFeed(stream, config, ALONE)
    source, cursor = feed.source(), torch.zeros(1, dtype=torch.int64)
    places = [tensor.data_ptr() for tensor in source if tensor is not None]
    for epoch in (0, 1):
        for index in range(feed.steps):
            if (begin := feed.aim(source, epoch, index, index > 0)) is not None:
                cursor.fill_(begin)
            tokens = gather_batch(source, BatchShape(9, 8, feed.tokens(epoch, index), 1), cursor, "torch")
            expected = plain(epoch, index, 0)
            for mine, theirs in (
                (tokens.items_T, expected.batch.items), (tokens.candidates_TC[:, 0], expected.batch.targets),
                (tokens.times_T, expected.batch.times), (tokens.query_times_T, expected.batch.target_times),
            ):  # fmt: skip
                assert torch.equal(mine.long(), theirs.flatten()[expected.places_T]), (epoch, index)
    assert places == [tensor.data_ptr() for tensor in source if tensor is not None], "a graph reads where they were"
    feed.close()
    plain.close()


def losses(
    feed: Feed, data: Sequences | Stream, config: Config, fused: bool, group: Group = ALONE, steps: int = 30
) -> list[float]:
    torch.manual_seed(0)
    model = SequentialRecommender(config, data.num_items, data.time_span).to(group.device)
    optimizer = make_optimizer(model, config)
    stepper = Stepper(model, data, config, feed, optimizer, group)
    if fused:
        stepper.fused = FusedStep(
            model, data, config, feed, optimizer, stepper.guard, stepper.loss_sum, 0, False, backend="torch"
        )
    model.train()
    return [float(stepper(*divmod(step, feed.steps), step)[0]) for step in range(steps)]


@pytest.mark.parametrize("fused", [False, True])
def test_losses_are_those_of_a_store_in_memory(path: Path, fused: bool) -> None:
    config = tiny()
    stream = Stream.open(path, memory_for(path, 2, config))
    feed, data = StreamFeed(stream, config, ALONE), Sequences.load(path)
    in_memory = losses(BlockFeed(data, config, feed), data, config, fused)
    assert losses(feed, stream, config, fused) == in_memory
    assert in_memory[-1] < in_memory[0]
    feed.close()


@on_gpu
def test_losses_on_a_gpu_are_those_of_a_store_in_memory(path: Path) -> None:
    """Captured graphs read blocks where the first one was."""
    config, group = tiny("model.head_dim=16", "model.width=32"), Group(0, 1, torch.device("cuda"))
    stream = Stream.open(path, memory_for(path, 2, config)).to("cuda")
    feed, data = StreamFeed(stream, config, group), Sequences.load(path).to("cuda")
    in_memory = losses(BlockFeed(data, config, feed, group), data, config, False, group)
    assert losses(feed, stream, config, False, group) == in_memory
    feed.close()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(1, 5), st.integers(0, 99))
def test_an_epoch_has_every_window_once(counts: list[int], window: int, seed: int) -> None:
    orders = [whole_order(counts, window, seed, epoch) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(sum(counts)))
    assert torch.equal(orders[0], whole_order(counts, window, seed, 0))
    order = epoch_order(counts, window, seed, 0)
    owner = [block for block, shards in enumerate(order.blocks) for _ in range(sum(counts[s] for s in shards))]
    assert [order.block_of(place) for place in range(sum(counts))] == owner


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_rows_are_dealt_by_tokens(lengths: list[int], size: int) -> None:
    ends = np.cumsum(lengths).tolist()
    parts = [token_part(ends, rank, size) for rank in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == len(lengths)
    assert all(one[1] == other[0] and one[0] <= one[1] for one, other in pairwise(parts))
    tokens = [sum(lengths[first:last]) for first, last in parts]
    assert max(tokens) <= ends[-1] / size + max(lengths), "no process has more than a row too many"


def test_processes_share_the_rows_of_one_batch(path: Path) -> None:
    config = tiny("train.batch=16", "train.negative_source=batch")
    stream = Stream.open(path, memory_for(path, 2, config))
    alone = StreamFeed(stream, config, ALONE)
    for size in (2, 4):
        feeds = [StreamFeed(stream, config, Group(rank, size, CPU)) for rank in range(size)]
        for index in range(alone.steps):
            whole = alone(0, index, index)
            works = [feed(0, index, index) for feed in feeds]
            works = [work for work in works if work.share]
            assert torch.equal(torch.cat([work.batch.items for work in works]), whole.batch.items)
            assert torch.equal(torch.cat([work.negatives for work in works]), whole.negatives)
            tokens = [len(work.places_T) for work in works]
            assert max(tokens) <= len(whole.places_T) / size + 8
        for feed in feeds:
            feed.close()
    alone.close()


def test_at_most_two_blocks_are_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they live and die: in training, between epochs, and in a pass over all users."""
    alive: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
    peak, lock = [0], threading.Lock()
    load = Stream.load

    def watched(self: Stream, *args, **options):
        loaded = load(self, *args, **options)
        with lock:
            alive.update({id(array): array for array in loaded.arrays.values()})
            peak[0] = max(peak[0], sum(array.nbytes for array in list(alive.values())))
        return loaded

    monkeypatch.setattr(Stream, "load", watched)
    config = tiny("train.batch=5")
    memory = memory_for(path, 2, config)
    peak[0] = 0
    stream = Stream.open(path, memory)
    feed = StreamFeed(stream, config, ALONE)
    for step in range(2 * feed.steps):
        feed(*divmod(step, feed.steps), step)
        if (step + 1) % feed.steps == 0:
            assert sum(users for users in stream.over_blocks(lambda user, block: block.num_users)) == 40
    feed.close()
    assert 0 < peak[0] <= memory, (peak, memory)
    assert stream.num_events * EVENT_BYTES + stream.num_users * USER_BYTES > memory, "or nothing would be streamed"


def test_a_closed_feed_lets_go_of_its_blocks(path: Path) -> None:
    """Also of the room on a GPU, where the training of the refit has its own."""
    config = tiny("train.batch=5", "model.predicts=next-moment")
    feed = StreamFeed(Stream.open(path, MUCH), config, ALONE)
    source = feed.source()
    feed.aim(source, 0, 0, False)
    feed(0, 0, 0)
    held = [weakref.ref(tensor) for tensor in (source.items, feed.following)]
    del source
    gc.collect()
    gc.disable()
    try:
        feed.close()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_too_little_memory_is_one_line(path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs at least [\d.]+ KiB for two of its shards, --memory allows 1000 B"):
        Stream.open(path, 1_000)


@pytest.mark.parametrize("filter_seen", ["none", "history"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_ranks_are_those_of_a_store_in_memory(path: Path, filter_seen: str, split: str) -> None:
    stream, data = Stream.open(path, memory_for(path, 2, tiny())), Sequences.load(path)
    model = SequentialRecommender(tiny(), data.num_items, data.time_span)
    expected = evaluation.evaluate(model, data, split, filter_seen, 8)
    found = evaluate(model, stream, split, filter_seen, 8)
    np.testing.assert_array_equal(found.users, expected.users)
    for name in ("better", "ties", "offsets"):
        np.testing.assert_array_equal(getattr(found.places, name), getattr(expected.places, name))
    assert found.metrics == expected.metrics


def test_a_run_trains_stops_and_goes_on_with_the_next_batch(path: Path, tmp_path: Path, monkeypatch) -> None:
    """From end to end; stopped in the middle of an epoch, resumed with more memory: the same bytes."""
    config = tiny("train.epochs=2", "train.batch=5")
    memory = memory_for(path, 2, config)
    whole = train(Stream.open(path, memory), config, tmp_path / "whole", "cpu", progress=False)
    stop_if_asked = loop.Trainer._stop_if_asked

    def at_eleven(self: loop.Trainer, rounds) -> None:
        rounds.stop.signum = 15 if self.state.step == 11 else 0
        stop_if_asked(self, rounds)

    monkeypatch.setattr(loop.Trainer, "_stop_if_asked", at_eleven)
    with pytest.raises(Interrupted):
        train(Stream.open(path, memory), config, tmp_path / "parts", "cpu", progress=False)
    monkeypatch.undo()
    state = json.loads(next((tmp_path / "parts" / "checkpoints").glob("*-step00000011/state.json")).read_text())
    epoch, index = state["epoch"], state["index"]
    feed = StreamFeed(Stream.open(path, memory), config, ALONE)
    assert Cursor(*state["cursor"]) == feed.cursor(epoch, index) and state["cursor"][3] == 2
    feed.close()
    with pytest.raises(ValueError, match=r"was begun with 2 shards .* in a block, --memory allows 1"):
        train(
            Stream.open(path, memory_for(path, 1, config)), config, tmp_path / "parts", "cpu", resume=True,
            progress=False,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"was begun with --memory, .* resume it with as much --memory"):
        train(Sequences.load(path), config, tmp_path / "parts", "cpu", resume=True, progress=False)
    resumed = train(Stream.open(path, MUCH), config, tmp_path / "parts", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    assert (tmp_path / "whole" / "catalogue" / "item_counts.npy").is_file()


def test_a_run_in_memory_does_not_go_on_as_a_stream(path: Path, tmp_path: Path) -> None:
    config = tiny("train.epochs=1")
    train(Sequences.load(path), config, tmp_path / "run", "cpu", progress=False)
    with pytest.raises(ValueError, match=r"was begun without --memory, .* resume it without --memory"):
        train(
            Stream.open(path, MUCH), tiny("train.epochs=2"), tmp_path / "run", "cpu", resume=True, progress=False
        )  # fmt: skip


def test_two_processes_stream_to_the_losses_of_one(path: Path, tmp_path: Path) -> None:
    """With the pulse and the refit, which the first process fits and everybody trains."""
    settings = (*SIZE, "model.dropout=0.0", "train.epochs=1", "train.batch=15", "train.refit=true")
    memory = memory_for(path, 2, tiny("train.batch=15", model="trope"))
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--model", "trope", "--device", "cpu", "--no-progress", "--memory", str(memory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = []
    for name, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])):
        command = [sys.executable, *launcher, "-m", "trope", "train", str(path), *words, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        folders = tmp_path / name, tmp_path / name / REFIT
        rows = [json.loads(line) for run in folders for line in (run / "log.jsonl").read_text().splitlines()]
        logs.append([row["epoch_loss"] for row in rows if "epoch_loss" in row])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5) and len(logs[0]) == 2
    models = [SequentialRecommender.from_pretrained(tmp_path / name / "best") for name in ("one", "two")]
    counts = [model.pulse.get_buffer("counts") for model in models if model.pulse is not None]
    torch.testing.assert_close(*counts)
    assert float(counts[0].sum()) > 0


def test_a_dataset_without_shards_is_one_line(path: Path, tmp_path: Path) -> None:
    whole = prepared(path.parent / "log.parquet", tmp_path / "whole")
    with pytest.raises(ValueError, match="has no shards"):
        Stream.open(whole.path, MUCH)


def test_the_command_streams(path: Path, tmp_path: Path) -> None:
    settings = [word for setting in (*SIZE, "train.epochs=1") for word in ("--set", setting)]
    words = ["train", str(path), "--out", str(tmp_path / "run"), "--no-progress", "--device", "cpu", "--memory", "1MB"]
    done = CliRunner().invoke(app, [*words, "--model", "hstu-trope", *settings])
    assert done.exit_code == 0, done.output
    assert f"next: `trope evaluate {tmp_path / 'run'} --memory 1MB`" in done.output
    trained = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    (tmp_path / "run" / "ranks-test.npz").unlink()
    told = ["evaluate", str(tmp_path / "run"), "--memory", "1MB", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, [*told, str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    streamed = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert streamed["run"] == trained
    assert (tmp_path / "run" / "ranks-test.npz").is_file()
    in_memory = ["evaluate", str(tmp_path / "run"), "--device", "cpu", "--json", str(tmp_path / "whole.json")]
    done = CliRunner().invoke(app, in_memory)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "whole.json").read_text())["metrics"] == streamed and len(streamed) == 8
    done = CliRunner().invoke(app, [*words, "--resume"])
    assert done.exit_code == 0, done.output
    for more in ([], ["--resume"]):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new"), *more])
        assert isinstance(done.exception, ValueError) and "--model" in str(done.exception)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_ahead_is_made_once_and_errors_arrive(device: str) -> None:
    """On a CPU the thread only reads; where a GPU has the work it finishes too."""
    made: list[int] = []
    finished: list[threading.Thread] = []

    def read(key: int) -> int:
        made.append(key)
        if key == 3:
            raise ValueError("three")
        return 10 * key

    def finish(key: int, found: int) -> int:
        finished.append(threading.current_thread())
        return key + found

    with Ahead(read, finish, torch.device(device)) as ahead:
        ahead.start(1)
        assert ahead.take(1) == 11 and made == [1]
        assert (finished[0] is threading.main_thread()) == (device == "cpu")
        ahead.start(2)
        assert ahead.take(5) == 55, "another one than was started"
        ahead.start(3)
        with pytest.raises(ValueError, match="three"):
            ahead.take(3)


def test_the_thread_that_reads_ahead_runs_no_torch_operation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would start a second team of OpenMP threads, and every later operation would wake sleeping ones."""

    class Refuse(TorchDispatchMode):  # of this thread alone
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} ran on the thread")

    begin, begun = Ahead._begin, []

    def watched(self: Ahead, key):
        assert threading.current_thread() is not threading.main_thread()
        begun.append(key)
        with Refuse():
            return begin(self, key)

    monkeypatch.setattr(Ahead, "_begin", watched)
    config = tiny("train.batch=5", "model.predicts=next-moment")
    stream = Stream.open(path, memory_for(path, 2, config)).with_own_validation().with_validation()
    feed = StreamFeed(stream, config, ALONE)
    for step in range(2 * feed.steps):
        feed(*divmod(step, feed.steps), step)
    feed.close()
    in_training = len(begun)
    assert in_training >= 2
    assert sum(stream.in_blocks_of(2).over_blocks(lambda user, block: block.num_users)) == 40
    assert len(begun) == in_training + 2
