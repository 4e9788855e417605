"""The pulse on a stream: the counts, the fit, the ranks and the run of the same data in memory."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import on_gpu
from data_logs import START, loose, prepared, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import MUCH, memory_for, train_in_memory
from training import SIZE, one_thread, tiny
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data import by_time
from trope.data.by_time import EventRuns, sort_by_time
from trope.data.folder import BY_TIME, checksum_of, sha256_of, shard_folder
from trope.data.in_time import InTime
from trope.data.protocols import Protocol, Splits
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.views import asked_within
from trope.evaluate import evaluation
from trope.evaluate.live import events_before
from trope.evaluate.some_users import draw_users
from trope.evaluate.streamed import evaluate
from trope.models.recommender import SequentialRecommender
from trope.runs import PULSE
from trope.times import DAY
from trope.train import pulse as fitting
from trope.train.loop import Trainer, train
from trope.train.pulse import fit_pulse, keep_counts

__all__ = ["one_thread"]  # a fixture for every test in here
PROTOCOLS = ("loo-strict", "loo-paper", "holdout", "next-basket")
Opened = tuple[Stream, Sequences]


def days_of_fashion(folder: Path, protocol: str) -> Path:
    """60 users in 6 shards; everybody picks the day's own item half of the time. Many events share a moment."""
    random = np.random.default_rng(0)
    users, days = np.repeat(np.arange(60), 14), random.integers(0, 40, 60 * 14)
    of_day, items = random.integers(0, 30, 40), random.integers(0, 30, len(users))
    follows = random.random(len(users)) < 0.5
    items[follows] = of_day[days[follows]]
    times = START // DAY * DAY + days * DAY + 3600 * random.integers(0, 24, len(users))
    log = write_parquet(folder / "log.parquet", list(zip(users.tolist(), items.tolist(), times.tolist(), strict=True)))
    cut = Protocol(protocol, window=6 * DAY if protocol == "holdout" else None)
    return prepared(log, folder / "data", loose(shard_users=11, protocol=cut)).path


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def path(protocol: str) -> Path:
        if protocol not in found:
            found[protocol] = days_of_fashion(tmp_path_factory.mktemp(protocol), protocol)
        return found[protocol]

    return path


