"""What `trope prepare` must give, in plain Python: the rules of docs/data.md, and nothing of trope's own code.

The oracle never reads a file that the fuzzer wrote: it knows the rows, because the fuzzer made them up.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "iso": 10**6, "timestamp": 10**6}
FAR_FUTURE = 4_102_444_800
Id = int | str


@dataclass
class Row:
    """One event as the fuzzer made it up.

    tick: its time in whole units; None where it is none. written: the time as the file has it. reason: why the row is
    bad, None if it is good. raw: the bytes of the line, where they are not simply the values.
    """

    user: Id | None
    item: Id | None
    tick: int | None
    written: Any
    basket: Id | None = None
    event: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    raw: bytes | None = None


@dataclass
class Options:
    """The options of `trope prepare`. ticks: units of a row's time in a second."""

    ticks: int = 1
    min_user: int = 1
    min_item: int = 1
    once: bool = False
    events: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    skip_bad: bool = False
    protocol: str = "loo-strict"
    cutoff: int | None = None
    window: int | None = None
    baskets: bool = False


@dataclass
class Dataset:
    """A prepared folder, by value. bad: number of bad rows. rows: all rows that were read."""

    users: list[Id]
    items: list[Id]
    sequence: list[int]
    times: list[int]
    offsets: list[int]
    splits: list[list[int]]
    baskets: list[int] | None
    basket_ids: list[Id] | None
    bad: int
    rows: int

    def difference(self, found: Dataset) -> str | None:
        """The first thing in which `found` is not this dataset."""
        for name, expected in vars(self).items():
            actual = getattr(found, name)
            if expected != actual:
                return f"{name} {_first_difference(expected, actual)}"
        return None


def predict(rows: list[Row], options: Options, text_roles: frozenset[str], bad: int | None = None) -> Dataset | None:
    """The dataset of these rows, in the source's order; None where `trope prepare` must refuse.

    text_roles: which of user, item and basket are text in the source. bad: the count of bad rows, where it is not
    simply that of the bad rows in `rows` (the rows are then without them).
    """
    good = [row for row in rows if row.reason is None]
    bad = len(rows) - len(good) if bad is None else bad
    if (bad and not options.skip_bad) or not rows:
        return None
    total = len(good) + bad
    roles = ("user", "item", "basket") if options.baskets else ("user", "item")
    typed = {role: _typed([getattr(row, role) for row in good], role in text_roles) for role in roles}
    events = [
        (user, item, row.tick, place, typed["basket"][place] if options.baskets else None)
        for place, (user, item, row) in enumerate(zip(typed["user"], typed["item"], good, strict=True))
        if (not options.events or row.event in options.events)
        and (options.since is None or row.tick >= options.since * options.ticks)
        and (options.until is None or row.tick < options.until * options.ticks)
    ]
    events = _core(events, options)
    if not events:
        return None
    users, items = (sorted({event[side] for event in events}, key=_order) for side in (0, 1))
    number = {item: dense for dense, item in enumerate(items, start=1)}
    rank = {user: dense for dense, user in enumerate(users)}
    events.sort(key=lambda event: (rank[event[0]], event[2], event[3]))
    owned = Counter(event[0] for event in events)
    offsets = [0]
    for user in users:
        offsets.append(offsets[-1] + owned[user])
    times = [event[2] // options.ticks for event in events]
    baskets, basket_ids = None, None
    if options.baskets:
        keys = [key for key, _ in groupby((event[0], event[4]) for event in events)]
        runs = [len(list(run)) for _, run in groupby((event[0], event[4]) for event in events)]
        baskets = [number for number, length in enumerate(runs) for _ in range(length)]
        basket_ids = [basket for _, basket in keys]
    splits = _split(options, offsets, times, baskets)
    if splits is None:
        return None
    sequence = [number[event[1]] for event in events]
    return Dataset(users, items, sequence, times, offsets, splits, baskets, basket_ids, bad, total)


def read(folder: Path) -> Dataset:
    """A prepared folder as it is on disk."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays = {path.name.removesuffix(".npy"): np.load(path) for path in folder.glob("*.npy")}
    return Dataset(
        _ids(arrays, "user_ids") or [],
        _ids(arrays, "item_ids") or [],
        arrays["items"].tolist(),
        arrays["times"].tolist(),
        arrays["offsets"].tolist(),
        arrays["splits"].tolist(),
        arrays["baskets"].tolist() if "baskets" in arrays else None,
        _ids(arrays, "basket_ids"),
        meta["bad_rows"]["count"],
        meta["source"]["rows"],
    )


def _ids(arrays: dict[str, np.ndarray], name: str) -> list[Id] | None:
    if name in arrays:
        return arrays[name].tolist()
    if f"{name}.text" not in arrays:
        return None
    text, ends = bytes(arrays[f"{name}.text"]), arrays[f"{name}.ends"].tolist()
    return [text[start:end].decode() for start, end in pairwise([0, *ends])]


def _typed(values: list[Any], is_text: bool) -> list[Id]:
    """Ids of a text column are integers if every one is written as an integer of 64 bits."""
    if not is_text:
        return values
    texts = [str(value) for value in values]
    whole = all(re.fullmatch("0|-?[1-9][0-9]*", text) and -(2**63) <= int(text) < 2**63 for text in texts)
    return [int(text) for text in texts] if whole else list(texts)


def _order(value: Id) -> Any:
    return value.encode() if isinstance(value, str) else value


def _core(events: list[tuple], options: Options) -> list[tuple]:
    while True:
        users, items = (Counter(event[side] for event in events) for side in (0, 1))
        left = [e for e in events if users[e[0]] >= options.min_user and items[e[1]] >= options.min_item]
        if options.once or len(left) == len(events):
            return left
        events = left


def _split(options: Options, offsets: list[int], times: list[int], baskets: list[int] | None) -> list[list[int]] | None:
    """The four cuts of every user; None where nobody can be tested, or a holdout does not fit."""
    cutoff, window = options.cutoff, 86_400 if options.window is None else options.window
    if options.protocol == "holdout":
        cutoff = max(times) + 1 - window if cutoff is None else cutoff
        if not min(times) < cutoff - window or not cutoff <= max(times):
            return None
    cuts = []
    for start, end in pairwise(offsets):
        own, n = times[start:end], end - start
        if options.protocol == "holdout":
            assert cutoff is not None
            before = [sum(time < moment for time in own) for moment in (cutoff - window, cutoff, cutoff + window)]
            cuts.append((before[0], before[1], before[1], before[2]))
        elif options.protocol == "next-basket":
            labels = own if baskets is None else baskets[start:end]
            begins = [0, *(i for i in range(1, n) if labels[i] != labels[i - 1])]
            few = len(begins) < 3
            cuts.append((n, n, n, n) if few else (begins[-2], begins[-1], begins[-1], n))
        elif options.protocol == "loo-paper":
            cuts.append((n, n, n, n) if n < 2 else (n - 1, n, n - 1, n))
        else:
            cuts.append((n, n, n, n) if n < 3 else (n - 2, n - 1, n - 1, n))
    if not any(test_start > 0 and test_end > test_start for *_, test_start, test_end in cuts):
        return None
    return [list(cut) for cut in zip(*cuts, strict=True)]


def _first_difference(expected: Any, actual: Any) -> str:
    if not (isinstance(expected, list) and isinstance(actual, list)):
        return f"should be {expected}, found {actual}"
    if len(expected) != len(actual):
        return f"should be {len(expected)} long, found {len(actual)}"
    place = next(i for i, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1])
    return f"at {place} should be {str(expected[place])[:60]!r}, found {str(actual[place])[:60]!r}"
