"""The command `trope compare`: runs side by side, with intervals, and a mark where a difference is more than chance.

Given a dataset and models it trains them first (`trope.experiments`); given runs it compares what they left.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trope.compare import Comparison
    from trope.metrics import Interval


def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A dataset, with --models and --out; or two or more evaluated runs.", metavar="DATA | RUN…"
        ),
    ],
    models: Annotated[
        str | None,
        typer.Option(help="Train these on the dataset, such as hstu-time,hstu-trope; the first is the reference."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs to train; run again, it continues.")] = None,
    seeds: Annotated[int, typer.Option(help="Train each model this often, with seeds 0, 1, …")] = 1,
    jobs: Annotated[int, typer.Option(help="Trainings at a time.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value for every model; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    split: Annotated[str, typer.Option(help="Of runs: test or valid.")] = "test",
    resamples: Annotated[int, typer.Option(help="Draws of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this JSON file.")] = None,
) -> None:
    """Compare models by paired bootstrap over users: means, 95 % intervals, and what differs from the first.

    With --models, every model is trained on the dataset first, and its metrics are the mean over the seeds; what was
    trained before is not trained again, and a run that fails is reported and does not stop the others.
    """
    from trope.compare import compare_runs
    from trope.run_folder import write_json

    failures = 0
    if models is None:
        comparison = compare_runs(paths, split, resamples, seed)
        about: dict[str, Any] = {"split": split}
    else:
        if len(paths) != 1 or out is None:
            raise ValueError(f"--models needs one dataset and --out, got {len(paths)} paths and --out {out}")
        if split != "test":
            raise ValueError(f"--models compares on test, got --split {split}; compare the runs by their folders")
        comparison, about, failures = _train_and_compare(
            paths[0], models.split(","), seeds, jobs, settings or [], out, device, resamples, seed
        )
    show(comparison, f"{split}, {comparison.users:,} users, percent with 95 % intervals ({resamples:,} resamples)")
    if json is not None:
        write_json(json, {**about, "resamples": resamples, "seed": seed, **to_dict(comparison)})
        typer.echo(f"\nwrote {json}")
    if failures:
        raise typer.Exit(1)


def _train_and_compare(
    data: Path,
    models: list[str],
    seeds: int,
    jobs: int,
    settings: list[str],
    out: Path,
    device: str,
    resamples: int,
    seed: int,
) -> tuple[Comparison, dict[str, Any], int]:
    """The comparison, what it is of, and how many runs failed."""
    from trope.compare import compare_values
    from trope.config import preset
    from trope.data.sequences import Sequences
    from trope.experiments import Outcome, Variant, mean_over_seeds, plan, run_all, write_results

    if len(models) < 2:
        raise ValueError(f"a comparison needs two models, got --models {','.join(models)}")
    for model in models:
        preset(model, settings)  # a wrong name or value is refused before anything is trained
    Sequences.load(data)
    if seeds < 1:
        raise ValueError(f"at least one seed, got --seeds {seeds}")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a folder; choose another --out")
    runs = plan([Variant(model, model, tuple(settings)) for model in models], range(seeds), out)
    done = sum(run.is_finished for run in runs)
    typer.echo(f"{len(runs)} runs in {out}, {done} finished before")

    def ended(outcome: Outcome) -> None:
        nonlocal done
        done += outcome.failure is None
        said = outcome.failure or f"{outcome.seconds:.0f} s"
        typer.echo(f"{done}/{len(runs)}  {outcome.run.folder.name:<24} {said}")

    outcomes = run_all(runs, data, jobs, device, ended)
    lines = write_results(runs, out)
    values = mean_over_seeds(runs)
    failed = sum(outcome.failure is not None for outcome in outcomes)
    if len(values) < 2:
        raise ValueError(
            f"a comparison needs two models, and {len(values)} could be trained; see output.txt in {out}/*"
        )
    about = {"split": "test", "seeds": seeds, "settings": settings, "data": lines[0]["data"]}
    return compare_values(values, resamples, seed), about, failed


def show(comparison: Comparison, title: str) -> None:
    """Print a comparison: under each metric a line for each system."""
    from rich.console import Console
    from rich.table import Table

    reference = comparison.systems[0].name
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("metric", "run", "mean", "interval", "difference", "interval"):
        # On a narrow terminal long names are folded and numbers stay whole.
        table.add_column(heading, justify="right" if heading in ("mean", "difference") else "left")
        table.columns[-1].overflow, table.columns[-1].no_wrap = "fold", heading != "run"
    for row, metric in enumerate(comparison.metrics):
        for system in comparison.systems:
            cells = [metric if system.difference is None else "", system.name, *_cells(system.values, row)]
            if system.difference is not None:
                mean, bounds = _cells(system.difference, row, sign="+")
                cells += [mean, f"{bounds} *" if system.difference.significant[row] else bounds]
            table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(f"\ndifference: from {reference}; * where its interval leaves out 0")


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything as fractions, for JSON."""
    systems = {}
    for system in comparison.systems:
        systems[system.name] = _intervals(comparison.metrics, system.values)
        if system.difference is not None:
            systems[system.name]["minus_first"] = _intervals(comparison.metrics, system.difference)
    return {"users": comparison.users, "reference": comparison.systems[0].name, "systems": systems}


def _intervals(metrics: list[str], interval: Interval) -> dict[str, Any]:
    rows = zip(metrics, interval.mean, interval.low, interval.high, strict=True)
    return {metric: {"mean": float(mean), "low": float(low), "high": float(high)} for metric, mean, low, high in rows}


def _cells(interval: Interval, row: int, sign: str = "") -> list[str]:
    """A mean and its interval in percent."""
    mean, low, high = (f"{100 * bound[row]:{sign}.2f}" for bound in interval)
    return [mean, f"{low} .. {high}"]
