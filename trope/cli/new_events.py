"""What `trope update` learns: the events of a longer dataset, of a log, or of a server's store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trope.data.folder import META
from trope.data.sequences import Sequences

if TYPE_CHECKING:
    from trope.data.extend import Log

Columns = dict[str, str | None]


def read_new(events: str, before: Log, old: Sequences, run: Path, on_bad: str, columns: Columns) -> Log:
    """The events that are given as `events`, with original ids.

    Args:
        before: the log of the run's dataset.
        old: the dataset itself. A log's columns and units are those of its log, where `columns` does not say others.
        on_bad: at a bad row of a log: fail, or skip.
        columns: the options of the command about columns, None where they were not given.
    """
    from trope.data.extend import read_folder
    from trope.server.store_log import is_store
    from trope.train.fit import match_items

    if "://" not in events and (Path(events) / META).is_file():
        longer = Sequences.load(events)
        match_items(run, longer)
        return read_folder(longer.path, longer.meta)
    if "items_by" in old.meta.get("source", {}):
        raise ValueError(
            f"the items of {old.path} are groups ({old.meta['source']['items_by']}) of those in its log; prepare the "
            "longer log and give that dataset"
        )
    try:
        return _of_store(events, before, columns) if is_store(events) else _of_log(events, old, on_bad, columns)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading a log needs {error.name}, which is not installed; install trope[data], or give a prepared dataset"
        ) from None


def _of_log(events: str, old: Sequences, on_bad: str, columns: Columns) -> Log:
    """Files or a table, read as the run's own log was."""
    source, filters = old.meta.get("source", {}), old.meta.get("filters", {})
    known = source.get("columns", {})
    asked: dict[str, Any] = {f"{role}_col": known.get(role) for role in ("user", "item", "time", "basket", "event")}
    if columns["time_unit"] is None and columns["time_format"] is None:
        form = source.get("time_format")
        asked |= {"time_format": form} if form else {"time_unit": source.get("time_unit")}
    asked |= {option: value for option, value in columns.items() if value is not None}
    return _read(events, asked, tuple(filters.get("event_types", ())), on_bad)


def _of_store(where: str, before: Log, columns: Columns) -> Log:
    """The events that `trope serve` has stored. Every stored event counts, whatever types of events were prepared."""
    from trope.server.store_log import write_log

    if given := [option for option, value in columns.items() if value is not None]:
        raise ValueError(
            f"{where} is a store of `trope serve`, whose columns are known; leave out --{given[0].replace('_', '-')}"
        )
    asked = {"user_col": "user", "item_col": "item", "time_col": "time", "time_unit": "s"}
    asked |= {"basket_col": "basket"} if before.baskets is not None else {}
    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        path = Path(folder) / "events.parquet"
        if not write_log(where, path):
            raise ValueError(f"{where} has no event; there is nothing to learn")
        return _read(str(path), asked, (), "fail")


def _read(events: str, asked: dict[str, Any], event_types: tuple[str, ...], on_bad: str) -> Log:
    from trope.data.extend import read_folder
    from trope.data.prepare import Options, read_log
    from trope.data.sources.resolve import Request, resolve

    options = Options(event_types=event_types, on_bad=on_bad)
    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        entries = read_log(resolve(Request(events, **asked)), Path(folder), options)
        read = read_folder(Path(folder), {"arrays": entries})
        return read._replace(  # the arrays are mapped from files that go now
            items_N=read.items_N.copy(), times_N=read.times_N.copy(), offsets=read.offsets.copy(),
            baskets_N=None if read.baskets_N is None else read.baskets_N.copy(),
        )  # fmt: skip