@pytest.fixture(params=PROTOCOLS)
def both(request: pytest.FixtureRequest, path_of: Callable[[str], Path]) -> Opened:
    """A stream of blocks of two shards, and the same in memory, as they are trained on with a pulse."""
    path = path_of(request.param)
    stream, data = Stream.open(path, memory_for(path, 2, tiny())), Sequences.load(path)
    return (stream.with_own_validation(), data.with_own_validation()) if data.validates_on_test else (stream, data)


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runs are read and merged in many parts."""
    monkeypatch.setattr(by_time, "LEAST", 5)
    monkeypatch.setattr(EventRuns.merged, "__defaults__", (40,))
    monkeypatch.setattr("trope.data.in_time.PIECE", 7)


def test_shards_hold_their_events_by_time(both: Opened) -> None:
    stream, data = both
    shards = [np.load(shard_folder(stream.path, number) / f"{BY_TIME[0]}.npy") for number in range(6)]
    times = [np.load(shard_folder(stream.path, number) / f"{BY_TIME[1]}.npy") for number in range(6)]
    assert all((np.diff(each) >= 0).all() for each in times)
    found = sorted(zip(np.concatenate(times).tolist(), np.concatenate(shards).tolist(), strict=True))
    trained, known = data.first_events(data.train_end), data.first_events(data.test_start)
    signs = torch.where(torch.isin(known, trained), 1, -1)
    assert (signs < 0).any()
    expected = sorted(zip(data.times[known].tolist(), (signs * data.items[known]).tolist(), strict=True))
    assert found == expected


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=12), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_runs_are_merged_as_python_sorts_them(shards: list[list[tuple[int, int]]], most: int) -> None:
    class Run:
        def __init__(self, pairs: list[tuple[int, int]]) -> None:
            self.pairs, self.events = sorted(pairs), len(pairs)

        def read(self, first: int, count: int):
            part = self.pairs[first : first + count]
            return np.array([item for _, item in part], np.int32), np.array([time for time, _ in part], np.int64)

    runs = EventRuns.__new__(EventRuns)
    runs.runs = [Run(pairs) for pairs in shards]  # type: ignore[misc]
    pieces = list(runs.merged(most))
    assert max(len(items) for items, _ in pieces) <= max(most, by_time.LEAST * len(shards))
    times = np.concatenate([times for _, times in pieces])
    assert (np.diff(times) >= 0).all()
    found = sorted(zip(times.tolist(), np.concatenate([items for items, _ in pieces]).tolist(), strict=True))
    assert found == sorted(pair for pairs in shards for pair in pairs)


class Counted:
    """A shard of so many events."""

    def __init__(self, events: int) -> None:
        self.events = events

    def read(self, first: int, count: int) -> by_time.Pair:
        times = np.arange(first, min(first + count, self.events))
        return np.ones(len(times), np.int32), times


def test_events_that_were_handed_over_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those who go through them, each has what was read and what is handed over; who was let go has nothing."""
    most, event_bytes = 40_000, 12
    monkeypatch.setattr(EventRuns.merged, "__defaults__", (most,))
    monkeypatch.setattr("trope.data.in_time.PIECE", 1_000)
    runs = EventRuns.__new__(EventRuns)
    runs.runs = [Counted(5 * most) for _ in range(4)]  # type: ignore[misc]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(3):
            events = InTime(runs, True, torch.device("cpu"))
            (pieces,) = events.until([2 * most])
            assert sum(len(items) for items, _ in pieces) == 8 * most
            assert tracemalloc.get_traced_memory()[0] < 3 * most * event_bytes
            del events, pieces
            assert tracemalloc.get_traced_memory()[0] < most
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("split", ["valid", "test"])
def test_counts_are_those_of_a_store_in_memory(both: Opened, split: str) -> None:
    _, data = both
    pulse = SequentialRecommender(tiny(model="trope"), data.num_items, data.time_span).pulse
    assert pulse is not None and pulse.periods
    streamed, whole = (pulse.count_in_time(events_before(each, split)) for each in both)
    first, last = int(data.times.min()), int(data.times.max())
    late = torch.tensor([first, first + 9 * DAY + 3600, first + 20 * DAY, last, last + DAY])
    early = torch.tensor([first + 3 * DAY, first + 3 * DAY, last + 9 * DAY])
    for moments in (late, early):  # the second begins anew
        for found, expected in zip(streamed.at(moments), whole.at(moments), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(streamed.counts.counts_KV, whole.counts.counts_KV, rtol=1e-12, atol=1e-12)


def test_the_same_users_are_drawn(both: Opened) -> None:
    _, data = both
    views = [lambda store: store]
    if data.protocol.name == "holdout":
        views = [lambda store, end=end: asked_within(store, *end) for end in fitting._windows(data.protocol)]
    drawn = [draw_users(each, views, "valid", 9, torch.Generator().manual_seed(3)) for each in both]
    assert len(drawn[0]) == len(views)
    for (small, mine), (whole, theirs) in zip(*drawn, strict=True):
        assert small.num_users < whole.num_users and len(theirs)
        for one, other in zip(
            small.eval_batch("valid", mine, 8)[1:], whole.eval_batch("valid", theirs, 8)[1:], strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("limits", [(7_168, 16_384), (25, 20)])
def test_the_fit_is_that_of_a_store_in_memory(
    both: Opened, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all users and items, and with some."""
    for name, most in zip(("MOST_USERS", "MOST_ITEMS"), limits, strict=True):
        monkeypatch.setattr(fitting, name, most)
    config, fitted = tiny(model="trope"), []
    for store in both:
        torch.manual_seed(0)
        model = SequentialRecommender(config, store.num_items, store.time_span)
        found = fit_pulse(model, store, config, seed=5)
        keep_counts(model, store)
        fitted.append((model, found))
    (mine, streamed), (theirs, whole) = fitted
    assert whole["exponent"] is not None, "or the fit has found nothing"
    for name in ("exponent", "criterion", "users"):
        assert streamed[name] == whole[name], name
    assert (streamed["cosine"], streamed["pulse"]) == pytest.approx((whole["cosine"], whole["pulse"]), abs=1e-6)
    for (name, buffer), other in zip(mine.pulse.named_buffers(), theirs.pulse.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_ranks_by_a_pulse_are_those_of_a_store_in_memory(both: Opened, split: str) -> None:
    stream, data = both
    torch.manual_seed(1)
    model = SequentialRecommender(tiny(model="trope"), data.num_items, data.time_span).eval()
    for name in ("network", "everybody", "own"):
        model.pulse.get_buffer(name).normal_()
    model.pulse.get_buffer("age_unit").fill_(DAY)
    expected, found = evaluation.evaluate(model, data, split, "none", 8), evaluate(model, stream, split, "none", 8)
    np.testing.assert_array_equal(found.users, expected.users)
    np.testing.assert_array_equal(found.places.better, expected.places.better)
    assert found.metrics == expected.metrics
    assert found.metrics != evaluate(model, stream, split, "none", 8, live=False).metrics, "or no pulse was looked at"


@pytest.mark.parametrize("protocol", ["loo-strict", "loo-paper", "holdout"])
def test_the_recommended_preset_trains_on_a_stream(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """With the pulse and the refit, against the same training in memory in the order of the stream."""
    path, config = path_of(protocol), tiny("train.refit=true", "train.epochs=2", model="trope")
    memory = memory_for(path, 2, config)
    found = train(Stream.open(path, memory), config, tmp_path / "stream", "cpu", progress=False)
    expected = train_in_memory(path, config, memory, tmp_path / "memory", monkeypatch)
    mine, theirs = (json.loads((tmp_path / name / PULSE).read_text()) for name in ("stream", "memory"))
    assert mine["exponent"] == theirs["exponent"] is not None
    assert (found["valid"], found["best_epoch"]) == (expected["valid"], expected["best_epoch"])
    assert found["test"] == pytest.approx(expected["test"], abs=1e-9)
    models = [SequentialRecommender.from_pretrained(tmp_path / name / "best") for name in ("stream", "memory")]
    for (name, value), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=name)
    assert models[0].pulse.is_fitted and int(models[0].pulse.get_buffer("counted_until")) == models[0].time_span[1] + 1


@on_gpu
def test_the_fit_and_the_ranks_on_a_gpu_are_those_of_a_store_in_memory(path_of: Callable[[str], Path]) -> None:
    config = tiny(model="trope")
    for protocol in ("loo-strict", "holdout"):
        path, found = path_of(protocol), []
        for store in (Stream.open(path, memory_for(path, 2, config)).to("cuda"), Sequences.load(path).to("cuda")):
            torch.manual_seed(0)
            model = SequentialRecommender(config, store.num_items, store.time_span).to("cuda")
            fit_pulse(model, store, config, seed=5)
            keep_counts(model, store)
            found.append((model.pulse.weights(), evaluate(model, store, "test", "none", 8).metrics))
        assert found[0][1] == pytest.approx(found[1][1], abs=0.02)
        for name, weights in found[0][0].items():
            torch.testing.assert_close(torch.tensor(weights), torch.tensor(found[1][0][name]), rtol=1e-2, atol=1e-2)


def test_a_dataset_without_events_by_time_is_refused_before_the_work(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training and a ranking take hours, and what counts comes last."""
    copy = Path(shutil.copytree(path_of("loo-strict"), tmp_path / "copy"))
    meta = json.loads((copy / "meta.json").read_text())
    for shard in meta["shards"]:
        for name in BY_TIME:
            del shard[name]
    meta["checksum"] = checksum_of(meta)
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"prepared by an older version .* prepare it again"):
        train(Stream.open(copy, MUCH), tiny(), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run").exists()
    train(Sequences.load(copy), tiny("train.epochs=1"), tmp_path / "run", "cpu", progress=False)
    ranked: list[object] = []
    monkeypatch.setattr("trope.evaluate.streamed.evaluate", lambda *each, **_: ranked.append(each))
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--memory", "1MB", "--device", "cpu"])
    assert "prepared by an older version" in str(done.exception) and not ranked


def test_damaged_events_by_time_are_refused(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path_of("loo-strict"), tmp_path / "copy"))
    file = shard_folder(copy, 3) / "by_time_times.npy"
    data = bytearray(file.read_bytes())
    data[-8:] = bytes(8)
    file.write_bytes(data)
    for verify, said in ((True, r"00003/by_time_times.npy does not match its checksum"), (False, "are not in order")):
        events = Stream.open(copy, MUCH, verify=verify).in_time("test")
        with pytest.raises(ValueError, match=said):
            list(next(events.until([10**10])))
    with pytest.raises(ValueError, match="does not match its checksum"):
        train(Stream.open(copy, MUCH), tiny(model="trope"), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run" / "checkpoints").exists(), (
        "it is refused before the first step, not after the last one"
    )


def test_of_events_that_do_not_agree_the_damaged_file_is_named(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path_of("loo-strict"), tmp_path / "copy"))
    file = shard_folder(copy, 3) / "times.npy"
    data = bytearray(file.read_bytes())
    data[128] ^= 1  # of the first event, behind the header
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"00003/times.npy does not match its checksum"):
        Stream.open(copy, MUCH).in_time("test").runs.check()


