"""The summary that `trope prepare` prints at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trope.data.few_users import say_evaluated, warn_of_few
from trope.data.folder import read_array, shard_folder
from trope.data.printable import counted, printable
from trope.data.protocols import MOSTLY_TIED, say_ties, tied_share
from trope.runs import say_protocol
from trope.times import say_iso, say_moment

_1971 = 31_536_000  # Unix seconds


def summarise(meta: dict[str, Any], out: Path, console: Console | None = None) -> None:
    """Print what was read, dropped and kept, time span and split, and the paper's counts beside the dataset's own."""
    console = console or Console()
    counts, protocol = meta["counts"], meta["protocol"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    numbers = [
        counted(counts[name], name.removesuffix("s"))
        for name in ("users", "items", "events", "baskets")
        if name in counts
    ]
    rows = meta["source"]["rows"] + meta["dropped"]["rows"]["without_group"]
    grid.add_row("dataset", Text(printable(out)))
    grid.add_row("read", Text(printable(f"{counted(rows, 'row')} of {meta['source']['name']}")))
    for number, line in enumerate(_dropped(meta) or ["nothing"]):
        grid.add_row("" if number else "dropped", Text(printable(line)))
    grid.add_row("kept", ", ".join(numbers))
    if "names" in meta:
        grid.add_row("names", Text(printable(_named(meta))))
    grid.add_row("time", " to ".join(say_moment(moment) for moment in meta["time_span"]["all"]))
    grid.add_row("protocol", say_protocol(protocol))
    grid.add_row(
        "training", f"{counted(counts['train_events'], 'event')}, until {say_moment(meta['time_span']['train'][1])}"
    )
    grid.add_row("evaluation", say_evaluated(meta))
    folders = [meta["arrays"], *meta.get("shards", [])]
    size = sum(entry["bytes"] for arrays in folders for entry in arrays.values())
    shards = ""
    if "shards" in meta:
        shards = f", in {counted(len(folders) - 1, 'shard')} of {counted(meta['shard_users'], 'user')}"
    grid.add_row("size", f"{size / 2**20:,.1f} MiB{shards}")
    grid.add_row("checksum", meta["checksum"])
    console.print(grid)
    few = warn_of_few(meta, (times for times, _ in _events(meta, out)), _filter(meta["filters"]))
    for hint in (few, _hint_at_ties(meta, out), _hint_at_clocks(meta, out)):
        if hint:
            console.print(f"\n{hint}", soft_wrap=True, highlight=False, markup=False)
    if meta["bad_rows"]["count"]:
        _print_bad(meta, console)
    if meta["paper"] is not None:
        _print_paper(meta["paper"], console)


def _dropped(meta: dict[str, Any]) -> list[str]:
    """One line for each reason why rows were left out, in the order in which they were."""
    filters, dropped = meta["filters"], meta["dropped"]
    reasons = {
        "without_group": f"without a {meta['source'].get('items_by')}",
        "bad": "that cannot be used, see below",
        "other_event": f"of an --event other than {', '.join(filters['event_types'])}",
        "before_since": f"before --since {_moment(filters['since'])}",
        "from_until": f"from --until {_moment(filters['until'])} on",
        "core": f"by the {_filter(filters)}: {_shrunk(dropped['core'])}",
    }
    lost = {reason: count for reason, count in dropped["rows"].items() if count}
    return [f"{counted(count, 'row')} {reasons[reason]}" for reason, count in lost.items()]


def _named(meta: dict[str, Any]) -> str:
    """How many items a file of names has named, and what of it was of no use."""
    names = meta["names"]
    said = f"{names['named']:,} of {meta['counts']['items']:,} items by {names['file']}"
    unused = (
        (names["unknown"], "id", "not among the items"),
        (names["repeated"], "row", "with an id that it had before"),
    )
    return "; ".join([said, *(f"it has {counted(count, noun)} {what}" for count, noun, what in unused if count)])


def _moment(seconds: int | None) -> str:
    return "" if seconds is None else say_moment(seconds)


def _filter(filters: dict[str, Any]) -> str:
    """`5-core`, or the thresholds where that word would not say them."""
    once = filters["core"] == "once"
    if filters["min_user"] == filters["min_item"] and not once:
        return f"{filters['min_user']}-core"
    return f"filter (--min-user {filters['min_user']} --min-item {filters['min_item']}{' --once' if once else ''})"


def _shrunk(sizes: dict[str, list[int]] | None) -> str:
    """`105,571 users became 4,931, 20,000 items became 3,000`."""
    pairs = {name: sizes[name] for name in ("users", "items")} if sizes else {}
    said = {
        name: f"{before:,} {name}" + (f" became {after:,}" if after < before else "")
        for name, (before, after) in pairs.items()
    }
    return ", ".join(said.values())


def _hint_at_ties(meta: dict[str, Any], out: Path) -> str:
    """Advice for data where events of a user share their time, as the lines of a basket do; else ""."""
    protocol = meta["protocol"]["name"]
    tied = sum(tied_share(times, offsets) * len(times) for times, offsets in _events(meta, out))
    share = tied / meta["counts"]["events"]
    has_baskets = protocol == "next-basket" or "baskets" in meta["counts"]
    if share <= (0 if has_baskets else MOSTLY_TIED):
        return ""
    return say_ties(share, protocol)


def _hint_at_clocks(meta: dict[str, Any], out: Path) -> str:
    """What is wrong with times in 1970, or a few events later than now; one of mostly later events may be a plan."""
    now = int(time.time())
    if meta["time_span"]["all"][1] < _1971:  # minutes, hours or days since 1970, until the year 2029
        return (
            "All events lie in 1970 when their times are read as seconds. Do they count minutes, hours or days? "
            "Multiply them to seconds in the log, or give --time-unit if it is s, ms, us or ns."
        )
    if meta["time_span"]["all"][1] <= now:
        return ""
    late = sum(int((times > now).sum()) for times, _ in _events(meta, out))
    if 2 * late > meta["counts"]["events"]:
        return ""
    return (
        f"{counted(late, 'event')} later than now, until {say_moment(meta['time_span']['all'][1])}: a clock was wrong. "
        f"Leave such events out with --until {say_iso(now)}."
    )


def _events(meta: dict[str, Any], out: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Times and offsets of the dataset, or of each of its shards."""
    where = [(out, meta)]
    if "shards" in meta:
        where = [(shard_folder(out, number), {"arrays": arrays}) for number, arrays in enumerate(meta["shards"])]
    for folder, described in where:
        times, offsets = (read_array(folder, name, described, verify=False) for name in ("times", "offsets"))
        yield times, offsets


def _print_bad(meta: dict[str, Any], console: Console) -> None:
    bad = meta["bad_rows"]
    word = "line" if meta["source"]["kind"] in ("csv", "json") else "row"
    console.print(f"\n[yellow]{counted(bad['count'], 'bad row')} left out[/yellow]")
    for reason, count in bad["reasons"].items():
        console.print(Text(printable(f"  {count:>9,}  {reason}")))
    for row in bad["first"]:
        console.print(Text(printable(f"  {row['file']} {word} {row['row']}: {row['reason']}")))


def _print_paper(rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("", "here", "paper", "", title="Against the paper's table", title_justify="left", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, row in rows.items():
        verdict = "[green]equal[/green]" if row["equal"] else "[red]NOT equal[/red]"
        table.add_row(name, f"{row['ours']:,}", f"{row['paper']:,}", verdict)
    console.print()
    console.print(table)
