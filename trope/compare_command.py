"""The command `trope compare`: runs side by side, with intervals, and a mark where a difference is more than chance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trope.compare import Comparison
    from trope.metrics import Interval


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more runs, evaluated; the first is the reference.")],
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    resamples: Annotated[int, typer.Option(help="Draws of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this JSON file.")] = None,
) -> None:
    """Compare runs by paired bootstrap over users: means, 95 % intervals, and what differs from the first run."""
    from trope.compare import compare_runs
    from trope.run_folder import write_json

    comparison = compare_runs(runs, split, resamples, seed)
    show(comparison, f"{split}, {comparison.users:,} users, percent with 95 % intervals ({resamples:,} resamples)")
    if json is not None:
        write_json(json, {"split": split, "resamples": resamples, "seed": seed, **to_dict(comparison)})
        typer.echo(f"\nwrote {json}")


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
