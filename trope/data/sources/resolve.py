"""What the user typed becomes a `Source`: a public dataset's name, a connection URL, or a path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trope.data.sources.published import NAMES, named
from trope.data.sources.source import Columns, Source, check, expand, from_files, kind_of

SHOP = "calendar-shop"


@dataclass(frozen=True)
class Request:
    """A source as given on the command line; None leaves the source's own choice.

    text: a name such as `ml-20m`, an Ibis URL such as `postgres://host/db`, a file, a folder or a glob.
    raw: where a named dataset's published files are. level: `product` or `type`, for `complete-journey`.
    table: the table behind a URL.
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

    def columns(self, default: Columns) -> Columns:
        """The columns asked for, the rest from `default`."""
        asked = {
            "user": self.user_col,
            "item": self.item_col,
            "time": self.time_col,
            "basket": self.basket_col,
            "event": self.event_col,
        }
        return replace(default, **{role: column for role, column in asked.items() if column is not None})


def resolve(request: Request) -> Source:
    """The source that a request means; files are looked up and their columns checked."""
    unit: dict[str, Any] = {} if request.time_unit is None else {"time_unit": request.time_unit}
    if "://" in request.text:
        if request.table is None:
            raise ValueError(f"{_without_password(request.text)} is a connection; say which table with --table")
        columns = request.columns(Columns())
        source = Source(_without_password(request.text), "table", columns, url=request.text, table=request.table)
        return check(replace(source, **unit))
    if request.text == SHOP:
        if request.raw is None:
            raise ValueError(f"{SHOP} is generated first: `trope generate --out FOLDER`, then pass --raw FOLDER")
        columns = request.columns(Columns(basket="basket"))
        return from_files(SHOP, expand(str(request.raw)), columns, **unit)
    source_or_none = named(request.text, request.raw, request.level)
    if source_or_none is not None:
        return check(replace(source_or_none, columns=request.columns(source_or_none.columns), **unit))
    if request.raw is not None:
        raise ValueError(f"--raw is for datasets known by name, and {request.text!r} is not one; give the path itself")
    where = Path(request.text)
    name = where.name if where.name not in ("", "..") else where.resolve().name or request.text
    return from_files(name, _expand(request.text), request.columns(Columns()), **unit)


def _expand(text: str) -> tuple[Path, ...]:
    """The files of a path; where there are none and it could be meant as a name, the error lists the names."""
    try:
        return expand(text)
    except FileNotFoundError as error:
        path = Path(text)
        if path.exists() or path.name != text or kind_of(path):
            raise
        raise FileNotFoundError(
            f"{error}, and no dataset of that name; there are {', '.join((*NAMES, SHOP))}"
        ) from None


def _without_password(url: str) -> str:
    """A URL fit for messages and `meta.json`."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rsplit('@', 1)[-1]}"
