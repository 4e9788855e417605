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
    """Print a comparison: the first system's values, then each other's value and difference."""
    from rich.console import Console
    from rich.table import Table

    reference, *others = comparison.systems
    table = Table("", reference.name, "", title=title, title_justify="left", box=None)
    for system in others:
        table.add_column(system.name, justify="right")
        table.add_column(f"- {reference.name}")
        table.add_column("")
    table.columns[1].justify = "right"
    for row, metric in enumerate(comparison.metrics):
        cells = [metric, f"{100 * reference.values.mean[row]:.2f}", _bounds(reference.values, row)]
        for system in others:
            assert system.difference is not None, "only the first system has none"
            apart = f"{100 * system.difference.mean[row]:+.2f} {_bounds(system.difference, row, sign='+')}"
            mark = "*" if system.difference.significant[row] else ""
            cells += [f"{100 * system.values.mean[row]:.2f}", apart, mark]
        table.add_row(*cells)
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
    console.print(f"\n* differs from {reference.name}: the interval of the paired difference leaves out 0")


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


def _bounds(interval: Interval, row: int, sign: str = "") -> str:
    return f"\\[{100 * interval.low[row]:{sign}.2f}, {100 * interval.high[row]:{sign}.2f}]"