def test_lost_events_by_time_are_refused_before_training(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path_of("loo-strict"), tmp_path / "copy"))
    file = shard_folder(copy, 3) / "by_time_times.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="it is truncated"):
        train(Stream.open(copy, MUCH), tiny(model="trope"), tmp_path / "run", "cpu", progress=False)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"by_time_times.npy is missing"):
        train(Stream.open(copy, MUCH), tiny(model="trope"), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run").exists()


def test_events_by_time_that_go_or_change_meanwhile_are_refused(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a file to read does not advise to make room."""
    copy = Path(shutil.copytree(path_of("loo-strict"), tmp_path / "copy"))
    file = shard_folder(copy, 3) / "by_time_items.npy"
    events = Stream.open(copy, MUCH).in_time("test")
    assert len(list(next(events.until([10**10]))))
    events.restart()
    shutil.copy(file, tmp_path / "other")
    (tmp_path / "other").replace(file)
    with pytest.raises(ValueError, match=r"00003/by_time_items.npy was replaced"):
        list(next(events.until([10**10])))
    fit = Trainer.fit_pulse

    def without_file(self: Trainer, say: Callable[[str], None]) -> None:
        file.unlink()
        fit(self, say)

    monkeypatch.setattr(Trainer, "fit_pulse", without_file)
    with pytest.raises(FileNotFoundError, match=r"by_time_items.npy is missing although meta.json lists it"):
        train(
            Stream.open(copy, MUCH), tiny("train.epochs=1", model="trope"), tmp_path / "run", "cpu", progress=False
        )  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_events_by_time_of_others_are_refused_checksums_or_not(
    path_of: Callable[[str], Path], tmp_path: Path, protocol: str
) -> None:
    """An event of the test among them would let the counts look ahead."""
    copy = Path(shutil.copytree(path_of(protocol), tmp_path / "copy"))
    assert len(list(next(Stream.open(copy, MUCH).in_time("test").until([10**10])))), "as they are, they are taken"
    meta = json.loads((copy / "meta.json").read_text())
    file = shard_folder(copy, 2) / "by_time_items.npy"
    items = np.load(file)
    items[5] = -items[5]
    np.save(file, items)
    meta["shards"][2]["by_time_items"]["sha256"] = sha256_of(file)
    meta["checksum"] = checksum_of(meta)
    (copy / "meta.json").write_text(json.dumps(meta))
    events = Stream.open(copy, MUCH).in_time("test")
    with pytest.raises(ValueError, match="are not those of its users"):
        list(next(events.until([10**10])))


def test_a_shard_of_test_events_alone_has_none_by_time() -> None:
    cuts = Splits(*(np.array(each, np.int32) for each in ([0], [0], [0], [2])))
    found = sort_by_time(np.array([3, 4]), np.array([7, 8]), np.array([0, 2]), cuts, Protocol("holdout", 5, 2))
    assert all(len(values) == 0 for values in found.values()) and found[BY_TIME[0]].dtype == np.int32


def test_the_commands_train_evaluate_and_recommend(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["--device", "cpu", "--memory", "1MB"]
    chosen = [word for setting in (*SIZE, "train.epochs=1", "train.refit=true") for word in ("--set", setting)]
    told = ["train", str(path_of("holdout")), "--out", str(run), "--model", "trope", "--no-progress", *words, *chosen]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 0, done.output
    trained = json.loads((run / "metrics.json").read_text())["test"]
    done = CliRunner().invoke(app, ["evaluate", str(run), *words, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out.json").read_text())["metrics"]["run"] == trained
    done = CliRunner().invoke(app, ["evaluate", str(run), "--device", "cpu", "--json", str(tmp_path / "whole.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "whole.json").read_text())["metrics"]["run"] == pytest.approx(trained)
    done = CliRunner().invoke(app, ["recommend", str(run), "--user", "7", "--at", str(START + 41 * DAY)])
    assert done.exit_code == 0 and "user 7" in done.output, done.output
