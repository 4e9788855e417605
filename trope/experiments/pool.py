"""Trains many models on one dataset: several at a time, resumable, and a failed run does not stop the others.

Each run is a process of its own, `python -m trope train … --resume`, so several can share one GPU and a crash ends only
its own run. A run with a metrics.json is finished and is not trained again; the same command continues an interrupted
comparison. A run that was finished with another config or on another dataset is refused: its metrics would be reported
under a wrong name. Everything is in one folder:

    NAME-seedS/          the run; its output.txt is what it printed when it last ran
    results.jsonl        one line for each finished run: config, dataset, metrics, machine
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trope.config import Config
from trope.data.folder import read_meta
from trope.evaluate import saved_ranks
from trope.evaluate.metrics import Floats, per_user
from trope.figures.run_files import read_environment, read_metrics
from trope.runs import CONFIG, METRICS, OUTPUT, ranks_path, read_data, write_text
from trope.settings import preset, read_saved_toml, to_dict
from trope.train.process import PARENT

RESULTS = "results.jsonl"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Variant:
    """A named preset with settings."""

    name: str
    model: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One variant with one seed, and its folder."""

    variant: Variant
    seed: int
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether it was trained and tested."""
        return (self.folder / METRICS).is_file() and ranks_path(self.folder, "test").is_file()

    @property
    def settings(self) -> list[str]:
        """The settings of the variant, and the seed."""
        return [*self.variant.settings, f"train.seed={self.seed}"]

    @property
    def config(self) -> Config:
        """The config of the training."""
        return preset(self.variant.model, self.settings)

    def command(self, data: Path, device: str, memory: int | None = None) -> list[str]:
        """The command that starts or continues the training. memory: bytes to stream the data within."""
        streamed = [] if memory is None else ["--memory", str(memory)]
        return [
            sys.executable, "-m", "trope", "train", str(data), "--out", str(self.folder), "--resume", "--no-progress",
            "--device", device, "--model", self.variant.model, *(part for s in self.settings for part in ("--set", s)),
            *streamed,
        ]  # fmt: skip

    def failure(self) -> str:
        """The last line that the run printed."""
        lines = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


@dataclass(frozen=True)
class Outcome:
    """A run that ended; failure: the reason if it failed, else None."""

    run: Run
    seconds: float
    failure: str | None


def plan(variants: Sequence[Variant], seeds: Sequence[int], out: Path) -> list[Run]:
    """All runs, seed by seed: an interrupted comparison then has whole seeds."""
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"variants need different names, got {', '.join(names)}")
    return [Run(variant, seed, out / f"{variant.name}-seed{seed}") for seed in seeds for variant in variants]


def run_all(
    runs: Sequence[Run],
    data: Path,
    jobs: int,
    device: str = "auto",
    ended: Callable[[Outcome], None] | None = None,
    began: Callable[[Run], None] | None = None,
    tick: Callable[[], None] | None = None,
    memory: int | None = None,
) -> list[Outcome]:
    """Train the runs that are not finished, `jobs` at a time.

    began, ended: called as each run starts and ends. tick: called a few times a second. memory: bytes that each run
    streams the data within, None to load them.
    """
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    _check_finished(runs, data)
    waiting = [run for run in runs if not run.is_finished]
    running: list[tuple[Run, subprocess.Popen[bytes], float]] = []
    outcomes: list[Outcome] = []

    def end(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if ended is not None:
            ended(outcome)

    with _stopped_at_exit(running) as leave_if_asked:
        while waiting or running:
            leave_if_asked()
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                try:
                    running.append((run, _start(run, data, device, jobs, memory), time.monotonic()))
                except OSError as error:
                    end(Outcome(run, 0.0, f"could not be started: {error}"))
                    continue
                if began is not None:
                    began(run)
            time.sleep(_POLL_SECONDS)
            if tick is not None:
                tick()
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                run, process, started = entry
                running.remove(entry)
                failed = process.returncode != 0 or not run.is_finished
                failure = f"exit code {process.returncode}: {run.failure()}" if failed else None
                end(Outcome(run, time.monotonic() - started, failure))
    return outcomes


def write_results(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """Write results.jsonl; returns its lines, one for each finished run."""
    lines = [describe(run) for run in runs if run.is_finished]
    write_text(out / RESULTS, "".join(json.dumps(line) + "\n" for line in lines))
    return lines


def describe(run: Run) -> dict[str, Any]:
    """One line of results.jsonl; it has no paths, which mean nothing on another machine."""
    metrics = read_metrics(run.folder)
    data = {key: value for key, value in metrics.pop("data").items() if key != "path"}
    return {
        "name": run.variant.name, "model": run.variant.model, "settings": list(run.variant.settings),
        "seed": run.seed, **metrics, "data": data, "config": to_dict(read_saved_toml(run.folder / CONFIG)),
        "environment": read_environment(run.folder),
    }  # fmt: skip


def mean_over_seeds(runs: Sequence[Run]) -> dict[str, dict[str, Floats]]:
    """Per-user test metrics of each variant, averaged over its finished seeds; a variant without any is left out."""
    values: dict[str, list[dict[str, Floats]]] = {}
    first: saved_ranks.About | None = None
    for run in runs:
        if run.is_finished:
            result, about = saved_ranks.load(run.folder, "test")
            first = first or about
            if reason := first.difference(about):
                raise ValueError(f"{run.folder} was ranked differently from the others: {reason}; train it again")
            values.setdefault(run.variant.name, []).append(per_user(result.places))
    return {
        name: {metric: np.mean([one[metric] for one in each], axis=0) for metric in each[0]}
        for name, each in values.items()
    }


def _check_finished(runs: Sequence[Run], data: Path) -> None:
    checksum = read_meta(data)["checksum"]
    for run in runs:
        if not run.is_finished:
            continue  # `trope train --resume` checks it itself
        if read_saved_toml(run.folder / CONFIG).resolved != run.config.resolved:
            raise ValueError(f"{run.folder} was trained with another config, see its {CONFIG}; choose another folder")
        if read_data(run.folder)["checksum"] != checksum:
            raise ValueError(f"{run.folder} was trained on another dataset than {data}; choose another folder")


def _start(run: Run, data: Path, device: str, jobs: int, memory: int | None) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, PARENT: str(os.getpid())}
    if jobs > 1 and run.config.train.parts == 1:  # parts take one thread, and other bits with more
        # Processes side by side share the cores; each would otherwise start a thread for every core.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    with (run.folder / OUTPUT).open("wb") as output:
        return subprocess.Popen(
            run.command(data, device, memory),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # else Ctrl-C would reach the run as well, and our SIGTERM would end it before it saved
        )


@contextmanager
def _stopped_at_exit(running: list[tuple[Run, subprocess.Popen[bytes], float]]) -> Iterator[Callable[[], None]]:
    """When this process ends, also by a signal, its runs are asked to save themselves and are waited for.

    Gives a function that leaves if a signal has asked for that: what a handler raises is lost where it interrupts the
    garbage collector or a `__del__`.
    """
    asked: list[int] = []

    def leave(signum: int, frame: types.FrameType | None) -> None:
        asked.append(signum)
        leave_if_asked()

    def leave_if_asked() -> None:
        if asked:
            raise KeyboardInterrupt if asked[0] == signal.SIGINT else SystemExit(128 + asked[0])

    before = {}
    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: signal.signal(n, leave) for n in numbers if signal.getsignal(n) in usual}
    try:
        yield leave_if_asked
    finally:
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
