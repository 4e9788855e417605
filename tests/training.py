"""A tiny dataset and a tiny model for the training tests, and a run in a process that can be killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet

from trope.config import Config
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.settings import preset
from trope.train.loop import train

SIZE = (
    "model.width=8", "model.heads=2", "model.head_dim=4", "model.max_len=8", "model.blocks=1", "train.batch=8",
    "train.negatives=4", "train.epochs=3",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are not worth a second thread, which would wait for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(*settings: str, model: str = "hstu-trope") -> Config:
    return preset(model, [*SIZE, *settings])


def tiny_data(path: Path, protocol: str = "loo-strict", items: int = 20, seed: int = 0) -> Sequences:
    path.mkdir(parents=True, exist_ok=True)
    log = write_parquet(path / "log.parquet", random_log(rows=400, users=30, items=items, seed=seed))
    return prepared(log, path / "data", loose(protocol=Protocol(protocol)))


def weights(run: Path) -> bytes:
    """The bytes that a run ends with: of its best model and of its last."""
    last = sorted((run / "checkpoints").iterdir())[-1]
    return b"".join((folder / "model.safetensors").read_bytes() for folder in (run / "best", last / "model"))


def last_step(run: Path) -> int:
    """Of the latest checkpoint, 0 before the first."""
    return max((int(path.name[-8:]) for path in (run / "checkpoints").glob("epoch*")), default=0)


def in_background(data: Path, settings: tuple[str, ...], run: Path, **options: Any) -> BaseProcess:
    """A run in a process of its own, begun or resumed; forked from a server that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["trope.train.loop", "torch._dynamo"]
    )  # torch.optim imports the latter, which is slow
    process = context.Process(target=_train, args=(data, settings, run, options))
    process.start()
    return process


def _train(data: Path, settings: tuple[str, ...], run: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train(Sequences.load(data), tiny(*settings), run, "cpu", resume=True, progress=False, **options)
