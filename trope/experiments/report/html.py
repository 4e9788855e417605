"""A report as one HTML page."""

from __future__ import annotations

from trope.experiments.report.page import Cell, Page, Section
from trope.figures.html import Markup, card, document, facts, heading, paragraph, table, text, warning


def to_html(page: Page) -> str:
    """The whole page."""
    return document(
        page.title,
        heading(page.title),
        paragraph(page.summary),
        *map(warning, page.warnings),
        *map(show_section, page.sections),
        card("How this was measured", facts(page.facts, sentences=True)),
    )


def show_section(section: Section) -> Markup:
    """A card with the section's text and table."""
    grid = section.grid
    rows = [[_cell(cell) for cell in row] for row in grid.rows]
    cells = table([_cell(cell) for cell in grid.header], rows, grid.numbers)
    return card(section.title, paragraph(section.text, soft=True), cells)


def _cell(cell: Cell) -> Markup:
    words = text(cell.text)
    marked = {"best": f"<b>{words}</b>", "second": f"<u>{words}</u>"}.get(cell.mark, words)
    if not cell.note:
        return Markup(marked)
    # Colour is not the only sign: a significant difference has a star as well.
    kind, star = (f' class="{cell.tone}"', " *") if cell.tone else ("", "")
    return Markup(f"{marked}<small{kind}>{text(cell.note)}{star}</small>")
