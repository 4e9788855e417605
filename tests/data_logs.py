"""Small event logs for the data tests, and a plain Python version of the preparation to compare with."""

from __future__ import annotations

import csv
import types
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from trope.data.extend import Extended, Log, write_extended
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences

try:
    from trope.data.prepare import Options, prepare
    from trope.data.sources.resolve import Request, resolve

    HAS_ENGINE = True
except ModuleNotFoundError as error:  # the machine of the GPU tests has torch and little else
    if error.name != "ibis":
        raise
    HAS_ENGINE = False

START = 1_600_000_000
Event = tuple[int | str, int | str, int]


def events(min_size: int = 12, max_size: int = 60) -> st.SearchStrategy[list[Event]]:
    """Random logs of (user, item, time) with many ties in time."""
    event = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(START, START + 8))
    return st.lists(event, min_size=min_size, max_size=max_size)


def random_log(rows: int = 400, users: int = 20, items: int = 15, seed: int = 0, spread: int = 10**6) -> list[Event]:
    """A log whose users have enough events to survive a 5-core."""
    random = np.random.default_rng(seed)
    columns = (random.integers(1, users + 1, rows), random.integers(1, items + 1, rows))
    return list(zip(*(c.tolist() for c in columns), (START + random.integers(0, spread, rows)).tolist(), strict=True))


def write_parquet(path: Path, rows: list[Event], **extra: list[Any]) -> Path:
    users, items, times = zip(*rows, strict=True)
    pq.write_table(pa.table({"user": users, "item": items, "timestamp": times, **extra}), path)
    return path


def write_csv(path: Path, rows: list[Event], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["user", "item", "timestamp"])
        writer.writerows(rows)
    return path


def prepared(source: Path | str, out: Path, options: Options | None = None, **settings: Any) -> Sequences:
    """Prepare without a filter unless `options` say so, and open the result."""
    if not HAS_ENGINE:
        assert not settings
        return prepared_plainly(Path(source), out, options)
    engine = {key: settings.pop(key) for key in ("engine", "threads", "master", "overwrite") if key in settings}
    prepare(resolve(Request(str(source), **settings)), out, options or loose(), **engine)
    return Sequences.load(out)


def prepared_plainly(source: Path, out: Path, options: Any = None) -> Sequences:
    """A Parquet file prepared without an engine and without a filter."""
    if getattr(options, "shard_users", None):
        pytest.skip("shards are written by an engine, which needs ibis")
    users, items, times = (column.to_numpy() for column in pq.read_table(source).select(["user", "item", "timestamp"]))
    (known_users, user_N), (known_items, item_N) = (np.unique(ids, return_inverse=True) for ids in (users, items))
    order = np.lexsort((times, user_N))  # equal times keep the rows' order
    offsets = np.concatenate(([0], np.cumsum(np.bincount(user_N))))
    ids = known_users.tolist(), known_items.tolist()
    log = Log(*ids, None, (item_N[order] + 1).astype(np.int32), times[order], offsets, None, None)
    protocol = getattr(options, "protocol", None) or Protocol()
    meta = {"protocol": asdict(protocol), "source": {"name": source.name}}
    write_extended(Extended(log, np.full(len(order), -1), *map(len, ids), 0), meta, source.name, out)
    return Sequences.load(out)


def loose(**settings: Any) -> Options:
    """Options that keep every event."""
    if not HAS_ENGINE:
        return types.SimpleNamespace(**settings)  # type: ignore[return-value]
    return Options(**{"min_user": 1, "min_item": 1, **settings})


def core(rows: list[Event], min_user: int, min_item: int, once: bool = False) -> list[Event]:
    """The k-core by its definition, one pass over a list at a time."""
    while True:
        users, items = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
        left = [row for row in rows if users[row[0]] >= min_user and items[row[1]] >= min_item]
        if once or len(left) == len(rows):
            return left
        rows = left


def sequences_of(rows: list[Event]) -> dict[int | str, list[tuple[int | str, int]]]:
    """Each user's (item, time), sorted by time; Python's sort keeps the rows' order where times are equal."""
    users = sorted({row[0] for row in rows})
    return {user: [(i, t) for u, i, t in sorted(rows, key=lambda row: row[2]) if u == user] for user in users}


def unnumbered(data: Sequences) -> dict[int | str, list[tuple[int | str, int]]]:
    """The same form from a prepared dataset, with original ids."""
    users, items = data.ids("user_ids"), data.ids("item_ids")
    assert users is not None
    assert items is not None
    result = {}
    for user in range(data.num_users):
        span = slice(int(data.offsets[user]), int(data.offsets[user + 1]))
        pairs = zip(data.items[span].tolist(), data.times[span].tolist(), strict=True)
        result[users[user]] = [(items[item - 1], time) for item, time in pairs]
    return result


def array_hashes(data: Sequences) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in data.meta["arrays"].items()}
