"""A report as Markdown. The second best is underlined with HTML's <u>: Markdown has no underline."""

from __future__ import annotations

from trope.data.printable import printable
from trope.experiments.report.page import Cell, Grid, Page


def to_markdown(page: Page) -> str:
    """The whole page, ending in a newline."""
    parts = [f"# {_escape(page.title)}", _escape(page.summary)]
    parts += [f"> **Warning:** {_escape(warning)}" for warning in page.warnings]
    for section in page.sections:
        parts += [f"## {_escape(section.title)}", _escape(section.text), _table(section.grid)]
    facts = "\n".join(f"- **{_escape(label)}:** {_escape(what)}" for label, what in page.facts)
    return "\n\n".join([*parts, "## How this was measured", facts]) + "\n"


def _table(grid: Grid) -> str:
    rows = [[_cell(cell) for cell in row] for row in (grid.header, *grid.rows)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + (":" if grid.numbers else "-") for width in widths[1:])]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _cell(cell: Cell) -> str:
    text = _escape(cell.text)
    text = {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(cell.mark, text)
    star = " \\*" if cell.tone else ""
    return f"{text} ({_escape(cell.note)}){star}" if cell.note else text + star


def _escape(text: str) -> str:
    """Text whose signs for emphasis, cells, tags and links are escaped; control characters are spelled out."""
    text = printable(text)
    for sign in ("\\", "*", "_", "|", "<", "`", "["):
        text = text.replace(sign, f"\\{sign}")
    return text
