"""Which device is taken, and what every results file says of its origin."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from data_logs import prepared, random_log, write_parquet
from typer.testing import CliRunner

from trope import devices, environment
from trope.cli.main import app
from trope.serve.recommender import Recommender
from trope.server.worker import Worker
from trope.train.process import reproducible


def test_a_commit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(folder: Path, *arguments: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(environment, "_git", no_git)
    monkeypatch.delenv("TROPE_COMMIT", raising=False)
    assert environment.commit() == "unknown"
    monkeypatch.setenv("TROPE_COMMIT", "8b9a7e06e054+")
    assert environment.commit() == "8b9a7e06e054+"
    monkeypatch.setenv("TROPE_COMMIT", "head")
    with pytest.raises(ValueError, match=r"TROPE_COMMIT must be a commit.*'head'"):
        environment.commit()


def test_a_device_that_models_cannot_run_on_is_refused() -> None:
    for device in ("mps", "mps:0", "meta", "xla", "vulkan"):
        with pytest.raises(
            ValueError, match=rf"device must be .*, got '{device}': trope runs on CPUs and on CUDA GPUs"
        ):
            devices.choose_device(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(
        ValueError, match=r"device cuda:2 was asked for, but torch finds 2 GPUs; they count from cuda:0"
    ):
        devices.choose_device("cuda:2")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The current GPU is the last; without a GPU."""
    found = ["cuda:0"]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        found.append(str(wanted))
        yield
        found.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_a_training_makes_its_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch, current: list[str]) -> None:
    """Else `torch.cuda.manual_seed` seeds cuda:0 at each step of a training on cuda:1, and Triton launches there."""
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    with reproducible(torch.device("cuda:1")):
        assert current[-1] == "cuda:1"
    with reproducible(torch.device("cpu")):
        assert current == ["cuda:0"]


def test_whoever_ranks_makes_its_gpu_the_current_one(current: list[str]) -> None:
    class Ranks:
        device = torch.device("cuda:1")

        @devices.on_own_gpu
        def where(self, word: str, *, end: str) -> str:
            return word + current[-1] + end

    assert Ranks().where("on ", end=".") == "on cuda:1." and current == ["cuda:0"]
    guarded = devices.on_own_gpu(len).__code__
    for method in (
        Recommender._rank,
        Recommender.rank_moments,
        Recommender.rank_by_counts,
        Recommender.remember,
        Worker.run,
    ):
        assert method.__code__ is guarded, method  # type: ignore[attr-defined]


def test_train_refuses_such_a_device_before_it_makes_a_folder(tmp_path: Path) -> None:
    data = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "data")
    result = CliRunner().invoke(app, ["train", str(data.path), "--out", str(tmp_path / "run"), "--device", "mps"])
    assert isinstance(result.exception, ValueError) and "got 'mps'" in str(result.exception)
    assert not (tmp_path / "run").exists()
