"""What a report consists of, before it is Markdown or HTML: facts, tables of marked cells, and what to mind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["", "better", "worse"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    text: what it says. note: smaller, behind it. mark: the paper's bold for the best, underline for the second.
    tone: whether the note is good or bad news beyond chance.
    """

    text: str
    note: str = ""
    mark: Literal["", "best", "second"] = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Grid:
    """A table: its header and rows; the first column is text, the others are numbers unless `numbers` is false."""

    header: list[Cell]
    rows: list[list[Cell]]
    numbers: bool = True


@dataclass(frozen=True)
class Section:
    """A heading, what to know to read the table, and the table."""

    title: str
    text: str
    grid: Grid


@dataclass(frozen=True)
class Page:
    """A whole report; facts: (label, what) in the order to read them."""

    title: str
    summary: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    warnings: list[str] = field(default_factory=list)
