"""`torchrun` on the machines of hosts.py, as docs/scale.md has it: the same command on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hosts import Host, Hosts

from trope.runs import CHECKPOINTS

PATIENCE = 300
# The second lets a machine into a training that has begun (docs/scale.md).
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Cluster:
    """One training on several machines.

    nodes: how many machines, such as 4 or 2:4. training: the words after `python`. run: its folder.
    """

    def __init__(
        self, nodes: str, per_node: int, training: Sequence[str], run: Path, patience: float = PATIENCE
    ) -> None:
        self.run, self.output, self.patience = run, run.with_name("output"), patience
        self.first = "machine1"
        self._options = (
            f"--nnodes={nodes}", f"--nproc-per-node={per_node}", "--max-restarts=3", "--rdzv-backend=c10d",
            "--rdzv-id=one-name",
        )  # fmt: skip
        self._training = training

    def start(self, host: Host, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command on a machine."""
        command = [
            sys.executable, "-m", "torch.distributed.run", *self._options, f"--rdzv-endpoint={self.first}:29400",
            *self._training,
        ]  # fmt: skip
        with self.output.open("a") as output:
            return host.start(command, output, {**ENV, **(env or {})})

    def epoch(self) -> int:
        """The last epoch that has a checkpoint, -1 for none."""
        return max((int(path.name[5:9]) for path in self.run.glob(f"{CHECKPOINTS}/epoch*")), default=-1)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Fails with what the machines said where it takes too long."""
        until = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(self.said())
            time.sleep(0.02)

    def wait_for_epoch(self, number: int) -> None:
        """Until it has a checkpoint."""
        self.wait_until(lambda: self.epoch() >= number)

    def ends(self, jobs: Sequence[subprocess.Popen[str]]) -> list[int]:
        """The exit codes of commands, once all have ended."""
        self.wait_until(lambda: all(job.poll() is not None for job in jobs))
        return [job.wait() for job in jobs]

    def said(self) -> str:
        """What all machines printed."""
        return self.output.read_text()


@contextmanager
def running(machines: int, cluster: Cluster) -> Iterator[tuple[list[Host], list[subprocess.Popen[str]]]]:
    """A training on so many machines, in the middle; the machines, and the command on each."""
    with Hosts(machines, cluster.run.parent) as hosts:
        jobs = [cluster.start(host) for host in hosts]
        cluster.wait_for_epoch(2)
        yield hosts, jobs


def lose(machine: Host, is_cut: bool) -> None:
    """Kill a machine, or cut its cable, which tells nobody."""
    if is_cut:
        machine.cut()
    else:
        machine.kill()
