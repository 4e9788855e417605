"""What the loss of a machine costs a training on four of them: seconds until it goes on, and how far its end differs.

    python benchmarks/lost_machines.py [--out results/lost-machines.json]

Machines are network namespaces of this one, which see one disk and share its cores (root and iproute2, Linux). The
commands are those of docs/scale.md. Each training is compared with one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from clusters import ENV, Cluster, running
from hosts import Host, why_not
from ranks import against, write_data

from trope.environment import describe

EPOCHS = 60
SETTINGS = (
    "model.width=16", "model.heads=2", "model.head_dim=8", "model.max_len=16", "model.blocks=2", "train.batch=10",
    "train.negatives=16", f"train.epochs={EPOCHS}", f"train.eval_every={EPOCHS}",
)  # fmt: skip
PATIENCE = 600


def training(data: Path, run: Path, parts: int) -> list[str]:
    """`trope train --resume`, as the words after `python`."""
    chosen = [word for setting in (*SETTINGS, f"train.parts={parts}") for word in ("--set", setting)]
    where = [str(data), "--out", str(run), "--resume"]
    return ["-m", "trope", "train", *where, "--model", "hstu-trope", "--device", "cpu", "--no-progress", *chosen]


class Going(NamedTuple):
    """A training on several machines, in the middle."""

    cluster: Cluster
    machines: list[Host]
    jobs: list[subprocess.Popen[str]]


def nothing(going: Going) -> None:
    """The training is left alone."""


def comes_back(going: Going) -> None:
    """A machine is killed, and the command is started there again after five seconds."""
    going.machines[3].kill()
    time.sleep(5)
    going.jobs[3] = going.cluster.start(going.machines[3])


def two_die(going: Going) -> None:
    """Two machines are killed."""
    for machine in going.machines[2:]:
        machine.kill()


def is_cut_off(going: Going) -> None:
    """The cable of a machine is cut."""
    going.machines[3].cut()


def first_dies(going: Going) -> None:
    """The first machine is killed, and the command is started again on the others, with another first one."""
    going.machines[0].kill()
    going.cluster.ends(going.jobs[1:])
    going.cluster.first = "machine2"
    going.jobs[:] = [going.cluster.start(machine) for machine in going.machines[1:]]


class Case(NamedTuple):
    """What happens to a training; parts: `train.parts`, which only take 1, 2 or 4 processes."""

    name: str
    nodes: str
    parts: int
    happens: Callable[[Going], None]


CASES = (
    Case("undisturbed", "4", 4, nothing),
    Case("killed, and started again after 5 s", "4", 4, comes_back),
    Case("two of four killed", "2:4", 4, two_die),
    Case("cut off", "2:4", 1, is_cut_off),
    Case("the first machine killed, the others started again", "2:4", 1, first_dies),
)


def measure(case: Case, data: Path, one: Path, folder: Path) -> dict[str, Any]:
    """Do it, and compare the run with that of one process."""
    folder.mkdir()
    run = folder / "run"
    cluster = Cluster(case.nodes, 1, training(data, run, case.parts), run, PATIENCE)
    with running(4, cluster) as (machines, jobs):
        epoch, lost_at = cluster.epoch(), time.monotonic()
        case.happens(Going(cluster, machines, jobs))
        # The one behind it may have been under way.
        cluster.wait_for_epoch(epoch + 2)
        seconds = time.monotonic() - lost_at
        cluster.ends([job for job in jobs if job.poll() is None][:1])
    found = against(one, run)
    return {"case": case.name, "nodes": case.nodes, "parts": case.parts, "seconds_to_go_on": round(seconds, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/lost-machines.json"))
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        write_data(data)
        for parts in (1, 4):
            alone = [sys.executable, *training(data, folder / f"one-{parts}", parts)]
            subprocess.run(alone, check=True, stdout=subprocess.DEVNULL, env=ENV)
        rows = []
        for number, case in enumerate(CASES):
            rows.append(measure(case, data, folder / f"one-{case.parts}", folder / str(number)))
            print(json.dumps(rows[-1]), flush=True)
    asked.out.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
