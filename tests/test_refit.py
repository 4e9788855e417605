"""train.refit: the training that follows what validation chose, on the events of validation as well."""

from __future__ import annotations

import gc
import json
import signal
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from training import one_thread, tiny, tiny_data, weights
from typer.testing import CliRunner

import trope.train.loop
from trope.cli.main import app
from trope.config import Config
from trope.data.sequences import Sequences
from trope.figures import page as run_report
from trope.models.recommender import SequentialRecommender
from trope.runs import REFIT
from trope.train.distributed import process_group
from trope.train.loop import Interrupted, StopRequest, Trainer, train

__all__ = ["one_thread"]  # a fixture for every test in here
# So impatient that the learning rate falls during the run.
SETTINGS = ("train.refit=true", "train.patience=0", "train.epochs=5")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("refit"))


@pytest.fixture(scope="module")
def refitted(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "refitted"
    train(data, tiny(*SETTINGS), run, "cpu", progress=False)
    return run


def state_of(folder: Path) -> dict:
    latest = sorted((folder / "checkpoints").iterdir())[-1]
    return json.loads((latest / "state.json").read_text())


def test_validation_events_are_trained_on(data: Sequences) -> None:
    both = data.with_validation()
    assert len(both.eval_users("valid")) == 0
    torch.testing.assert_close(both.eval_users("test"), data.eval_users("test"))
    added = both.train_windows(10**6).ends.sum() - data.train_windows(10**6).ends.sum()
    assert added == (data.valid_end - data.train_end).sum()  # leave-one-out: one event each
    last = max(int(data.times[data.offsets[u] + data.valid_end[u] - 1]) for u in range(data.num_users))
    assert both.time_span == (data.time_span[0], last) and last >= data.time_span[1]


def test_a_refit_replays_epochs_and_learning_rates(refitted: Path) -> None:
    chosen, replayed = state_of(refitted), state_of(refitted / REFIT)
    assert replayed["epoch"] == chosen["best_epoch"] and replayed["best"] is None
    assert replayed["factors"] == pytest.approx(chosen["factors"][: chosen["best_epoch"]])
    metrics = json.loads((refitted / "metrics.json").read_text())
    assert metrics["refit"] and metrics["best_epoch"] == chosen["best_epoch"]
    said = dict(run_report._training(metrics, asdict(tiny(*SETTINGS).train)))
    assert "training and validation events" in said["refit"]
    assert "refit" not in dict(run_report._training({**metrics, "refit": False}, asdict(tiny().train)))


def test_settled_learning_rates_are_followed(data: Sequences, tmp_path: Path) -> None:
    """The same weights as from a loop that sets them by hand."""
    factors, config, both = (1.0, 0.5, 0.125), tiny(), data.with_validation()
    with process_group("cpu") as group:
        followed = Trainer(both, config, tmp_path / "followed", group, True, factors)
        while not followed.is_finished:
            one_epoch(followed)
        by_hand = Trainer(both, config, tmp_path / "by-hand", group, True, [1.0] * len(factors))
        first = [float(entry["lr"]) for entry in by_hand.optimizer.param_groups]
        for epoch, factor in enumerate(factors):
            for entry, rate in zip(by_hand.optimizer.param_groups, first, strict=True):
                entry["lr"] = factor * rate
            for _ in range(by_hand.feed.steps):
                by_hand.step()
            by_hand.state.epoch, by_hand.state.index = epoch + 1, 0
    assert followed.state.factors == pytest.approx(factors) and followed.state.best is None
    for ours, theirs in zip(followed.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_model_is_that_of_a_training_on_both(data: Sequences, refitted: Path, tmp_path: Path) -> None:
    factors = state_of(refitted)["factors"][: state_of(refitted)["best_epoch"]]
    with process_group("cpu") as group:
        trainer = Trainer(data.with_validation(), tiny(*SETTINGS), tmp_path / "again", group, True, factors)
        while not trainer.is_finished:
            one_epoch(trainer)
    found = SequentialRecommender.from_pretrained(refitted / "best").state_dict()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def test_it_resumes_to_the_same_bytes(data: Sequences, refitted: Path, tmp_path: Path) -> None:
    config: Config = tiny(*SETTINGS)
    with process_group("cpu") as group:
        first = Trainer(data, config, tmp_path / "run", group, resume=False)
        while not first.is_finished:
            one_epoch(first)
        factors = first.state.factors[: first.state.best_epoch]
        second = Trainer(data.with_validation(), config, tmp_path / "run" / REFIT, group, True, factors)
        for _ in range(3):
            second.step()
        second.save()
    train(data, config, tmp_path / "run", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "run") == weights(refitted)


def test_where_validation_is_the_test_event_there_is_no_refit(tmp_path: Path) -> None:
    data = tiny_data(tmp_path, "loo-paper")
    with pytest.raises(ValueError, match=r"loo-paper.*would train on the test"):
        data.with_validation()
    with pytest.raises(ValueError, match=r"leave train\.refit off"):
        train(data, tiny(*SETTINGS), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("protocol", ["loo-strict", "holdout", "next-basket"])
def test_no_test_event_is_trained_on(tmp_path: Path, protocol: str) -> None:
    data = tiny_data(tmp_path, protocol)
    both = data.with_validation()
    assert bool((both.train_end <= data.test_start).all())
    assert both.train_end.sum() > data.train_end.sum()
    trained = torch.cat(
        [data.times[o : o + n] for o, n in zip(data.offsets[:-1].tolist(), both.train_end.tolist(), strict=True)]
    )
    assert both.time_span == (int(trained.min()), int(trained.max()))


def test_between_validations_the_learning_rate_is_replayed_too(data: Sequences, tmp_path: Path) -> None:
    train(data, tiny(*SETTINGS, "train.eval_every=2"), tmp_path / "run", "cpu", progress=False)
    chosen, replayed = state_of(tmp_path / "run"), state_of(tmp_path / "run" / REFIT)
    assert chosen["best_epoch"] in (2, 4, 5) and replayed["epoch"] == chosen["best_epoch"]
    assert replayed["factors"] == pytest.approx(chosen["factors"][: chosen["best_epoch"]])


def test_a_refit_that_was_finished_goes_on_with_the_next_epochs_learning_rate(data: Sequences, tmp_path: Path) -> None:
    """As when a finished run is resumed with more epochs, and validation chooses a later one."""
    config = tiny(*SETTINGS)
    with process_group("cpu") as group:
        short = Trainer(data.with_validation(), config, tmp_path / REFIT, group, True, [1.0, 0.5])
        short.run(StopRequest(), 1e9, progress=False)
        longer = Trainer(data.with_validation(), config, tmp_path / REFIT, group, True, [1.0, 0.5, 0.25])
    assert longer.state.epoch == 2 and not longer.is_finished
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(0.25 * config.train.lr)


def test_an_interrupted_refit_names_the_run_to_resume(data: Sequences, tmp_path: Path) -> None:
    stop = StopRequest()
    stop.signum = signal.SIGTERM
    with process_group("cpu") as group, pytest.raises(Interrupted) as interrupted:
        Trainer(data.with_validation(), tiny(*SETTINGS), tmp_path / REFIT, group, True, [1.0]).run(stop, 1e9, False)
    assert str(interrupted.value).endswith(f"--resume: {tmp_path}")


def test_one_trainer_is_in_memory_at_a_time_and_none_during_the_test(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Trainer] = weakref.WeakSet()
    counts: list[int] = []

    class Counted(Trainer):
        def __init__(self, *arguments: Any) -> None:
            counts.append(len(alive))
            super().__init__(*arguments)
            alive.add(self)

    def score(*arguments: Any) -> dict[str, Any]:
        counts.append(len(alive))
        return {}

    monkeypatch.setattr(trope.train.loop, "Trainer", Counted)
    monkeypatch.setattr(trope.train.loop, "score_test", score)
    gc.disable()  # nothing may wait for it
    try:
        train(data, tiny(*SETTINGS), tmp_path / "run", "cpu", progress=False)
    finally:
        gc.enable()
    assert counts == [0, 0, 0]


def test_validation_of_a_refitted_model_is_marked_as_seen(refitted: Path) -> None:
    found = CliRunner().invoke(app, ["evaluate", str(refitted), "--split", "valid", "--device", "cpu"])
    assert found.exit_code == 0 and "it has seen them" in found.stderr
    found = CliRunner().invoke(app, ["evaluate", str(refitted), "--device", "cpu"])
    assert found.exit_code == 0 and "it has seen them" not in found.stderr


class _Silent:
    """A log that nobody reads."""

    def show(self, **values: str) -> None: ...

    def write(self, state: object, **values: object) -> None: ...


def one_epoch(trainer: Trainer) -> None:
    for _ in range(trainer.feed.steps):
        trainer.step()
    trainer.finish_epoch(_Silent())  # type: ignore[arg-type]
