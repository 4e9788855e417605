"""The report of `trope inspect` as text: tables with bars, in the width of the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trope.data.inspect.durations import by_unit
from trope.data.inspect.measure import Report
from trope.data.inspect.summary import (
    MONTHS,
    PLAIN_DATES,
    WEEKDAYS,
    calendar_findings,
    key_figures,
    length_bins,
    lifetime_units,
    percent,
)
from trope.data.printable import printable

_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_report(report: Report, console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console()
    about = f", protocol {printable(report.protocol)}; all times are UTC\n"
    console.print(Text.assemble((printable(report.name), "bold"), about))
    console.print(_figures(report))
    week = report.week()
    rows = [
        (
            _bars("events per user", "users", length_bins(report)),
            _bars("gap to the next event", "gaps", by_unit(report.gaps)),
        ),
        (
            _bars("since the same item", "repeats", by_unit(report.returns)),
            _bars("item lifetime", "items", lifetime_units(report)),
        ),
        (
            _hours(report),
            Group(
                _bars("weekday", "events", dict(zip(WEEKDAYS, week.sum(axis=1).tolist(), strict=True))),
                "",
                _bars("month", "events", dict(zip(MONTHS, report.months().tolist(), strict=True))),
            ),
        ),
    ]
    for pair in rows:
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*pair)
        console.print()
        console.print(grid)
    console.print()
    console.print(_signals(report))
    for sentence in calendar_findings(report):
        console.print(Padding(sentence, (0, 0, 0, 2)))


def _figures(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    for label, value in key_figures(report):
        grid.add_row(label, value)
    return grid


def _bars(title: str, unit: str, counts: Mapping[str, int]) -> RenderableType:
    """Return a table of labels, bars scaled to the largest count, and shares of the total."""
    total, largest = sum(counts.values()), max(counts.values(), default=0)
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, title=f"{title} ({unit})", title_justify="left")
    table.title_style = "bold"
    for column, width in (("label", 11), ("bar", _BAR), ("share", 6)):
        table.add_column(column, min_width=width, no_wrap=True, justify="right" if column == "share" else "left")
    table.show_header = False
    for label, count in counts.items():
        table.add_row(label, _bar(count / largest if largest else 0.0), percent(count / total) if total else "")
    return table


def _hours(report: Report) -> RenderableType:
    if not report.has_hours:
        why = PLAIN_DATES if report.signals[0].cycles >= 1 else "all events have the same hour"
        return Text.assemble(("hour: cannot tell", "bold"), f"\n{why}".replace(", ", ",\n"))
    return _bars("hour", "events", {f"{hour:02d}": int(n) for hour, n in enumerate(report.week().sum(axis=0))})


def _bar(share: float) -> Text:
    """Return a bar of up to _BAR cells, to an eighth of a cell; anything above zero is visible."""
    eighths = max(round(share * _BAR * 8), int(share > 0))
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style="blue")


def _signals(report: Report) -> RenderableType:
    table = Table(
        title="How much the item tells about the calendar (share of the phase's entropy, beyond chance)",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2),
    )
    for header in ("cycle", "cycles in log", "explained", "repeating", "verdict"):
        table.add_column(header, justify="left" if header in ("cycle", "verdict") else "right")
    for signal in report.signals:
        table.add_row(
            signal.name,
            f"{signal.cycles:,.1f}",
            percent(signal.explained) if signal.is_told else "",
            percent(signal.repeating) if signal.is_told else "",
            signal.verdict,
        )
    return table
