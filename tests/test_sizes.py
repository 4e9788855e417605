"""`trope train DATA` without a model: what it chooses for the data and the machine, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_logs import START, loose, prepared, write_parquet
from training import one_thread, tiny_data
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.experiments import sizes
from trope.experiments.advice import advice
from trope.experiments.pool import plan
from trope.experiments.sizes import Choice, choose_sizes, without
from trope.experiments.variants import choose
from trope.runs import CONFIG
from trope.settings import read_toml

__all__ = ["one_thread"]  # a fixture for every test in here
DAY = 86_400


def baskets(path: Path, protocol: str, lines: int = 4, orders: int = 5, window: int = DAY) -> Sequences:
    """Ten users who order every day, some lines at a time."""
    rows = [
        (user, (user + order * line) % 7, START + order * DAY)
        for user in range(10) for order in range(orders) for line in range(lines)
    ]  # fmt: skip
    asked = Protocol(protocol, window=window if protocol == "holdout" else None)
    return prepared(write_parquet(path / "log.parquet", rows), path / "data", loose(protocol=asked))


def chosen(data: Sequences, device: str) -> set[str]:
    return {setting for each in choose_sizes(data, device) for setting in each.settings}


def test_width_by_machine_and_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data(tmp_path)
    assert "model.width=64" in chosen(data, "cpu") and "model.width=128" in chosen(data, "cuda")
    monkeypatch.setattr(sizes, "FEW_USERS", 5)
    assert "model.width=512" in chosen(data, "cuda")


def test_a_short_log_of_events_is_trained_as_the_paper_does(tmp_path: Path) -> None:
    found = chosen(tiny_data(tmp_path), "cpu")
    assert found == {"model.width=64", "model.heads=2", "model.head_dim=32", "model.max_len=50"}


def test_baskets_long_histories_and_a_holdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    found = chosen(baskets(tmp_path / "a", "holdout"), "cpu")
    assert {"model.predicts=next-moment", "train.criterion=Recall@10", "train.refit=true"} <= found
    (tmp_path / "b").mkdir()
    found = chosen(baskets(tmp_path / "b", "loo-strict", orders=60), "cpu")  # asks for the next line, not the basket
    assert "model.predicts=next-moment" not in found
    assert {"model.max_len=200", "train.stride=200"} <= found
    monkeypatch.setattr(sizes, "LONG_EPOCH", 0)
    assert "train.patience=2" in chosen(tiny_data(tmp_path / "c"), "cpu")


def test_the_command_says_what_it_chose_and_set_wins(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    run = tmp_path / "run"
    arguments = ["train", str(data.path), "--out", str(run), "--no-progress", "--device", "cpu"]
    small = ["model.width=8", "model.head_dim=4", "model.blocks=1", "train.epochs=1"]
    result = CliRunner().invoke(app, [*arguments, *(word for each in small for word in ("--set", each))])
    assert result.exit_code == 0, result.output
    assert "trope, with what fits these data" in result.output and "there is no GPU" in result.output
    config = read_toml(run / CONFIG)
    assert config.model.pulse and (config.model.width, config.model.heads, config.model.max_len) == (8, 2, 50)
    assert "model.heads=2: there is no GPU" in result.output and "model.max_len=50" in result.output
    assert "model.width=" not in result.output and "model.head_dim=" not in result.output  # --set has chosen


def test_a_holdout_by_the_day_has_quarters_without_events(tmp_path: Path) -> None:
    """The pulse asks at four moments of the validation window, of which one here has nobody to ask."""
    data, run = baskets(tmp_path, "holdout", orders=6, window=2 * DAY), tmp_path / "run"
    small = ["model.width=8", "model.head_dim=4", "model.blocks=1", "train.epochs=1", "train.refit=false"]
    arguments = ["train", str(data.path), "--out", str(run), "--no-progress", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, *(word for each in small for word in ("--set", each))])
    assert result.exit_code == 0, result.output
    assert "validation Recall@10" in result.output


def test_choices_that_set_overrides_are_left_out() -> None:
    chosen = [Choice(("model.width=64", "model.heads=2"), "a"), Choice(("train.stride=50",), "b")]
    found = without(chosen, ["model.width = 32", "train.stride=5"])
    assert found == [Choice(("model.heads=2",), "a")]


def test_nothing_is_announced_before_a_mistake(tmp_path: Path) -> None:
    data, full = tiny_data(tmp_path), tmp_path / "full"
    full.mkdir()
    (full / "note.txt").write_text("mine")
    for out, settings, words in (
        (full, [], "full is not empty"), (tmp_path / "run", ["--set", "model.widht=8"], "no field 'widht'"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["train", str(data.path), "--out", str(out), "--device", "cpu", *settings])
        assert words in str(result.exception) and not result.output


def test_a_comparison_warns_of_ties_and_of_wide_models_on_a_cpu(tmp_path: Path) -> None:
    def said(data: Sequences, device: str, *settings: str) -> list[str]:
        return advice(data, plan(choose(["hstu-time", "trope"], [], settings), [0], tmp_path / "runs"), device)

    (tmp_path / "baskets").mkdir()
    tied, plain = baskets(tmp_path / "baskets", "holdout"), tiny_data(tmp_path / "plain")
    (ties,) = said(tied, "cuda")
    assert ties.startswith("100 % of events share their time") and "--set model.predicts=next-moment" in ties
    (slow,) = said(plain, "cpu")
    assert slow.startswith("model.width is 512, which is slow on a CPU")
    assert slow.endswith("--set model.width=64 --set model.heads=2 --set model.head_dim=32")
    assert len(said(tied, "cpu")) == 2
    assert not said(plain, "cuda") and not said(tied, "cpu", "model.predicts=next-event", "model.width=512")


def test_the_command_gives_the_advice_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baskets").mkdir()
    data = baskets(tmp_path / "baskets", "next-basket")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trope.experiments.train_many.run_all", stop)
    words = ["compare", str(data.path), "--models", "hstu-time,trope", "--out", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert "trope: 100 % of events share" in result.output and "slow on a CPU" in result.output
