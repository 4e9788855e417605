"""A report's table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trope.experiments.report.page import Cell, Section

_MARKS = {"best": "bold", "second": "underline"}
_FILE_WIDTH = 140


def show_section(section: Section, under: str, console: Console | None = None) -> None:
    """Print a section's table, without deviations, for which a screen is too narrow; a star is beyond chance.

    under: what the second line of a cell is.
    """
    table = Table(title=section.title, title_justify="left", box=None)
    for column, cell in enumerate(section.grid.header):
        # On a narrow terminal long names are folded and numbers stay whole.
        right = section.grid.numbers and column > 0
        table.add_column(_text(cell), justify="right" if right else "left", overflow="fold", no_wrap=column > 0)
    for row in section.grid.rows:
        table.add_row(*map(_text, row))
    console = console or screen()
    console.print(table)
    console.print(Text(f"\nsecond lines: {under}; * where its interval leaves out 0", "dim"))


def screen() -> Console:
    """Where tables are printed: as wide as the terminal; a file has room for whole names."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, _FILE_WIDTH))


def _text(cell: Cell) -> Text:
    text = Text(cell.text.partition(" ± ")[0], _MARKS.get(cell.mark, ""))
    note = cell.note + (" *" if cell.tone else "")
    return text.append(f"\n{note}", "dim") if note else text
