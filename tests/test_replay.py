"""trope replay: ticks by hand, nothing of a tick is seen before it is predicted, resumed replays, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from test_fit import invoke
from training import SIZE, one_thread, tiny, tiny_data

from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.views import asked_at, trained_until
from trope.experiments.replay import COUNTS, RETRAIN, STALE, UPDATE, Replay, Tick, by_counts, rank, ticks_of
from trope.experiments.replay_report import finding, summarise
from trope.figures.replay import draw
from trope.models.recommender import SequentialRecommender
from trope.runs import RunLock
from trope.times import DAY, HOUR
from trope.train.distributed import Group
from trope.train.fit import fit
from trope.train.loop import train
from trope.train.process import reproducible
from trope.train.update import retrain

__all__ = ["one_thread"]  # a fixture for every test in here
SETTINGS = ("train.refit=true", "train.epochs=2")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("replay")
    log = write_parquet(folder / "log.parquet", random_log(rows=600, users=30, items=20, seed=0))
    return prepared(log, folder / "data", loose(protocol=Protocol("holdout", window=2 * DAY)))


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(data, tiny(*SETTINGS, model="trope"), folder, "cpu", progress=False)
    return folder


def play(data: Sequences, run: Path, out: Path, every: int = 12 * HOUR, retrain_every: int = 2) -> list[dict[str, Any]]:
    with RunLock() as lock:
        return Replay(data, run, out, every, retrain_every, None, CPU, lock).play()


@pytest.fixture(scope="module")
def played(data: Sequences, run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("played") / "out"
    return out, play(data, run, out)


def with_live_counts(run: Path) -> SequentialRecommender:
    """The run's model with a pulse that listens to everybody."""
    model = SequentialRecommender.from_pretrained(run / "best")
    assert model.pulse is not None
    model.pulse.get_buffer("everybody")[0] = 1.0
    return model


def test_ticks_cover_the_window_once() -> None:
    assert ticks_of(100, 125, 10) == [Tick(0, 100, 110), Tick(1, 110, 120), Tick(2, 120, 125)]
    with pytest.raises(ValueError, match="longer than 0"):
        ticks_of(100, 125, 0)
    with pytest.raises(ValueError, match="more than 9,999 ticks"):
        ticks_of(0, 10**6, 1)


