"""Counting on a stream: the baselines and the control "MODEL + counting" of the same data in memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from streams import MUCH, memory_for, train_in_memory
from test_stream_pulse import PROTOCOLS, days_of_fashion
from training import SIZE, one_thread, tiny
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.protocols import Protocol
from trope.data.sequences import EvalBatch, Sequences
from trope.data.stream import Stream
from trope.evaluate import streamed_baselines
from trope.evaluate.baselines import NAMES, RECENT, BatchCounts, baselines, batch_size, equal_baselines
from trope.evaluate.counting import choose_counting
from trope.evaluate.evaluation import EvalResult, rank_all
from trope.evaluate.streamed import evaluate
from trope.evaluate.streamed_baselines import rank_baselines
from trope.evaluate.window_counts import WindowCounts
from trope.experiments.advice import advice
from trope.experiments.pool import Variant
from trope.experiments.report.baselines import count_baselines
from trope.experiments.train_many import train_many
from trope.models.pulse import SortedEvents
from trope.models.recommender import SequentialRecommender
from trope.runs import COUNTING
from trope.times import DAY
from trope.train.loop import train

__all__ = ["one_thread"]  # a fixture for every test in here


@pytest.fixture(scope="module", params=PROTOCOLS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return days_of_fashion(tmp_path_factory.mktemp("counting"), request.param)


def assert_same(found: EvalResult, wanted: EvalResult) -> None:
    np.testing.assert_array_equal(found.users, wanted.users)
    for name in ("better", "ties", "offsets"):
        np.testing.assert_array_equal(getattr(found.places, name), getattr(wanted.places, name))


@pytest.mark.parametrize("filter_seen", ["none", "history"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_baselines_are_those_of_a_store_in_memory(
    path: Path, split: str, filter_seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of two shards and batches of three users."""
    config = tiny(f"eval.filter_seen={filter_seen}")
    data, stream = Sequences.load(path), Stream.open(path, memory_for(path, 2, tiny()))
    scorers = baselines(data, split, config)
    wanted = rank_all(scorers, data, split, filter_seen, config.model.max_len, batch=batch_size(data))
    monkeypatch.setattr(streamed_baselines, "batch_size", lambda *_: 3)
    found = rank_baselines(stream, split, config)
    assert list(found.results) == list(wanted) and len(wanted) == 3 + len(RECENT)
    for name in wanted:
        assert_same(found.results[name], wanted[name])
    assert found.equal == equal_baselines(scorers, data, split)
    assert len({tuple(each.ranks) for each in wanted.values()}) >= 3, "they differ, or little is tested"


def test_baselines_that_are_equal_say_why(tmp_path: Path) -> None:
    """As of a store in memory: plain dates have nothing in the last hour before a midnight."""
    log = [(user, item, time - time % DAY) for user, item, time in random_log(rows=300, spread=10**7)]
    file = write_parquet(tmp_path / "log.parquet", log)
    path = prepared(
        file, tmp_path / "data", loose(shard_users=4, protocol=Protocol("holdout", window=3 * DAY + 9_000))
    ).path
    data, config = Sequences.load(path), tiny()
    found = rank_baselines(Stream.open(path, MUCH), "test", config).equal
    assert found == equal_baselines(baselines(data, "test", config), data, "test")
    assert any("equals 'most popular': no event lies" in sentence for sentence in found)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=40),
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
)
def test_windows_hold_what_lies_in_them(events: list[tuple[int, int]], moments: list[int], seconds: list[int]) -> None:
    """At moments that rise, repeat, and begin again."""
    items, times = (torch.tensor([each[side] for each in events], dtype=torch.int64) for side in (0, 1))
    counts = WindowCounts(lambda: SortedEvents(items, times), seconds, 4, torch.device("cpu"))
    for asked in (sorted(moments), sorted(moments)[-2:], sorted(moments)):
        for moment, found in zip(asked, counts.at(torch.tensor(asked)), strict=True):
            for row, length in enumerate(seconds):
                here = [item for item, time in events if moment - length <= time < moment]
                assert found[row].tolist() == np.bincount(here, minlength=5).tolist()


