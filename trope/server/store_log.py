"""The events of a store as a log: what `trope update` learns."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trope.data.sources.urls import shown
from trope.server.open_store import open_store

if TYPE_CHECKING:
    from trope.data.extend import Log

_ROWS = 100_000  # read at once


def read_store(where: str, has_baskets: bool, on_bad: str) -> Log:
    """All events of a store, with original ids, whatever types of events the model was trained with.

    has_baskets: whether what a user does in one second is one basket. on_bad: at a bad event: fail, or skip.
    """
    from trope.data.new_events import read_events

    asked = {"user_col": "user", "item_col": "item", "time_col": "time", "time_unit": "s"}
    asked |= {"basket_col": "basket"} if has_baskets else {}
    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        path = Path(folder) / "events.parquet"
        if not write_log(where, path):
            raise ValueError(f"{shown(where)} has no event; there is nothing to learn")
        return read_events(str(path), asked, on_bad=on_bad)


def write_log(where: str, path: Path) -> int:
    """Write all events of a store to a Parquet file, in the order they were stored; returns how many there are.

    Columns: `user`, `item` and `basket` as text, `time` in seconds. What a user does in one second is one basket.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("user", pa.string()), ("item", pa.string()), ("time", pa.int64()), ("basket", pa.string())])
    store, written, position = open_store(where, may_create=False), 0, 0
    try:
        with parquet.ParquetWriter(path, schema) as file:
            while found := store.after(position, _ROWS):
                position, written = found[-1].position, written + len(found)
                columns = [
                    [event.user for event in found],
                    [str(event.item) for event in found],
                    [event.time for event in found],
                    [str(event.time) for event in found],
                ]
                file.write_table(pa.table(columns, schema=schema))
    finally:
        store.close()
    return written
