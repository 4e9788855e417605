"""Turn what the user typed into a `Source`: the name of a public dataset, a connection URL, or a path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trope.data.dates import check_format
from trope.data.sources.description import OTHER_NAMES, Columns, Source
from trope.data.sources.files import check_columns, find_files, from_files, kind_of
from trope.data.sources.published import NAMES, named
from trope.data.sources.urls import shown

SHOP = "calendar-shop"


@dataclass(frozen=True)
class Request:
    """A source as given on the command line; None means the source's own default.

    text: a name such as `ml-20m`, an Ibis URL such as `postgres://host/db`, a file, a folder or a glob.
    raw: where a named dataset's published files are. level: `product` or `type`, for `complete-journey`.
    table: the table behind a URL. delimiter: one character between the fields of a CSV file, `\\t` for a tab.
    time_format: how dates are written (`trope.data.dates`).
    items: a file with item names. name_col: the column of the names there.
    """

    text: str
    raw: Path | None = None
    level: str = "product"
    table: str | None = None
    user_col: str | None = None
    item_col: str | None = None
    time_col: str | None = None
    basket_col: str | None = None
    event_col: str | None = None
    time_unit: str | None = None
    delimiter: str | None = None
    time_format: str | None = None
    items: Path | None = None
    name_col: str | None = None

    def columns(self, default: Columns) -> Columns:
        """The columns asked for; the others are those of `default`."""
        asked = {
            "user": self.user_col,
            "item": self.item_col,
            "time": self.time_col,
            "basket": self.basket_col,
            "event": self.event_col,
        }
        return replace(default, **{role: column for role, column in asked.items() if column is not None})

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The roles whose columns may have another name than the default, since nobody asked for one."""
        asked = {"user": self.user_col, "item": self.item_col}
        return tuple(role for role in OTHER_NAMES if asked[role] is None)


def resolve(request: Request) -> Source:
    """The source that a request names; its files are found and their columns checked."""
    if request.name_col is not None and request.items is None:
        raise ValueError(f"--name-col {request.name_col} is a column of the file of item names; give that with --items")
    return replace(_resolve(request), items_file=request.items, name_col=request.name_col)


def _resolve(request: Request) -> Source:
    unit = _time(request)
    if request.delimiter is not None and ("://" in request.text or request.raw is not None):
        raise ValueError(f"--delimiter is for CSV files given by their path, and {shown(request.text)} is none")
    if "://" in request.text:
        if request.time_format is not None:
            raise ValueError("--time-format is for text in files; cast the table's column to a timestamp")
        if request.table is None:
            raise ValueError(f"{shown(request.text)} is a connection; say which table with --table")
        columns = request.columns(Columns())
        source = Source(
            shown(request.text), "table", columns, unnamed=request.unnamed, url=request.text, table=request.table
        )
        return check_columns(replace(source, **unit))
    if request.text == SHOP:
        if request.raw is None:
            raise ValueError(f"{SHOP} is generated first: `trope generate --out FOLDER`, then pass --raw FOLDER")
        columns = request.columns(Columns(basket="basket"))
        return from_files(SHOP, find_files(str(request.raw)), columns, **_folder(request.raw), **unit)
    source_or_none = named(request.text, request.raw, request.level)
    if source_or_none is not None:
        return check_columns(replace(source_or_none, columns=request.columns(source_or_none.columns), **unit))
    if request.raw is not None:
        raise ValueError(f"--raw is for datasets known by name, and {request.text!r} is not one; give the path itself")
    where = Path(request.text)
    name = where.name if where.name not in ("", "..") else where.resolve().name or request.text
    return from_files(
        name,
        _find_or_suggest(request.text),
        request.columns(Columns()),
        unnamed=request.unnamed,
        **_folder(where),
        **_delimiter(request),
        **unit,
    )


def _time(request: Request) -> dict[str, Any]:
    """The fields of `Source` that say how times are written."""
    if request.time_format is None:
        return {} if request.time_unit is None else {"time_unit": request.time_unit}
    if request.time_unit not in (None, "iso"):
        raise ValueError(
            f"--time-format {request.time_format!r} reads dates as text, --time-unit {request.time_unit} numbers; "
            "leave one out"
        )
    check_format(request.time_format)
    return {"time_unit": "iso", "time_format": request.time_format}


def _delimiter(request: Request) -> dict[str, Any]:
    if request.delimiter is None:
        return {}
    delimiter = "\t" if request.delimiter == "\\t" else request.delimiter
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise ValueError(f"--delimiter must be one character, or \\t for a tab; got {request.delimiter!r}")
    return {"delimiter": delimiter}


def _folder(where: Path) -> dict[str, Path]:
    """The field `folder` of a source that is all files below a folder."""
    return {"folder": where.absolute()} if where.is_dir() else {}


def _find_or_suggest(text: str) -> tuple[Path, ...]:
    """The files of a path. If there are none and the text could be a name, the error lists the known datasets."""
    try:
        return find_files(text)
    except FileNotFoundError as error:
        path = Path(text)
        if path.exists() or path.name != text or kind_of(path):
            raise
        raise FileNotFoundError(
            f"{error}, and no dataset of that name; there are {', '.join((*NAMES, SHOP))}"
        ) from None
