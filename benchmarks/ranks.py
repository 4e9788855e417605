"""One process against several: loss curves, tables, rankings, and a process that is killed.

    python benchmarks/ranks.py [--steps 200] [--out results/ranks-cpu.json] [--skip-kill]

Processes talk by gloo on this machine's CPU. The kill is `kill -9` of one of four processes under torchrun, which
starts them again; what was left at the kill also goes on with 4, 2 and 1 processes. Curves are compared in float32, as
`trope train` computes, and in float64: what differs there would be a mistake, not rounding. With `train.parts` nothing
may differ: curves in float32, and the kill again. Each process has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import multiprocessing, nn

from trope.bench.shapes import Shape, generate
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.evaluate.evaluation import evaluate
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import ShardedItemTable
from trope.runs import BEST, CHECKPOINTS, LOG, WEIGHTS
from trope.train.distributed import Group
from trope.train.optimizer import make_optimizer
from trope.train.process import reproducible
from trope.train.step import Feed, seed_for
from trope.train.stepper import Stepper, is_sharded

CPU = torch.device("cpu")
RANKS, PARTS, REPEATS = (2, 4), 4, 3
SHAPE = Shape("ranks", 600, 3_000, 12_000, max_len=24, width=32, blocks=2, heads=2, head_dim=16, batch=24)
EPOCHS, PATIENCE = 12, 600


class Case(NamedTuple):
    """A training of which one process and several are compared.

    smooth: SiLU stands where the model has ReLU. In float32 a rounding turns a ReLU on or off now and then, and from
    there two trainings go apart. This case shows that nothing else does.
    """

    model: str
    settings: tuple[str, ...] = ()
    smooth: bool = False


SASREC = ("train.clip=1.0", "train.negative_source=batch")
CASES = (
    Case("trope"),
    Case("hstu-trope", ("train.table_state=row", "train.shared_negatives=true")),
    Case("sasrec-trope", SASREC),
    Case("sasrec-trope", SASREC, smooth=True),
    Case("transformer-trope"),
)
IN_PARTS = tuple(case._replace(settings=(*case.settings, f"train.parts={PARTS}")) for case in CASES if not case.smooth)


class Curve(NamedTuple):
    """Losses of all steps, the whole table, the seconds that the steps took, and ranks of validation in float32.

    same_ranks: by the weights that one process ended with.
    """

    losses: list[float]
    table: torch.Tensor
    seconds: float
    ranks: torch.Tensor | None
    same_ranks: torch.Tensor | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results/ranks-cpu.json"))
    parser.add_argument("--skip-kill", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = [row for case in CASES for row in compare(case, asked.steps, Path(folder))]
        parts = [row for case in IN_PARTS for row in compare_parts(case, asked.steps, Path(folder))]
        killed = None if asked.skip_kill else kill(Path(folder) / "whole", 1)
        killed_parts = None if asked.skip_kill else kill(Path(folder) / "parts", PARTS)
    found = {
        "environment": describe(), "curves": curves, "parts": parts, "killed": killed, "killed_parts": killed_parts,
    }  # fmt: skip
    asked.out.write_text(json.dumps(found, indent=2) + "\n")


def compare(case: Case, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Two and four processes against one."""
    one, one_exact = (curve(1, case, steps, folder, exact) for exact in (False, True))
    rows = []
    for size in RANKS:
        other, other_exact = (curve(size, case, steps, folder, exact) for exact in (False, True))
        rows.append(
            between(case, size, steps, one, other)
            | {
                "silu_for_relu": case.smooth,
                "loss_difference_float64": largest(one_exact.losses, other_exact.losses),
                "table_difference_float64": float((one_exact.table - other_exact.table).abs().max()),
                "ranks_that_differ_with_equal_weights": int((one.ranks != other.same_ranks).sum()),
                "seconds": {"1": round(one.seconds, 2), str(size): round(other.seconds, 2)},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def compare_parts(case: Case, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Two and four processes against one that computes the same parts; and how long this one takes without parts."""
    whole = case._replace(settings=case.settings[:-1])
    one = curve(1, case, steps, folder)
    # In turns, so that both meet the same neighbours on this machine.
    seconds = [[curve(1, each, steps, folder).seconds for each in (whole, case)] for _ in range(REPEATS)]
    fastest_whole, fastest = (round(min(found), 2) for found in zip(*seconds, strict=True))
    rows = []
    for size in RANKS:
        other = curve(size, case, steps, folder)
        rows.append(
            between(case, size, steps, one, other)
            | {
                "same_bits": one.losses == other.losses and torch.equal(one.table, other.table),
                "seconds": {"1, without parts": fastest_whole, "1": fastest, str(size): round(other.seconds, 2)},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def between(case: Case, size: int, steps: int, one: Curve, other: Curve) -> dict[str, Any]:
    """How far so many processes are from one."""
    return {
        "model": case.model,
        "settings": list(case.settings),
        "ranks": size,
        "steps": steps,
        "first_loss": one.losses[0],
        "last_loss": one.losses[-1],
        "loss_difference": largest(one.losses, other.losses),
        "table_difference": float((one.table - other.table).abs().max()),
        "ranks_that_differ": int((one.ranks != other.ranks).sum()),
        "positives": len(one.ranks),
    }


def curve(size: int, case: Case, steps: int, folder: Path, exact: bool = False) -> Curve:
    """What so many processes find together. exact: in float64."""
    multiprocessing.spawn(run_curve, (size, free_port(), case, steps, folder / "curve", exact), nprocs=size)
    return Curve(*torch.load(folder / "curve", weights_only=True))


def run_curve(rank: int, size: int, port: int, case: Case, steps: int, out: Path, exact: bool) -> None:
    """One process's part, in a process of its own; the first writes. exact: in float64, and without ranks."""
    torch.set_num_threads(1)
    if exact:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # what the model wants to be no less than float32
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    with reproducible(CPU):
        group, config = Group(rank, size, CPU), SHAPE.config(case.model, "train.negatives=64", *case.settings).resolved
        data = generate(SHAPE, SHAPE.users, full=False, device=CPU)
        torch.manual_seed(seed_for(config.train.seed, "init"))
        shard = (rank, size) if is_sharded(config, group) else None
        network = SequentialRecommender(config, data.num_items, data.time_span, shard)
        if case.smooth:
            without_relu(network)
        feed = Feed(data, config, group)
        stepper = Stepper(network, data, config, feed, make_optimizer(network, config), group)
        network.train()
        started = time.perf_counter()
        losses = [float(stepper(*divmod(step, feed.steps), step)[0]) for step in range(steps)]
        seconds = time.perf_counter() - started
        items, state = network.items, out.with_suffix(".state")
        table = items.whole() if isinstance(items, ShardedItemTable) else items.weight.detach().clone()
        ranks = same_ranks = None
        if not exact:
            ranks = validate(network, data)
            if size == 1:
                torch.save(network.state_dict(), state)
            take(network, torch.load(state, weights_only=True))
            same_ranks = validate(network, data)
        if rank == 0:
            torch.save((losses, table, seconds, ranks, same_ranks), out)
    if size > 1:
        dist.destroy_process_group()


def without_relu(module: nn.Module) -> None:
    """SiLU in the place of every ReLU."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.SiLU())
        else:
            without_relu(child)


def largest(one: list[float], other: list[float]) -> float:
    """The largest difference."""
    return float(np.abs(np.subtract(one, other)).max())


def validate(network: SequentialRecommender, data: Sequences) -> torch.Tensor:
    """The ranks of all validation positives."""
    result = evaluate(network, data, "valid", "none", network.config.model.max_len, live=False)
    return torch.from_numpy(result.ranks)


@torch.no_grad()
def take(network: SequentialRecommender, state: dict[str, torch.Tensor]) -> None:
    """Fill a model, of whose items this process may have a part, with the weights of a whole one."""
    table, items = state.pop("items.weight"), network.items
    network.load_state_dict(state, strict=False)
    shard = items.shard if isinstance(items, ShardedItemTable) else None
    items.weight[1:] = table[1:] if shard is None else table[shard.first : shard.last]


def kill(folder: Path, parts: int) -> dict[str, Any]:
    """Four processes of which one is killed, and what goes on from there, against one process."""
    folder.mkdir()
    data = folder / "data"
    write_data(data)
    train(data, folder / "one", 1, parts)
    run = folder / "run"
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(command(data, run, 4, parts), env=one_thread(), stdout=output, stderr=output)
        until = time.monotonic() + PATIENCE
        while not any(run.glob(f"{CHECKPOINTS}/epoch0003*")):
            if launcher.poll() is not None or time.monotonic() > until:
                sys.exit((folder / "output").read_text())
            time.sleep(0.01)
        os.kill(worker(launcher.pid, 3), signal.SIGKILL)
        killed_at = time.monotonic()
        left = folder / "left"
        while not left.exists():  # a checkpoint may go while it is copied
            try:
                shutil.copytree(run, left)
            except shutil.Error:
                shutil.rmtree(left)
        if launcher.wait(PATIENCE):
            sys.exit((folder / "output").read_text())
        seconds = time.monotonic() - killed_at
    found = {"restarted_by_torchrun": {**against(folder / "one", run), "seconds_to_the_end": round(seconds, 1)}}
    for size in (4, 2, 1):
        other = folder / f"resumed-{size}"
        shutil.copytree(left, other)
        train(data, other, size, parts)
        found[f"resumed_on_{size}"] = against(folder / "one", other)
        print(json.dumps(found), flush=True)
    return found


def against(one: Path, other: Path) -> dict[str, Any]:
    """How far a run ends from another."""
    tables = [load_file(run / BEST / WEIGHTS) for run in (one, other)]
    losses = [epoch_losses(run) for run in (one, other)]
    return {
        "epochs": len(losses[1]),
        "epoch_loss_difference": largest(*losses),
        "difference_of_all_weights": max(float((tables[0][n] - tables[1][n]).abs().max()) for n in tables[0]),
        "same_test_metrics": json.loads((one / "metrics.json").read_text())["test"]
        == json.loads((other / "metrics.json").read_text())["test"],
    }


def epoch_losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    return [row["epoch_loss"] for row in rows if "epoch_loss" in row]


def write_data(folder: Path) -> None:
    """A prepared dataset of random events."""

    log = folder.with_suffix(".csv")
    generator = np.random.default_rng(0)
    times = 1_500_000_000 + np.sort(generator.integers(0, 10**7, 3000))
    users, items = generator.integers(0, 100, 3000), generator.integers(0, 200, 3000)
    lines = [f"{u},{i},{t}" for u, i, t in zip(users, items, times, strict=True)]
    log.write_text("user,item,timestamp\n" + "\n".join(lines) + "\n")
    prepare = [sys.executable, "-m", "trope", "prepare", str(log), "--out", str(folder)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    Sequences.load(folder)


def command(data: Path, run: Path, ranks: int, parts: int) -> list[str]:
    """`trope train --resume` by so many processes; by itself for one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=2"]
    size = ("width=16", "heads=2", "head_dim=8", "max_len=16", "blocks=2")
    settings = (*(f"model.{each}" for each in size), f"train.epochs={EPOCHS}", "train.batch=10", "train.negatives=16")
    chosen = [word for setting in (*settings, f"train.parts={parts}") for word in ("--set", setting)]
    trained = ["-m", "trope", "train", str(data), "--out", str(run), "--model", "hstu-trope", "--device", "cpu"]
    return [sys.executable, *(launcher if ranks > 1 else []), *trained, "--no-progress", "--resume", *chosen]


def train(data: Path, run: Path, ranks: int, parts: int) -> None:
    done = subprocess.run(command(data, run, ranks, parts), env=one_thread(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def worker(launcher: int, rank: int) -> int:
    """The number of the process of a rank (Linux)."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                return int(child)
    sys.exit(f"there is no process of rank {rank}")


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
