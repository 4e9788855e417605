"""What `trope prepare` says at the end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trope.data.protocols import say_window


def summarise(meta: dict[str, Any], out: Path, console: Console | None = None) -> None:
    """Print a dataset's counts, span and split, its bad rows, and how it compares with the paper's table."""
    console = console or Console()
    counts, protocol = meta["counts"], meta["protocol"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    numbers = [f"{counts[name]:,} {name}" for name in ("users", "items", "events", "baskets") if name in counts]
    grid.add_row("dataset", str(out))
    grid.add_row("read", f"{meta['source']['rows']:,} rows of {meta['source']['name']}")
    grid.add_row("kept", ", ".join(numbers))
    grid.add_row("time", " to ".join(_date(moment) for moment in meta["time_span"]["all"]))
    grid.add_row("protocol", protocol["name"] + _holdout(protocol))
    grid.add_row("training", f"{counts['train_events']:,} events, until {_date(meta['time_span']['train'][1])}")
    grid.add_row("evaluation", f"{counts['valid_users']:,} users validate, {counts['test_users']:,} test")
    grid.add_row("size", f"{sum(entry['bytes'] for entry in meta['arrays'].values()) / 2**20:,.1f} MiB")
    grid.add_row("checksum", meta["checksum"])
    console.print(grid)
    if protocol["name"] == "next-basket" or ("baskets" in counts and protocol["name"] == "holdout"):
        console.print(
            "\nLines of a basket share a time. Train with --set model.predicts=next-moment: they then predict the next "
            "basket, not the next line of the file.",
            soft_wrap=True,
        )
    if meta["bad_rows"]["count"]:
        _print_bad(meta, console)
    if meta["paper"] is not None:
        _print_paper(meta["paper"], console)


def _print_bad(meta: dict[str, Any], console: Console) -> None:
    bad = meta["bad_rows"]
    word = "line" if meta["source"]["kind"] in ("csv", "json") else "row"
    console.print(f"\n[yellow]{bad['count']:,} bad rows left out[/yellow]")
    for reason, count in bad["reasons"].items():
        console.print(f"  {count:>9,}  {reason}")
    for row in bad["first"]:
        console.print(f"  {row['file']} {word} {row['row']}: {row['reason']}", highlight=False)


def _print_paper(rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("", "here", "paper", "", title="Against the paper's table", title_justify="left", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, row in rows.items():
        verdict = "[green]equal[/green]" if row["equal"] else "[red]NOT equal[/red]"
        table.add_row(name, f"{row['ours']:,}", f"{row['paper']:,}", verdict)
    console.print()
    console.print(table)


def _holdout(protocol: dict[str, Any]) -> str:
    if protocol["cutoff"] is None:
        return ""
    return f", {say_window(protocol['window'])} from {_date(protocol['cutoff'])}"


def _date(moment: int) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
