"""Several processes of one training on this machine, over gloo: for tests of what must not depend on their number."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from trope.data.sequences import Sequences
from trope.evaluate.evaluation import evaluate
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import ShardedItemTable
from trope.settings import preset
from trope.train import distributed
from trope.train.distributed import Group, process_group
from trope.train.loop import train
from trope.train.optimizer import make_optimizer
from trope.train.step import Feed, seed_for
from trope.train.stepper import Stepper, is_sharded

CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)
STEPS = 25
SECONDS = 300  # until a process that waits for another one gives up


def makes_group(work: Callable[..., Any]) -> Callable[..., Any]:
    """Mark work for `on_ranks` that makes the group itself and is not given one."""
    work.makes_group = True
    return work


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(group, *arguments)` returns in each of `size` processes; work is a function of a module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks", "trope.train.loop", "torch._dynamo"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, size, port, theirs, work, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        found = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]  # EOFError where a process has died
    finally:
        for process in processes:
            process.join(SECONDS)
            process.kill()
    for rank, result in enumerate(found):
        assert not isinstance(result, BaseException), f"rank {rank}: {result!r}"
    return found


def _run(rank: int, size: int, port: int, pipe: Connection, work: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, size, "127.0.0.1", port)), strict=True))
    try:
        if hasattr(work, "makes_group"):
            pipe.send_bytes(pickle.dumps(work(*arguments)))
            return
        if size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        # Not `send`, which would leave tensors in memory that goes when this process ends.
        pipe.send_bytes(pickle.dumps(work(Group(rank, size, CPU), *arguments)))
        if size > 1:
            dist.destroy_process_group()
    except Exception as error:
        pipe.send_bytes(pickle.dumps(error))


@makes_group
def train_run(data: Path, model: str, settings: list[str], run: Path) -> dict[str, Any]:
    """`trope train --resume` in this process."""
    return train(Sequences.load(data), preset(model, settings), run, "cpu", resume=True, progress=False)


@makes_group
def fail_in_group(failing: int) -> bool:
    """Whether this process still has its group after one of the processes has failed."""
    try:
        with process_group("cpu") as group:
            if group.rank == failing:
                raise ValueError("as with a damaged file")
    except ValueError:
        pass
    return dist.is_initialized()


@makes_group
def outlive(lost: int) -> str:
    """What this process says when one of the processes has left while the others wait for it."""
    try:
        with process_group("cpu") as group:
            if group.rank != lost:
                group.wait()
    except OSError as error:
        return str(error)
    return ""


class Training:
    """A model and what trains it, in one of several processes or alone."""

    def __init__(self, group: Group, data: Sequences, model: str, settings: list[str]) -> None:
        self.group, self.data, self.config = group, data, preset(model, settings).resolved
        shard = (group.rank, group.size) if is_sharded(self.config, group) else None
        torch.manual_seed(seed_for(self.config.train.seed, "init"))
        self.model = SequentialRecommender(self.config, data.num_items, data.time_span, shard)
        self.feed, self.optimizer = Feed(data, self.config, group), make_optimizer(self.model, self.config)
        self.stepper = Stepper(self.model, data, self.config, self.feed, self.optimizer, group)
        self.model.train()

    def steps(self, count: int) -> torch.Tensor:
        """Loss and gradient norm of each step, float64 [count, 2]."""
        rows = [self.stepper(*divmod(step, self.feed.steps), step) for step in range(count)]
        return torch.tensor([[float(loss), float(norm)] for loss, norm in rows], dtype=torch.float64)


def curve(group: Group, path: Path, model: str, settings: list[str]) -> dict[str, torch.Tensor] | None:
    """Losses, table and validation ranks of a short training."""
    distributed._LARGE = 64 if model == "sasrec" else distributed._LARGE  # some gradients travel by themselves
    training = Training(group, Sequences.load(path), model, settings)
    steps = training.steps(STEPS)
    result = evaluate(training.model, training.data, "valid", "history", 8, live=False, batch=7)
    items = training.model.items
    whole = items.whole() if isinstance(items, ShardedItemTable) else items.weight.detach()
    if whole is None:
        return None
    moments = training.optimizer.state[items.weight]["exp_avg_sq"].shape
    return {"steps": steps, "table": whole, "ranks": torch.from_numpy(result.ranks), "moments": moments}


def losses(run: Path) -> list[float]:
    """Of all epochs that a run has logged."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["epoch_loss"] for row in rows if "epoch_loss" in row]
