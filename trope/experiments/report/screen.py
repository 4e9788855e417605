"""Tables of a comparison on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trope.data.printable import printable
from trope.evaluate.compare import Comparison
from trope.evaluate.metrics import Interval
from trope.experiments.report.controls import control_name
from trope.experiments.report.page import Cell, Section

FEW_SYSTEMS = 3
"""With more systems only the main metrics are printed."""
MAIN_METRICS = ("HR@10", "NDCG@10", "Recall@50", "MRR")
_MARKS = {"best": "bold", "second": "underline"}
_FILE_WIDTH = 140
_GAP = 2  # between two columns


def show_comparison(
    comparison: Comparison,
    title: str,
    console: Console | None = None,
    controls: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Print a line for each metric and system; of many systems only the main metrics.

    controls: metrics of "MODEL + counting", by system; they have no interval.
    """
    reference = comparison.systems[0].name
    shown = MAIN_METRICS if len(comparison.systems) > FEW_SYSTEMS else comparison.metrics
    table = Table(title=_title(title), title_justify="left", box=None)
    for heading in ("metric", "run", "mean", "interval", "difference", "interval"):
        # On a narrow terminal long names are folded and numbers stay whole.
        table.add_column(heading, justify="right" if heading in ("mean", "difference") else "left")
        table.columns[-1].overflow, table.columns[-1].no_wrap = "fold", heading != "run"
    for row, metric in enumerate(comparison.metrics):
        for system in comparison.systems if metric in shown else []:
            name = Text(printable(system.name))
            cells: list[str | Text] = [metric if system.difference is None else "", name]
            cells += _cells(system.values, row)
            if system.difference is not None:
                mean, bounds = _cells(system.difference, row, sign="+")
                cells += [mean, f"{bounds} *" if system.difference.significant[row] else bounds]
            table.add_row(*cells)
            if controls and system.name in controls:
                table.add_row("", Text(printable(control_name(system.name))), _percent(controls[system.name][metric]))
    console = console or screen()
    console.print(table)
    console.print(Text(f"\ndifference: from {printable(reference)}; * its interval does not contain 0"))
    if len(shown) < len(comparison.metrics):
        console.print(f"{len(shown)} of {len(comparison.metrics)} metrics are shown; --json writes all")


def show_section(section: Section, under: str, console: Console | None = None) -> None:
    """Print the table of a section. Standard deviations are left out: a screen is too narrow for them.

    under: what the second line of a cell is.
    """
    console = console or screen()
    show_table(_title(section.title), _texts(section.grid.header), list(map(_texts, section.grid.rows)), console,
               right=section.grid.numbers)  # fmt: skip
    console.print(Text(f"\nsecond lines: {printable(under)}; * its interval does not contain 0", "dim"))


def show_table(
    title: Text, header: Sequence[Text], rows: Sequence[Sequence[Text]], console: Console, right: bool = True
) -> None:
    """Print a table under its title. Where the screen is too narrow for it, print parts; each has the first column.

    right: numbers are in all columns but the first.
    """
    console.print(title)  # not the table's own, which would be folded to the width of the table
    widths = [max(map(_width, column)) for column in zip(header, *rows, strict=True)]
    first, others = widths[0], widths[1:]
    for part in parts_that_fit(others, console.width - min(first, console.width // 3) - _GAP):
        table = Table(box=None)
        # Numbers stay whole. A name that is longer than a third of the screen is folded.
        table.add_column(header[0], overflow="fold")
        for cell in header[1:][part]:
            table.add_column(cell, justify="right" if right else "left", overflow="fold", no_wrap=True)
        for row in rows:
            table.add_row(row[0], *row[1:][part])
        console.print(table)


def parts_that_fit(widths: Sequence[int], room: int) -> list[slice]:
    """Columns in runs whose widths, with a gap each, fit into so many characters; at least one column in a run."""
    parts, first, used = [], 0, 0
    for place, width in enumerate(widths):
        if place > first and used + width + _GAP > room:
            parts.append(slice(first, place))
            first, used = place, 0
        used += width + _GAP
    return [*parts, slice(first, len(widths))]


def show_warnings(warnings: Iterable[str], console: Console | None = None) -> None:
    """Print the warnings that the pages of a report have, below an empty line."""
    console = console or screen()
    lines = [Text.assemble(("Warning: ", "bold yellow"), printable(warning)) for warning in warnings]
    if lines:
        console.print("", *lines, sep="\n", soft_wrap=True)  # one warning, one line: a log can be searched


def screen() -> Console:
    """A console as wide as the terminal, or wide enough for whole names where the output is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, _FILE_WIDTH))


def _title(words: str) -> Text:
    return Text(printable(words), "table.title")


def _text(cell: Cell) -> Text:
    text = Text(printable(cell.text.partition(" ± ")[0]), _MARKS.get(cell.mark, ""))
    note = printable(cell.note) + (" *" if cell.tone else "")
    return text.append(f"\n{note}", "dim") if note else text


def _texts(cells: Iterable[Cell]) -> list[Text]:
    return list(map(_text, cells))


def _width(text: Text) -> int:
    return max(line.cell_len for line in text.split("\n"))


def _cells(interval: Interval, row: int, sign: str = "") -> list[str]:
    """A mean and its interval in percent."""
    mean, low, high = (_percent(bound[row], sign) for bound in interval)
    return [mean, f"{low} .. {high}"]


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f}"