def test_everybody_with_an_event_in_a_tick_is_asked(data: Sequences, played: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = played
    assert len(records) == 4
    for record in records:
        asked = 0
        for user in range(data.num_users):
            times = data.times[data.offsets[user] : data.offsets[user + 1]]
            inside = (times >= record["start"]) & (times < record["end"])
            asked += bool(inside.any()) and bool((times < record["start"]).any())
        assert record["users"] == asked
        assert list(record["ways"]) == [STALE, COUNTS, UPDATE, RETRAIN, "counting alone"]
    first = records[0]["ways"]  # all networks are the same one at the first tick
    assert first[STALE] == first[COUNTS] == first[UPDATE] == first[RETRAIN]
    steps = {way: [record["spent"][way]["steps"] for record in records] for way in (STALE, COUNTS, UPDATE, RETRAIN)}
    assert steps[STALE] == steps[COUNTS] == [0] * 4
    assert steps[RETRAIN][0] == steps[RETRAIN][1] == steps[RETRAIN][3] == 0 < steps[RETRAIN][2]
    assert all(step > 0 for step in steps[UPDATE])


def changed(data: Sequences, where: torch.Tensor) -> Sequences:
    """The same data with other items at some events."""
    items = data.items.clone()
    items[where] = items[where] % data.num_items + 1
    return Sequences(data.path, data.meta, {**data._tensors, "items": items})


def test_nothing_of_a_tick_is_seen_before_it_is_predicted(data: Sequences, run: Path) -> None:
    """Other users' events in the tick, and everything after it, change nothing of a user's ranks."""
    start = data.protocol.t_now("test")
    assert start is not None
    start, end = start + DAY, start + DAY + 12 * HOUR
    view, model = asked_at(data, start, end), with_live_counts(run)
    config = model.config
    user = int(view.eval_users("test")[0])
    places = torch.arange(data.num_events)
    mine = (places >= data.offsets[user]) & (places < data.offsets[user + 1])
    other = asked_at(changed(data, (data.times >= start) & ~mine), start, end)
    after = asked_at(changed(data, data.times >= end), start, end)
    for by in (lambda v: rank(model, v, config), lambda v: by_counts(v, DAY, config)):
        assert (
            by(view).ranks[: int(by(view).offsets[1])].tolist() == by(other).ranks[: int(by(other).offsets[1])].tolist()
        )
        assert by(view).metrics == by(after).metrics
    before = asked_at(changed(data, data.times < start), start, end)
    assert by_counts(view, DAY, config).metrics != by_counts(before, DAY, config).metrics  # the past does matter


def test_what_comes_later_changes_no_tick_before(
    data: Sequences, run: Path, played: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    _, records = played
    later = play(changed(data, data.times >= records[2]["start"]), run, tmp_path / "out")
    assert [r["ways"] for r in later[:2]] == [r["ways"] for r in records[:2]]
    assert later[3]["ways"] != records[3]["ways"]


def test_frozen_counts_stand_still(data: Sequences, run: Path) -> None:
    start = data.protocol.t_now("test")
    assert start is not None
    view, model = asked_at(data, start + DAY, start + 2 * DAY), with_live_counts(run)
    frozen = rank(model, view, model.config, counted_until=start)
    assert frozen.metrics != rank(model, view, model.config).metrics
    user, places = int(view.eval_users("test")[0]), torch.arange(data.num_events)
    others = (places < data.offsets[user]) | (places >= data.offsets[user + 1])
    other = asked_at(changed(data, (data.times >= start) & others), start + DAY, start + 2 * DAY)
    again = rank(model, other, model.config, counted_until=start)  # what others did since does not matter
    assert frozen.ranks[: int(frozen.offsets[1])].tolist() == again.ranks[: int(again.offsets[1])].tolist()
    assert rank(model, view, model.config, counted_until=start + DAY).metrics == rank(model, view, model.config).metrics


def test_retraining_is_a_training_until_the_tick(
    data: Sequences, run: Path, played: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, records = played
    config = SequentialRecommender.from_pretrained(run / "best").config
    latest = sorted((run / "checkpoints").iterdir())[-1]
    state = json.loads((latest / "state.json").read_text())
    with reproducible(CPU):
        model, _ = retrain(
            trained_until(data, records[2]["start"]), config, state["factors"][: state["best_epoch"]], Group(0, 1, CPU)
        )
    (folder,) = (out / "models").glob("retrain-*")
    assert folder.name == "retrain-0002"
    assert torch.equal(SequentialRecommender.from_pretrained(folder).items.weight, model.items.weight)


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "spent": {way: each["steps"] for way, each in record["spent"].items()}} for record in records]


@pytest.mark.parametrize("place", ["tick", "model"])
def test_a_killed_replay_goes_on_to_the_same_bytes(
    data: Sequences, run: Path, played: tuple[Path, list[dict[str, Any]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, place: str,
) -> None:  # fmt: skip
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    out, records = played
    with monkeypatch.context() as patch, RunLock() as lock:
        playing = Replay(data, run, tmp_path / "out", 12 * HOUR, 2, None, CPU, lock)
        if place == "model":  # a model is saved, and its tick is not
            record = Replay._record
            patch.setattr(Replay, "_record", lambda self, number: stop() if number == 2 else record(self, number))
        with pytest.raises(KeyboardInterrupt):
            playing.play(stop if place == "tick" else None)
    again = play(data, run, tmp_path / "out")
    assert without_seconds(again) == without_seconds(records)
    for name in ("update-0004", "retrain-0002"):
        ours, theirs = (each / "models" / name / "model.safetensors" for each in (tmp_path / "out", out))
        assert ours.read_bytes() == theirs.read_bytes()
    assert without_seconds(play(data, run, tmp_path / "out")) == without_seconds(records)  # a finished one stays


def test_the_command_writes_a_table_a_page_and_a_figure(data: Sequences, tmp_path: Path) -> None:
    out, small = tmp_path / "out", [f"--set={setting}" for setting in tiny_settings()]
    command = ("replay", data.path, "--every", "1d", "--out", out, "--model", "trope", "--device", "cpu", *small)
    code, said = invoke(*command)
    assert code == 0, said
    found = json.loads((out / "replay.json").read_text())
    assert found["ticks"] == 2 and set(found["ways"]) == {STALE, COUNTS, UPDATE, RETRAIN, "counting alone"}
    page = (out / "replay.md").read_text()
    assert "with live counts" in page and "tick 2 of 2" in said
    assert "# Replay of data: hstu + trope + pulse, width " in page  # `hstu` alone is the name of another model
    assert (out / "replay.png").read_bytes()[:4] == b"\x89PNG"
    code, said = invoke(*command)  # nothing is computed again
    assert code == 0 and "tick" not in said.split("Replay of")[0]
    code, said = invoke(*command, "--steps", 3)
    assert code == 2 and "steps was None, now 3" in said
    trained = (out / "train" / "best" / "model.safetensors").read_bytes()
    code, said = invoke(*command, "--set", "train.epochs=2")  # would train on, and the ticks be another model's
    assert code == 2 and "train.epochs was 1, now 2" in said
    assert (out / "train" / "best" / "model.safetensors").read_bytes() == trained


def tiny_settings() -> list[str]:
    return [*SIZE, "train.epochs=1"]


def test_a_model_without_a_pulse_and_no_retraining(data: Sequences, tmp_path: Path) -> None:
    train(data, tiny("train.epochs=1"), tmp_path / "run", "cpu", progress=False)  # no refit: it is trained on here
    records = play(data, tmp_path / "run", tmp_path / "out", DAY, retrain_every=0)
    assert list(records[0]["ways"]) == [STALE, UPDATE, "counting alone"]
    kept = SequentialRecommender.from_pretrained(tmp_path / "out" / "models" / "stale-0000")
    assert kept.time_span == trained_until(data, records[0]["start"]).time_span
    means = summarise(records, [STALE, UPDATE, "counting alone"])
    assert "of what retraining" not in finding(means, DAY)


def test_means_weigh_everybody_alike() -> None:
    def record(tick: int, users: int, value: float) -> dict[str, Any]:
        ways = {way: {"Recall@10": value, "NDCG@10": 0.5} for way in (STALE, UPDATE, RETRAIN)} if users else {}
        spent = {way: {"steps": 10 if way == RETRAIN else 1, "seconds": 1.0} for way in (STALE, UPDATE, RETRAIN)}
        return {"tick": tick, "start": 10**9 + tick, "users": users, "ways": ways, "spent": spent}

    records = [record(0, 1, 0.4), record(1, 0, 0.0), record(2, 3, 0.8)]
    means = summarise(records, [STALE, UPDATE, RETRAIN])
    assert means[UPDATE] == pytest.approx({"Recall@10": 0.7, "NDCG@10": 0.5, "steps": 3, "seconds": 3.0, "times": 3})
    assert finding(means, DAY).endswith("100.0 % of what retraining reaches, at 10.0 % of the steps of a retraining")
    drawn = draw(records, "Recall@10", "title")
    lines = drawn.figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == [STALE, UPDATE, RETRAIN]
    assert lines[0].get_ydata().tolist() == [40.0, 80.0]
    with pytest.raises(ValueError, match="nobody to ask"):
        summarise(records[1:2], [STALE])


def test_a_replay_of_another_model_or_of_a_given_run_is_refused(
    data: Sequences, played: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    train(data, tiny(*SETTINGS, "train.seed=1", model="trope"), tmp_path / "other", "cpu", progress=False)
    command = ("replay", data.path, "--every", "12h", "--retrain-every", 2, "--out", played[0], "--device", "cpu")
    code, said = invoke(*command, "--like", tmp_path / "other")
    assert code == 2 and "holds another replay: another model; choose" in said
    code, said = invoke(*command, "--model", "trope")
    assert code == 2 and "given as --like" in said and not (played[0] / "train").exists()


def test_a_run_of_the_same_log_with_another_window(data: Sequences, run: Path, tmp_path: Path) -> None:
    """It is replayed unless it has learned the window."""
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=600, users=30, items=20, seed=0))
    shorter = prepared(log, tmp_path / "shorter", loose(protocol=Protocol("holdout", window=DAY)))
    assert [record["users"] > 0 for record in play(shorter, run, tmp_path / "out")] == [True, True]
    train(shorter, tiny(*SETTINGS, model="trope"), tmp_path / "later", "cpu", progress=False)
    with pytest.raises(ValueError, match="was trained on events of the test window"):
        play(data, tmp_path / "later", tmp_path / "refused")


def test_what_is_refused_is_refused_in_a_line(data: Sequences, run: Path, tmp_path: Path) -> None:
    loo = tiny_data(tmp_path / "loo")
    fit(data, run, tmp_path / "fitted", "cpu", progress=False)
    out = tmp_path / "out"
    other = prepared(
        write_parquet(tmp_path / "log.parquet", random_log(rows=600, users=30, items=25, seed=1)),
        tmp_path / "other", loose(protocol=Protocol("holdout", window=2 * DAY)),
    )  # fmt: skip
    for arguments, words in [
        ((loo.path, "--out", out), "--protocol holdout"),
        ((data.path, "--out", out, "--like", run, "--model", "trope"), "leave out --model"),
        ((data.path, "--out", out, "--like", tmp_path / "fitted"), "trained on every event"),
        ((data.path, "--out", out, "--like", run, "--every", "0d"), "longer than 0"),
        (
            (data.path, "--out", out, "--like", run, "--every", "2d"),
            "before the only tick; choose --every at most half",
        ),
        ((data.path, "--out", out, "--model", "trope", "--every", "1w"), "of the test window, 2 days"),
        ((data.path, "--out", out, "--like", run, "--every", "soon"), "--every"),
        ((data.path, "--out", out, "--like", tmp_path), "no trained model"),
        ((other.path, "--out", out, "--like", run), "was trained on other items"),
    ]:
        code, said = invoke("replay", *arguments, "--device", "cpu")
        assert code == 2 and words in said and "\n" not in said.strip(), said
    assert not out.exists() or not any(out.iterdir())
