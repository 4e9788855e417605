"""Bring users and events to the process that writes shards, one shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

KEYS = ("user", "tick", "place", "item")
"""What events are sorted by; `place` is unique in files, and where a table has none, the item decides."""
ShardWriter = Callable[[int, pa.Table, pa.Table], dict[str, Any]]
"""Takes a shard's number, users and events, writes the shard, returns what is to be known of it."""


def cut(batches: Iterable[pa.RecordBatch], column: str, shard_users: int) -> Iterator[tuple[int, pa.Table]]:
    """Rows that come in the order of `column`, dense user ids, as one table for each shard."""
    held: list[pa.RecordBatch] = []
    current = 0
    for batch in batches:
        shards = batch[column].to_numpy() // shard_users
        edges = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(shards)]
        for first, last in pairwise(edges):
            if first == last:
                continue
            if held and shards[first] != current:
                yield current, pa.Table.from_batches(held)
                held = []
            current = int(shards[first])
            held.append(batch.slice(first, last - first))
    if held:
        yield current, pa.Table.from_batches(held)


def write_by_ranges(
    users: ir.Table, events: ir.Table, shard_users: int, write: ShardWriter
) -> Iterator[dict[str, Any]]:
    """Fetch and write one range of users after the other, by queries that any database can answer."""
    total = int(users.count().to_pyarrow().as_py())
    for number, low in enumerate(range(0, total, shard_users)):
        high = low + shard_users
        who = users.filter((users.user_id >= low) & (users.user_id < high))
        rows = events.filter((events.user >= low) & (events.user < high))
        yield write(number, who.to_pyarrow(), rows.to_pyarrow())
