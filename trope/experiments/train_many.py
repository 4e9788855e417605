"""Trains variants under a live table and collects their results, for `trope compare` and `trope ablate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from trope.data.sequences import Sequences
from trope.data.stream import Stream, parse_bytes
from trope.devices import choose_device
from trope.evaluate.metrics import Floats
from trope.experiments.advice import advice
from trope.experiments.live_table import LiveTable
from trope.experiments.pool import Outcome, Run, Variant, mean_over_seeds, plan, run_all, write_results


@dataclass(frozen=True)
class Trained:
    """Variants trained on a dataset.

    runs: all that were asked for. lines: of results.jsonl, one for each finished run. values: per-user test metrics by
    variant, the mean over its finished seeds, [U] each. failures: (run, reason) of this call.
    """

    data: Sequences | Stream
    variants: list[Variant]
    runs: list[Run]
    lines: list[dict[str, Any]]
    values: dict[str, dict[str, Floats]]
    failures: list[tuple[str, str]]


def train_many(
    data: Path,
    variants: Sequence[Variant],
    seeds: int,
    jobs: int,
    out: Path,
    device: str,
    is_training: bool = True,
    memory: str | None = None,
) -> Trained:
    """Train the runs that are not finished, and write results.jsonl whenever a run ends.

    is_training: False uses finished runs only, such as runs copied from another machine. memory: what each run may hold
    of a sharded dataset, such as 2GB; None loads it.
    """
    most = None if memory is None else parse_bytes(memory, "--memory")
    store = Sequences.load(data) if most is None else Stream.open(data, most)
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a folder; choose another --out")
    runs = plan(variants, range(seeds), out)
    finished = [run for run in runs if run.is_finished]
    if not is_training and not finished:
        raise ValueError(
            f"{out} has no finished run of these models, and --no-train trains none; copy the runs there or leave out "
            "--no-train"
        )
    missing = [run for run in runs if not run.is_finished] if is_training else []
    for line in advice(store, missing, choose_device(device).type) if missing else ():
        typer.secho(f"trope: {line}", err=True)
    typer.echo(f"{len(runs)} runs in {out}, {len(finished)} finished before")
    with LiveTable(runs) as watch:

        def ended(outcome: Outcome) -> None:
            write_results(runs, out)  # each time, so that an interrupted comparison keeps its results
            watch.ended(outcome)

        asked = runs if is_training else finished  # finished runs are still checked
        outcomes = run_all(asked, data, jobs, device, ended, watch.began, watch.tick, most)
    failures = [(each.run.folder.name, each.failure) for each in outcomes if each.failure is not None]
    lines = write_results(runs, out)
    return Trained(store, list(variants), runs, lines, mean_over_seeds(runs), failures)
