"""trope fit on a stream: the model of the same data in memory, trained in the same order, with the same counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from streams import ALONE, MUCH, BlockFeed, memory_for
from test_stream_pulse import days_of_fashion
from training import one_thread, tiny, weights
from typer.testing import CliRunner

from trope.cli.main import app
from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.views import all_training
from trope.models.recommender import SequentialRecommender
from trope.runs import read_lineage
from trope.train import loop
from trope.train.fit import fit
from trope.train.loop import Interrupted, train
from trope.train.streamed import StreamFeed

__all__ = ["one_thread"]  # a fixture for every test in here


@pytest.fixture(scope="module", params=["holdout", "loo-paper"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return days_of_fashion(tmp_path_factory.mktemp("fit"), request.param)


@pytest.fixture(scope="module")
def run(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(Sequences.load(path), tiny("train.epochs=2", model="trope"), folder, "cpu", progress=False)
    return folder


def test_every_event_is_training(path: Path) -> None:
    stream, data = Stream.open(path, MUCH).all_training(), all_training(Sequences.load(path))
    assert stream.time_span == data.time_span
    assert not stream.can_evaluate("valid") and not stream.can_evaluate("test")
    assert torch.equal(stream.training_counts(), data.training_counts())
    assert int(stream.training_counts().sum()) == stream.num_events


def test_the_model_is_that_of_a_fit_in_memory(
    path: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was stopped in between."""
    memory = memory_for(path, 2, tiny())

    def make_feed(data: Sequences, config: Config, group: object) -> BlockFeed:
        like = StreamFeed(Stream.open(path, memory).all_training(), config, ALONE)
        like.close()
        return BlockFeed(data, config, like)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_feed", make_feed)
        fit(Sequences.load(path), run, tmp_path / "memory", "cpu", progress=False)
    fit(Stream.open(path, memory), run, tmp_path / "stream", "cpu", progress=False)
    whole, streamed = (SequentialRecommender.from_pretrained(tmp_path / name / "best") for name in ("memory", "stream"))
    assert whole.time_span == streamed.time_span
    found = dict(streamed.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(found[name], value), name
    assert streamed.pulse is not None and float(streamed.pulse.get_buffer("counts").sum()) > 0
    stop_if_asked = loop.Trainer._stop_if_asked

    def at_five(self: loop.Trainer, rounds) -> None:
        rounds.stop.signum = 15 if self.state.step == 5 else 0
        stop_if_asked(self, rounds)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_stop_if_asked", at_five)
        with pytest.raises(Interrupted):
            fit(Stream.open(path, memory), run, tmp_path / "parts", "cpu", progress=False)
    fit(Stream.open(path, memory), run, tmp_path / "parts", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "parts") == weights(tmp_path / "stream")


def test_the_command_fits_a_stream(path: Path, run: Path, tmp_path: Path) -> None:
    memory = str(memory_for(path, 2, tiny()))
    words = ["fit", str(path), "--like", str(run), "--out", str(tmp_path / "out"), "--device", "cpu", "--no-progress"]
    done = CliRunner().invoke(app, [*words, "--memory", memory])
    assert done.exit_code == 0 and "is ready to serve" in done.output, done.output
    lineage = read_lineage(tmp_path / "out")
    assert lineage is not None and lineage["kind"] == "fit"
    (state, *_) = (tmp_path / "out" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["cursor"] is not None, "it was streamed"
