"""A refit on a stream: the batches, the weights and the test of the same refit in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from streams import ALONE, MUCH, BlockFeed, memory_for, train_in_memory
from test_stream import same_work
from training import one_thread, tiny, weights

from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.models.recommender import SequentialRecommender
from trope.runs import REFIT
from trope.train import loop
from trope.train.loop import Interrupted, train
from trope.train.streamed import StreamFeed

__all__ = ["one_thread"]  # a fixture for every test in here
PROTOCOLS = ("loo-strict", "holdout", "next-basket")
SETTINGS = ("train.refit=true", "train.patience=0", "train.epochs=3", "train.batch=5")


def sharded(folder: Path, protocol: str) -> Path:
    """40 users in 6 shards."""
    log = write_parquet(folder / "log.parquet", random_log(rows=700, users=40, items=25, spread=9 * 10**5))
    return prepared(log, folder / "data", loose(shard_users=7, protocol=Protocol(protocol))).path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded(tmp_path_factory.mktemp("refit"), "loo-strict")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_validation_events_become_training(tmp_path: Path, protocol: str) -> None:
    path, config = sharded(tmp_path, protocol), tiny("train.batch=5")
    stream = Stream.open(path, memory_for(path, 2, config)).with_validation()
    data = Sequences.load(path).with_validation()
    assert stream.time_span == data.time_span and stream.time_span != Stream.open(path, MUCH).time_span
    assert not stream.can_evaluate("valid") and stream.can_evaluate("test")
    assert stream.to("cpu").time_span == data.time_span
    feed = StreamFeed(stream, config, ALONE)
    memory = BlockFeed(data, config, feed)
    assert feed.window == 2 and feed.steps == memory.steps and feed.size == memory.size
    for step in range(2 * feed.steps):
        place = divmod(step, feed.steps)
        assert same_work(feed(*place, step), memory(*place, step)), place
    feed.close()


def test_a_refit_ends_with_the_weights_of_one_in_memory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*SETTINGS)
    memory = memory_for(path, 2, config)
    found = train(Stream.open(path, memory), config, tmp_path / "stream", "cpu", progress=False)
    expected = train_in_memory(path, config, memory, tmp_path / "memory", monkeypatch)
    assert weights(tmp_path / "stream") == weights(tmp_path / "memory")
    assert (found["test"], found["valid"]) == (expected["test"], expected["valid"]) and found["refit"]
    span = SequentialRecommender.from_pretrained(tmp_path / "stream" / "best").time_span
    assert tuple(span) == Sequences.load(path).with_validation().time_span


def test_a_refit_goes_on_with_the_next_batch_and_the_same_blocks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the refit and in the middle of it, resumed with more memory: the same bytes."""
    config = tiny(*SETTINGS)
    memory = memory_for(path, 2, config)
    train(Stream.open(path, memory), config, tmp_path / "whole", "cpu", progress=False)
    for in_refit, step, most in ((False, 11, memory), (True, 3, MUCH)):
        stop_if_asked = loop.Trainer._stop_if_asked

        def now(trainer: loop.Trainer, rounds, in_refit=in_refit, step=step, stop_if_asked=stop_if_asked) -> None:
            rounds.stop.signum = 15 if (trainer.is_refit, trainer.state.step) == (in_refit, step) else 0
            stop_if_asked(trainer, rounds)

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "_stop_if_asked", now)
            with pytest.raises(Interrupted):
                train(Stream.open(path, most), config, tmp_path / "parts", "cpu", resume=True, progress=False)
    state = next((tmp_path / "parts" / REFIT / "checkpoints").glob("*-step00000003/state.json"))
    assert json.loads(state.read_text())["cursor"][3] == 2, "blocks as the run began with"
    train(Stream.open(path, MUCH), config, tmp_path / "parts", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_where_validation_is_the_test_event_there_is_no_refit(tmp_path: Path) -> None:
    path = sharded(tmp_path, "loo-paper")
    with pytest.raises(ValueError, match=r"loo-paper.*would train on the test"):
        train(Stream.open(path, MUCH), tiny(*SETTINGS), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run").exists()
    own, data = Stream.open(path, MUCH).with_own_validation(), Sequences.load(path).with_own_validation()
    block = own.read(range(len(own.sizes))).data
    assert torch.equal(block._tensors["splits"], data._tensors["splits"]) and own.can_evaluate("valid")
    assert own.with_validation().time_span == data.with_validation().time_span
