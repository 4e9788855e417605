"""The summary that `trope prepare` prints at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trope.data.folder import read_array
from trope.data.protocols import tied_share
from trope.times import say_duration, say_moment

# Above this share, most of the order that a model would learn from is the order of the file.
_MOSTLY_TIED = 0.5


def summarise(meta: dict[str, Any], out: Path, console: Console | None = None) -> None:
    """Print counts, time span, split and bad rows of a dataset, and the paper's counts beside its own."""
    console = console or Console()
    counts, protocol = meta["counts"], meta["protocol"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    numbers = [f"{counts[name]:,} {name}" for name in ("users", "items", "events", "baskets") if name in counts]
    grid.add_row("dataset", str(out))
    grid.add_row("read", f"{meta['source']['rows']:,} rows of {meta['source']['name']}")
    grid.add_row("kept", ", ".join(numbers))
    grid.add_row("time", " to ".join(say_moment(moment) for moment in meta["time_span"]["all"]))
    grid.add_row("protocol", protocol["name"] + _holdout(protocol))
    grid.add_row("training", f"{counts['train_events']:,} events, until {say_moment(meta['time_span']['train'][1])}")
    grid.add_row("evaluation", f"{counts['valid_users']:,} users validate, {counts['test_users']:,} test")
    grid.add_row("size", f"{sum(entry['bytes'] for entry in meta['arrays'].values()) / 2**20:,.1f} MiB")
    grid.add_row("checksum", meta["checksum"])
    console.print(grid)
    hint = _hint_at_ties(meta, out)
    if hint:
        console.print(f"\n{hint}", soft_wrap=True, highlight=False)
    if meta["bad_rows"]["count"]:
        _print_bad(meta, console)
    if meta["paper"] is not None:
        _print_paper(meta["paper"], console)


def _hint_at_ties(meta: dict[str, Any], out: Path) -> str:
    """Advice for data where events of a user share their time, as the lines of a basket do; else ""."""
    protocol = meta["protocol"]["name"]
    times, offsets = (read_array(out, name, meta, verify=False) for name in ("times", "offsets"))
    share = tied_share(times, offsets)
    has_baskets = protocol == "next-basket" or "baskets" in meta["counts"]
    if share <= (0 if has_baskets else _MOSTLY_TIED):
        return ""
    said = f"{100 * share:.0f} % of events share their time with another of the same user: their order is the file's. "
    if protocol.startswith("loo"):
        return said + (
            "Leave-one-out asks for the last of them with the others as history. To predict the next basket, prepare "
            "with --protocol next-basket or holdout, and train with --set model.predicts=next-moment."
        )
    return said + (
        "Train with --set model.predicts=next-moment: they then predict the next basket, not the next line of the file."
    )


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
    return f", {say_duration(protocol['window'])} from {say_moment(protocol['cutoff'])}"