def test_at_one_moment_each_event_is_read_once() -> None:
    """As in a holdout, however many batches and blocks ask for it."""
    read = []

    class Events(SortedEvents):
        def until(self, moments: list[int]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
            for pieces in super().until(moments):
                read.extend(times.tolist() for _, times in pieces)
                yield pieces

    times = torch.arange(9)
    counts = WindowCounts(lambda: Events(torch.ones_like(times), times), [4, 2], 1, torch.device("cpu"))
    for _ in range(3):
        assert [found[:, 1].tolist() for found in counts.at(torch.tensor([8]))] == [[4, 2]]
    assert read == [times[:8].tolist()]


def test_counts_of_one_batch_are_in_memory() -> None:
    """A large catalogue has no room for those of the batch before."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def at(moments: torch.Tensor) -> Iterator[torch.Tensor]:
        assert all(each() is None for each in alive)
        for moment in moments.tolist():
            yield torch.tensor([[0.0, moment], [0.0, 2 * moment]])

    counts = BatchCounts(at)
    for moments in ([5, 5, 7], [9]):
        batch = EvalBatch(*(torch.tensor(moments) for _ in EvalBatch._fields))
        counts_KMV, moment_B = counts(batch)
        assert counts_KMV[:, :, 1][:, moment_B].tolist() == [moments, [2 * moment for moment in moments]]
        assert counts(batch)[0] is counts_KMV, "made once"
        alive.append(weakref.ref(counts_KMV))
        del counts_KMV


def test_a_split_without_users_is_refused(path: Path) -> None:
    stream = Stream.open(path, MUCH).with_own_validation().with_validation()
    with pytest.raises(ValueError, match="has no user to evaluate in split 'valid'"):
        rank_baselines(stream, "valid", tiny())


def test_the_control_is_that_of_a_store_in_memory(path: Path) -> None:
    config = tiny()
    data, stream = Sequences.load(path), Stream.open(path, memory_for(path, 2, config))
    torch.manual_seed(0)
    model = SequentialRecommender(config, data.num_items, data.time_span)
    found, wanted = (choose_counting(model, each, config, seed=3) for each in (stream, data))
    assert found == wanted and wanted["beta"] > 0, "an untrained model is better with counting"


def test_a_streamed_run_has_the_control_of_a_run_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = days_of_fashion(tmp_path, "holdout")
    config = tiny("train.epochs=1", "train.batch=20")
    memory = memory_for(path, 2, config)
    streamed = train(Stream.open(path, memory), config, tmp_path / "stream", "cpu", progress=False)
    whole = train_in_memory(path, config, memory, tmp_path / "memory", monkeypatch)
    chosen = [json.loads((tmp_path / name / COUNTING).read_text()) for name in ("stream", "memory")]
    assert chosen[0] == chosen[1] and chosen[0]["beta"] > 0
    assert streamed["test_with_counting"] == whole["test_with_counting"] != whole["test"]


def test_a_comparison_streams_its_trainings_and_counts_as_in_memory(tmp_path: Path) -> None:
    path = days_of_fashion(tmp_path, "holdout")
    memory = memory_for(path, 2, tiny())
    trained = train_many(
        path, [Variant("a", "hstu", (*SIZE, "train.epochs=1"))], 1, 1, tmp_path, "cpu", memory=str(memory)
    )
    assert trained.failures == []
    (state, *_) = trained.runs[0].folder.glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["cursor"] is not None, "it was streamed"
    config = trained.runs[0].config
    streamed = count_baselines(trained.data, config, tmp_path / "stream", "cpu")
    assert streamed == count_baselines(Sequences.load(path), config, tmp_path / "memory", "cpu")
    assert list(streamed.metrics) == [*NAMES, *streamed.half_lives]
    assert advice(trained.data, trained.runs, "cpu") == advice(Sequences.load(path), trained.runs, "cpu")
    done = CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path), "--memory", "1GB"])
    assert isinstance(done.exception, ValueError) and "--memory are for training" in str(done.exception)


@pytest.mark.parametrize(("model", "line"), [("trope", "pulse: fitting"), ("hstu-trope", "counting: choosing")])
def test_a_part_that_takes_long_is_announced_when_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, line: str
) -> None:
    stream = Stream.open(days_of_fashion(tmp_path, "holdout"), MUCH)
    train(stream, tiny("train.epochs=1", model=model), tmp_path / "run", "cpu")
    said = capsys.readouterr().out
    assert "checking 6 shards before the first step" in said and line in said
    train(stream, tiny("train.epochs=1", model=model), tmp_path / "run", "cpu", resume=True)
    said = capsys.readouterr().out
    assert "checking" not in said and line not in said, "it was done"
    assert "test: ranking" in said


def test_a_terminal_sees_how_many_blocks_are_ranked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shards, shown in ((2, True), (6, False)):
        stream = Stream.open(path, memory_for(path, shards, tiny()))
        model = SequentialRecommender(tiny(), stream.num_items, stream.time_span)
        evaluate(model, stream, "test", "none", 8, progress=True)
        of_model = capsys.readouterr().err
        rank_baselines(stream, "test", tiny(), progress=True)
        for said in (of_model, capsys.readouterr().err):
            assert "evaluate test" in said and ("blocks:" in said and "/3 [" in said) == shown
