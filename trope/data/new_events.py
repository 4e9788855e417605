"""New events for `trope.data.extend`, read from files or a table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trope.data.extend import Log, read_folder
from trope.data.prepare import Options, read_log
from trope.data.sources.resolve import Request, resolve

Columns = dict[str, str | None]


def read_like(events: str, meta: dict[str, Any], on_bad: str, columns: Columns) -> Log:
    """Files or a table, with the columns and units of the log that a dataset was prepared from.

    meta: the dataset's `meta.json`. on_bad: at a bad row: fail, or skip. columns: options of the command that replace
    the log's, None where they were not given.
    """
    source, filters = meta.get("source", {}), meta.get("filters", {})
    known = source.get("columns", {})
    asked: dict[str, Any] = {f"{role}_col": known.get(role) for role in ("user", "item", "time", "basket", "event")}
    if columns["time_unit"] is None and columns["time_format"] is None:
        form = source.get("time_format")
        asked |= {"time_format": form} if form else {"time_unit": source.get("time_unit")}
    asked |= {option: value for option, value in columns.items() if value is not None}
    return read_events(events, asked, filters.get("event_types", ()), on_bad)


def read_events(events: str, asked: dict[str, Any], event_types: Sequence[str] = (), on_bad: str = "fail") -> Log:
    """Files or a table. asked: columns and units, fields of `Request`. event_types: those to keep, empty for all."""
    options = Options(event_types=tuple(event_types), on_bad=on_bad)
    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        entries = read_log(resolve(Request(events, **asked)), Path(folder), options)
        read = read_folder(Path(folder), {"arrays": entries})
        return read._replace(  # the arrays are mapped from files that go now
            items_N=read.items_N.copy(), times_N=read.times_N.copy(), offsets=read.offsets.copy(),
            baskets_N=None if read.baskets_N is None else read.baskets_N.copy(),
        )  # fmt: skip
