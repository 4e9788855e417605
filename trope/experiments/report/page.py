"""What a report consists of, before it becomes Markdown or HTML: tables of marked cells, facts and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["", "better", "worse"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    text: the value. note: printed smaller, after the value. mark: bold for the best and underlined for the second, as
    in the paper. tone: better or worse where the difference in the note is significant.
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
    """A heading, how to read the table, and the table."""

    title: str
    text: str
    grid: Grid


@dataclass(frozen=True)
class Page:
    """A whole report; facts: (label, sentence), how the numbers were measured."""

    title: str
    summary: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    warnings: list[str] = field(default_factory=list)
