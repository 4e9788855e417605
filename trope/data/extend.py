"""Extend a prepared dataset by new events: more of old users, new users, new items.

Items keep their dense ids and new ones are appended, because a model has a row for each. Users are numbered anew, in
the order of their original ids. Events that the dataset has already are left out, so a longer log may be given whole.
No filter is applied to what is new: a k-core would drop events that the model has learned from.

Shapes: N events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trope.data import folder as files
from trope.data.protocols import Protocol
from trope.data.shard_files import read_arrays
from trope.data.splits import write_splits
from trope.data.writer import staging, write_array, write_ids, write_meta
from trope.environment import __version__

Originals = list[int] | list[str]


class Log(NamedTuple):
    """Events by user and time, with original ids by dense id."""

    users: Originals
    items: Originals  # of dense item 1 first
    names: list[str] | None
    items_N: np.ndarray  # dense, from 1
    times_N: np.ndarray
    offsets: np.ndarray  # [users + 1]
    baskets_N: np.ndarray | None
    baskets: Originals | None  # the original id of each basket


class Extended(NamedTuple):
    """A log with new events.

    place_N: of each event in the old log, -1 for a new one. new_users, new_items: how many there are. repeated: events
    that were given and known already.
    """

    log: Log
    place_N: np.ndarray
    new_users: int
    new_items: int
    repeated: int

    @property
    def added(self) -> int:
        """How many events are new."""
        return int((self.place_N < 0).sum())


def read_folder(folder: Path, meta: dict[str, Any]) -> Log:
    """The log in a prepared folder, shards joined; meta: its `meta.json`, of which only the arrays are read."""
    ids = {name: files.read_ids(folder, name, meta) for name in files.IDS}
    users, items, names, baskets = (None if found is None else found.to_list() for found in ids.values())
    if users is None or items is None:
        raise ValueError(f"{folder} has no original ids of users or items; prepare the data again")
    here = read_arrays(folder, meta, verify=True)
    labels = None if names is None else [str(name) for name in names]
    return Log(users, items, labels, here["items"], here["times"], here["offsets"], here.get("baskets"), baskets)


def extend(old: Log, new: Log, name: str, users_may_become_text: bool = False) -> Extended:
    """The old log with the events of the new one that it has not.

    name: of the new log, for messages. users_may_become_text: whether a user that is no integer, among old ones that
    are, makes all of them text; else it is refused.
    """
    if users_may_become_text and _is_text(new.users) and not _is_text(old.users):
        old = old._replace(users=[str(user) for user in old.users])
    if old.baskets_N is not None and new.baskets_N is None:
        raise ValueError(f"the dataset has baskets and {name} has none; say which column has them with --basket-col")
    new_items = _like(new.items, old.items, "item", name)
    new_users = _like(new.users, old.users, "user", name)
    dense = {original: place for place, original in enumerate(old.items, start=1)}
    appended = [original for original in new_items if original not in dense]
    dense |= {original: place for place, original in enumerate(appended, start=len(old.items) + 1)}
    users: Any = sorted({*old.users, *new_users})
    row = {original: place for place, original in enumerate(users)}
    user_N = np.concatenate(
        (_owners(old, [row[user] for user in old.users]), _owners(new, [row[u] for u in new_users]))
    )
    item_of = np.array([0, *(dense[original] for original in new_items)])
    item_N = np.concatenate((old.items_N, item_of[new.items_N]))
    time_N = np.concatenate((old.times_N, new.times_N))
    is_new = np.arange(len(user_N)) >= len(old.items_N)
    repeated = _repeated(user_N, item_N, time_N, is_new)
    # Stable, with the old events first: equal times keep the order of their log.
    order = np.lexsort((time_N, user_N))
    order = order[~repeated[order]]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(user_N[order], minlength=len(users)))))
    baskets_N, baskets = _baskets(old, new, user_N, order)
    names = None if old.names is None else [*old.names, *_names(new, new_items, appended)]
    log = Log(users, _joined(old.items, appended), names, item_N[order], time_N[order], offsets, baskets_N, baskets)
    place_N = np.where(is_new[order], -1, order)
    return Extended(log, place_N, len(users) - len(old.users), len(appended), int(repeated.sum()))


def write_extended(extended: Extended, meta: dict[str, Any], name: str, out: Path) -> dict[str, Any]:
    """Write a prepared folder, whole or not at all; returns its `meta.json`.

    meta: of the dataset before, whose protocol stays. name: of the new log.
    """
    log = extended.log
    with staging(out, overwrite=False) as folder:
        entries = {
            "items": write_array(folder, "items", log.items_N),
            "times": write_array(folder, "times", log.times_N),
            "offsets": write_array(folder, "offsets", log.offsets),
            **write_ids(folder, "user_ids", _arrow(log.users)),
            **write_ids(folder, "item_ids", _arrow(log.items)),
        }
        if log.names is not None:
            entries |= write_ids(folder, "item_names", _arrow(log.names))
        if log.baskets_N is not None and log.baskets is not None:
            entries["baskets"] = write_array(folder, "baskets", log.baskets_N)
            entries |= write_ids(folder, "basket_ids", _arrow(log.baskets))
        split = write_splits(folder, Protocol(**meta["protocol"]), str(out))
        entries["splits"] = split.pop("entry")
        counts = {"users": len(log.users), "items": len(log.items), "events": len(log.items_N), **split.pop("counts")}
        added = {"name": name, "events": extended.added, "users": extended.new_users, "items": extended.new_items}
        gone = ("checksum", "arrays", "counts", "made_by", "shard_users", "shards")
        kept = {key: value for key, value in meta.items() if key not in gone}
        return write_meta(
            folder,
            {
                **kept,
                "format": files.FORMAT,
                **split,
                "counts": counts,
                "paper": None,
                "extended": [*meta.get("extended", []), added],
                "arrays": entries,
                "made_by": {"trope": __version__, "engine": "trope update"},
            },
        )


def _like(new: Originals, old: Originals, role: str, name: str) -> Originals:
    """New ids as the old ones are written: integers among text are that text; text among integers is refused."""
    old_is_text, new_is_text = _is_text(old), _is_text(new)
    if old_is_text and not new_is_text:
        return [str(original) for original in new]
    if new_is_text and not old_is_text:
        shown = next((original for original in new if not str(original).lstrip("-").isdigit()), new[0])
        raise ValueError(
            f"{name} has the {role} {shown!r}, and all {role}s of the dataset are integers; mend the {role} column, or "
            "prepare the whole log anew and use `trope fit`"
        )
    return new


def _is_text(ids: Originals) -> bool:
    return bool(ids) and isinstance(ids[0], str)


def _owners(log: Log, rows: list[int]) -> np.ndarray:
    """The user of each event, numbered by `rows`."""
    return np.repeat(np.array(rows, np.int64), np.diff(log.offsets))


def _repeated(user_N: np.ndarray, item_N: np.ndarray, time_N: np.ndarray, is_new: np.ndarray) -> np.ndarray:
    """Which new events are old ones: of equal events, as many as the old log has."""
    order = np.lexsort((is_new, time_N, item_N, user_N))
    begins = np.arange(len(order)) == 0
    for each_N in (user_N[order], item_N[order], time_N[order]):
        begins[1:] |= each_N[1:] != each_N[:-1]
    group = np.cumsum(begins) - 1
    known = np.bincount(group, weights=~is_new[order]).astype(np.int64)[group]
    number = np.arange(len(order)) - np.flatnonzero(begins)[group]  # old ones come first in each group
    repeated = np.zeros(len(order), bool)
    repeated[order] = is_new[order] & (number - known < known)
    return repeated


def _baskets(old: Log, new: Log, user_N: np.ndarray, order: np.ndarray) -> tuple[np.ndarray | None, Originals | None]:
    """Baskets numbered anew: one begins where the basket's original id or the user changes."""
    if old.baskets_N is None or old.baskets is None or new.baskets_N is None or new.baskets is None:
        return None, None
    originals: Any = [*old.baskets, *_like(new.baskets, old.baskets, "basket", "the new log")]
    code_of = {original: code for code, original in enumerate(dict.fromkeys(originals))}
    codes = np.array([code_of[original] for original in originals])
    place_N = np.concatenate((old.baskets_N, new.baskets_N.astype(np.int64) + len(old.baskets)))[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (codes[place_N[1:]] != codes[place_N[:-1]]) | (user_N[order][1:] != user_N[order][:-1])
    return np.cumsum(begins) - 1, [originals[place] for place in place_N[begins].tolist()]


def _names(new: Log, ids: Originals, wanted: list[Any]) -> list[str]:
    """Names of new items, "" where their log has none."""
    known = dict(zip(ids, new.names, strict=True)) if new.names is not None else {}
    return [known.get(original, "") for original in wanted]


def _joined(old: Originals, appended: list[Any]) -> Originals:
    return [*old, *appended]


def _arrow(values: Originals) -> pa.ChunkedArray:
    kind = pa.large_string() if _is_text(values) else pa.int64()
    return pa.chunked_array([pa.array(values, kind)])
