"""A report's table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trope.report_page import Cell, Section

_MARKS = {"best": "bold", "second": "underline"}


def show_section(section: Section, console: Console | None = None) -> None:
    """Print a section's table, without deviations, for which a screen is too narrow; a star is beyond chance."""
    table = Table(title=section.title, title_justify="left", box=None)
    for column, cell in enumerate(section.grid.header):
        # On a narrow terminal long names are folded and numbers stay whole.
        right = section.grid.numbers and column > 0
        table.add_column(_text(cell), justify="right" if right else "left", overflow="fold", no_wrap=column > 0)
    for row in section.grid.rows:
        table.add_row(*map(_text, row))
    (console or Console(highlight=False)).print(table)


def _text(cell: Cell) -> Text:
    text = Text(cell.text.partition(" ± ")[0], _MARKS.get(cell.mark, ""))
    note = cell.note + (" *" if cell.tone else "")
    return text.append(f"\n{note}", "dim") if note else text
