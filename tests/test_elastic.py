"""A process of a training dies, torchrun starts all of them again, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import SIZE, tiny_data

from trope.runs import BEST, CHECKPOINTS, LOG, WEIGHTS

pytestmark = pytest.mark.ranks
EPOCHS, PATIENCE = 14, 300
SETTINGS = (*SIZE, f"train.epochs={EPOCHS}", f"train.early_stop={EPOCHS}")


def command(data: Path, run: Path, ranks: int, parts: int) -> list[str]:
    """`trope train --resume` by so many processes; by itself for one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    chosen = [word for setting in (*SETTINGS, f"train.parts={parts}") for word in ("--set", setting)]
    trained = ["-m", "trope", "train", str(data), "--out", str(run), "--model", "hstu-trope", "--device", "cpu"]
    return [sys.executable, *(launcher if ranks > 1 else []), *trained, "--no-progress", "--resume", *chosen]


def finish(data: Path, run: Path, ranks: int, parts: int) -> None:
    done = subprocess.run(
        command(data, run, ranks, parts), capture_output=True, text=True, timeout=PATIENCE, env=_one_thread()
    )
    assert done.returncode == 0, done.stderr


def worker(launcher: int, rank: int) -> int:
    """The number of the process of a rank."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                return int(child)
    raise AssertionError(f"there is no process of rank {rank}")


def epochs_of(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    return {row["epoch"]: row["epoch_loss"] for row in rows if "epoch_loss" in row}


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("parts", [1, 4])
def test_a_run_survives_the_death_of_a_process(tmp_path: Path, parts: int) -> None:
    """Restarted by torchrun with 2; and what was left at the kill goes on with 1 and with 4. With parts, to the bit."""
    data, run, left = tiny_data(tmp_path).path, tmp_path / "two", tmp_path / "left"
    finish(data, tmp_path / "one", 1, parts)
    log = (tmp_path / "output").open("w")
    launcher = subprocess.Popen(command(data, run, 2, parts), env=_one_thread(), stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE
        while not any(run.glob(f"{CHECKPOINTS}/epoch000[2-9]*")):
            assert launcher.poll() is None and time.monotonic() < until, (tmp_path / "output").read_text()
            time.sleep(0.01)
        os.kill(worker(launcher.pid, 1), signal.SIGKILL)
        while not left.exists():  # a checkpoint may go while it is copied
            try:
                shutil.copytree(run, left)
            except shutil.Error:
                shutil.rmtree(left)
        assert launcher.wait(PATIENCE) == 0, (tmp_path / "output").read_text()
    finally:
        launcher.kill()
    shutil.copytree(left, tmp_path / "four")
    finish(data, left, 1, parts)
    finish(data, tmp_path / "four", 4, parts)
    wanted = load_file(tmp_path / "one" / BEST / WEIGHTS)
    rtol, atol = (1e-5, 1e-4) if parts == 1 else (0, 0)
    for other in (run, left, tmp_path / "four"):
        assert epochs_of(other) == pytest.approx(epochs_of(tmp_path / "one"), rel=rtol, abs=0)
        found = load_file(other / BEST / WEIGHTS)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=10 * rtol, atol=atol, msg=f"{other.name}: {name}")
