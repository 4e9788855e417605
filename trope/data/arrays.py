"""Turn filtered events into arrays: give dense ids, sort, and stream the result into `.npy` files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from trope.data.baskets import Baskets
from trope.data.engines.base import Engine
from trope.data.progress import Stages
from trope.data.protocols import pieces
from trope.data.writer import ArrayWriter, write_array, write_ids

# Events sorted and fetched at a time: enough to keep the engine busy, little enough for a small machine.
_PIECE = 1 << 23


@dataclass(frozen=True)
class Coded:
    """Events with dense ids (`user` from 0, `item` from 1) in the engine, and every id with its number of events.

    users: `user`, `user_events`, `user_id`. items: `item`, `item_events`, `item_id`.
    """

    events: ir.Table
    users: ir.Table
    items: ir.Table

    def item_ids(self) -> pa.ChunkedArray:
        """The items' original ids, by dense id."""
        return self.items.order_by("item_id").select("item").to_pyarrow()["item"]


@dataclass(frozen=True)
class Numbered:
    """Events with dense ids (`user` from 0, `item` from 1), and the original ids in that order.

    offsets: int64 [users+1], where each user's events begin.
    """

    events: ir.Table
    user_ids: pa.ChunkedArray
    item_ids: pa.ChunkedArray
    offsets: np.ndarray

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        return int(self.offsets[-1])


def code(events: ir.Table, engine: Engine) -> Coded:
    """Give users and items dense ids in the order of their originals; everything stays in the engine."""
    users = engine.keep(_ranked(events, "user", first=0))
    items = engine.keep(_ranked(events, "item", first=1))
    coded = events.inner_join(users, "user").inner_join(items, "item")
    coded = engine.keep(coded.drop("user", "item", "user_events", "item_events").rename(user="user_id", item="item_id"))
    return Coded(coded, users, items)


def number(coded: Coded) -> Numbered:
    """Fetch the original ids and how many events each user has."""
    by_user = coded.users.order_by("user_id").select("user", "user_events").to_pyarrow()
    offsets = np.zeros(len(by_user) + 1, np.int64)
    np.cumsum(by_user["user_events"].to_numpy(), out=offsets[1:])
    return Numbered(coded.events, by_user["user"], coded.item_ids(), offsets)


def write_events(
    numbered: Numbered,
    folder: Path,
    ticks: int,
    names: Callable[[], Mapping[str, str]] | None,
    stages: Stages,
) -> dict[str, dict[str, Any]]:
    """Write the events and the ids into `folder`; returns the entry of every array in `meta.json`.

    ticks: units of the events' times in a second. names: returns item names by original id. stages: hears the progress.
    """
    total = numbered.num_events
    entries = {"offsets": write_array(folder, "offsets", numbered.offsets)}
    entries |= write_ids(folder, "user_ids", numbered.user_ids) | write_items(numbered.item_ids, folder, names)
    baskets = Baskets(numbered.offsets) if "basket" in numbered.events.columns else None
    with ExitStack() as stack:
        wanted = ("items", "times", "baskets") if baskets else ("items", "times")
        files = {name: stack.enter_context(ArrayWriter(folder, name, (total,))) for name in wanted}
        done = 0
        for batch in _sorted(numbered):
            files["items"].append(batch["item"].to_numpy())
            files["times"].append(batch["tick"].to_numpy() // ticks)
            if baskets:
                files["baskets"].append(baskets.number(batch["basket"]))
            done += len(batch)
            stages.done("write", done / total)
        entries |= {name: file.close() for name, file in files.items()}
    if baskets:
        entries |= write_ids(folder, "basket_ids", baskets.originals())
    return entries


def write_items(
    item_ids: pa.ChunkedArray, folder: Path, names: Callable[[], Mapping[str, str]] | None
) -> dict[str, dict[str, Any]]:
    """Write the items' original ids, and their names where the source has some; returns the entries of `meta.json`."""
    entries = write_ids(folder, "item_ids", item_ids)
    if names is not None:
        known = names()
        labels = [known.get(str(original), "") for original in item_ids.to_pylist()]
        entries |= write_ids(folder, "item_names", pa.chunked_array([pa.array(labels, pa.large_string())]))
    return entries


def _ranked(events: ir.Table, side: str, first: int) -> ir.Table:
    """Every id of one side with its number of events and its dense id."""
    counted = events.group_by(side).agg(**{f"{side}_events": events.count()})
    rank = ibis.row_number().over(ibis.window(order_by=counted[side])) + first
    return counted.mutate(**{f"{side}_id": rank.cast("int32")})


def _sorted(numbered: Numbered) -> Iterator[pa.RecordBatch]:
    """The events in their final order, a range of users at a time."""
    events = numbered.events
    wanted = [column for column in ("item", "tick", "basket") if column in events.columns]
    for first, last in pieces(numbered.offsets, _PIECE):
        piece = events.filter((events.user >= first) & (events.user < last))
        # `place` is unique in files; where a table has none, the item decides.
        ordered = piece.order_by("user", "tick", "place", "item").select(*wanted)
        yield from (batch for batch in ordered.to_pyarrow_batches(chunk_size=1 << 20) if len(batch))
