"""A `Source` describes where events come from and which columns hold user, item and time. Engines read it.

`trope.data.sources.resolve` makes one from the words of a command, `trope.data.sources.files` from files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

TIME_UNITS = ("s", "ms", "us", "ns", "iso")
# Names that are looked for where nobody named the column and the default is absent: those of our own answers.
OTHER_NAMES = {"user": "user_id", "item": "item_id"}


@dataclass(frozen=True)
class Columns:
    """The source's column names by role; None where the source has no such column."""

    user: str = "user"
    item: str = "item"
    time: str = "timestamp"
    basket: str | None = None
    event: str | None = None
    value: str | None = None

    def used(self) -> dict[str, str]:
        """Column names by role, without the roles that the source lacks."""
        return {role: name for role, name in vars(self).items() if name is not None}


@dataclass(frozen=True)
class Lookup:
    """A Parquet file that maps each item to a coarser one, from column `key` to column `value`."""

    path: Path
    key: str
    value: str


@dataclass(frozen=True)
class Counts:
    """Users, items and events, as the paper's table of statistics has them."""

    users: int
    items: int
    events: int


@dataclass(frozen=True)
class Source:
    """Everything an engine needs to read the events.

    name: for messages and `meta.json`.
    kind: `csv`, `json` (one object a line), `parquet` or `table`.
    files: in the order that breaks ties in time. Empty for a table.
    folder: set where the source is all files below it.
    unnamed: roles of `OTHER_NAMES` whose column is the default, because nobody named it.
    fields: all columns of a CSV file, or of the first Parquet file, in order. header: whether the first line of a CSV
        file names them. by_file: whether Parquet files must be read one by one (`trope.data.sources.parquet`).
    time_unit: one of `TIME_UNITS`; `iso` is for dates as text. time_format: how such dates are written
        (`trope.data.dates`), "" for ISO 8601.
    url, table: an Ibis connection URL and a table there, for kind `table`.
    min_user, min_item: thresholds of the k-core that this dataset is usually filtered with.
    lookup: items to replace, None to keep them.
    names: returns item names by original id, for display; called once.
    items_file: a CSV or Parquet file with names that go before those (`trope.data.item_names`). name_col: its column
        of names, None to look for the usual ones.
    paper: the paper's counts of this dataset, None where the paper has none.
    """

    name: str
    kind: str
    columns: Columns
    files: tuple[Path, ...] = ()
    folder: Path | None = None
    unnamed: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    header: bool = True
    delimiter: str = ","
    quote: str = '"'
    by_file: bool = False
    time_unit: str = "s"
    time_format: str = ""
    url: str = field(default="", repr=False)  # it may hold a password
    table: str = ""
    min_user: int = 5
    min_item: int = 5
    lookup: Lookup | None = None
    names: Callable[[], Mapping[str, str]] | None = None
    items_file: Path | None = None
    name_col: str | None = None
    paper: Counts | None = None

    def settled(self, found: Collection[str]) -> Source:
        """The source with `user_id` and `item_id` for unnamed columns whose default is not among those `found`."""
        used = self.columns.used()
        other = {
            role: OTHER_NAMES[role]
            for role in self.unnamed
            if used[role] not in found and OTHER_NAMES[role] in found and OTHER_NAMES[role] not in used.values()
        }
        return replace(self, columns=replace(self.columns, **other))

    def wanted(self, role: str) -> str:
        """The column of a role for messages: `'user' or 'user_id'`."""
        names = [self.columns.used()[role], *([OTHER_NAMES[role]] if role in self.unnamed else [])]
        return " or ".join(map(repr, dict.fromkeys(names)))

    @property
    def is_text(self) -> bool:
        """Whether an engine reads every column as text."""
        return self.kind in ("csv", "json")

    @property
    def header_lines(self) -> int:
        """Number of lines before the first event of each file."""
        return int(self.kind == "csv" and self.header)

    @property
    def labels(self) -> list[str]:
        """The files' names for messages, with their folders where two files have one name."""
        names = [file.name for file in self.files]
        if len(set(names)) == len(names):
            return names
        top = Path(os.path.commonpath(self.files))
        return [str(file.relative_to(top)) for file in self.files]

    @property
    def row_word(self) -> str:
        """The word for a row in messages: `line` of a text file, else `row`."""
        return "line" if self.is_text else "row"
