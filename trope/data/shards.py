"""Write one shard of a prepared dataset: sort its events, number its baskets, cut by the protocol, write the arrays.

`ShardJob` runs where the events are: in this process for DuckDB and for databases, on the executors for Spark. It
pickles, and it needs numpy, Arrow and a folder that this machine can write to. A shard's folder is whole or absent, so
a task that Spark runs twice does no harm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trope.atomic import atomic_folder
from trope.data import protocols
from trope.data.baskets import Baskets
from trope.data.by_time import sort_by_time
from trope.data.engines.shard_tables import KEYS
from trope.data.folder import shard_folder
from trope.data.protocols import Protocol
from trope.data.splits import SplitFacts
from trope.data.writer import write_array, write_ids


@dataclass(frozen=True)
class ShardJob:
    """Writes shards into a folder.

    ticks: units of the events' times in a second. protocol: resolved. shard_users: users of a shard, but the last.
    """

    folder: str
    ticks: int
    protocol: Protocol
    shard_users: int

    def __call__(self, number: int, users: pa.Table, events: pa.Table) -> dict[str, Any]:
        """Write shard `number`; returns its number, its arrays' entries and its facts, as JSON can hold them.

        users: `user` (original), `user_id` and `user_events`. events: `user` (dense), `item`, `tick`, `place`, and
        `basket` where the source has them. Both in any order.
        """
        users = users.take(pa.array(np.argsort(users["user_id"].to_numpy(), kind="stable")))
        offsets = np.zeros(len(users) + 1, np.int64)
        np.cumsum(users["user_events"].to_numpy(), out=offsets[1:])
        assert offsets[-1] == len(events), f"shard {number}: {len(events)} events, its users have {offsets[-1]}"
        events = in_order(events)
        items, times = events["item"].to_numpy(), events["tick"].to_numpy() // self.ticks
        with atomic_folder(shard_folder(Path(self.folder), number)) as folder:
            entries = {
                "items": write_array(folder, "items", items),
                "times": write_array(folder, "times", times),
                "offsets": write_array(folder, "offsets", offsets),
                **write_ids(folder, "user_ids", users["user"]),
            }
            numbers = None
            if "basket" in events.column_names:
                baskets = Baskets(offsets)
                numbers = baskets.number(_array(events["basket"]))
                entries["baskets"] = write_array(folder, "baskets", numbers)
                entries |= write_ids(folder, "basket_ids", baskets.originals())
            cuts = protocols.split(self.protocol, offsets, times, numbers)
            entries["splits"] = write_array(folder, "splits", np.stack(cuts))
            in_time = sort_by_time(items, times, offsets, cuts, self.protocol)
            entries |= {name: write_array(folder, name, values) for name, values in in_time.items()}
        facts = SplitFacts.of(offsets, times, numbers, cuts)
        return {"number": number, "arrays": entries, "facts": asdict(facts)}


def in_order(events: pa.Table) -> pa.Table:
    """The events by user, time and place; those that come so are only looked at."""
    keys = [events[name].to_numpy() for name in KEYS]
    equal = np.ones(max(len(events) - 1, 0), bool)
    falls = np.zeros_like(equal)
    for key in keys:
        falls |= equal & (key[1:] < key[:-1])
        equal &= key[1:] == key[:-1]
    if not falls.any():
        return events
    return events.take(pa.array(np.lexsort(keys[::-1])))


def _array(values: pa.ChunkedArray) -> pa.Array:
    whole = values.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)
