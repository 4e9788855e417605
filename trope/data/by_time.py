"""A shard's events once more, in the order of time: what everybody chose before a moment, without a sort of all shards.

    by_time_items.npy  int32 [N]  dense item ids; negative for an event that validation asks for
    by_time_times.npy  int64 [N]  Unix seconds, rising

N are the shard's events before the test. What is counted for the test is all of them, what is counted for validation
those that are positive. Under `loo-paper`, which validates on the test, validation is the event before it, as in
`Sequences.with_own_validation`.

`EventRuns` reads all shards as one: it merges their runs, some events at a time. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trope.data import folder as files
from trope.data.folder import BY_TIME, REQUIRED
from trope.data.protocols import Protocol, Splits, pieces
from trope.data.shard_files import SameFiles, one_line_if_unreadable

ITEMS, TIMES = BY_TIME
# Events of all runs in memory at a time, and those of one run at least, so that a read is worth its while.
MERGED, LEAST = 1 << 19, 1 << 10
Pair = tuple[np.ndarray, np.ndarray]
_CHECKED = 1 << 18
_ODD = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's
_AGAIN = "copy or prepare it again"


def sort_by_time(
    items: np.ndarray, times: np.ndarray, offsets: np.ndarray, cuts: Splits, protocol: Protocol
) -> dict[str, np.ndarray]:
    """A shard's arrays by time, from its other arrays."""
    signed, times = _before_test(items, times, offsets, cuts, protocol)
    order = np.argsort(times, kind="stable")
    return {ITEMS: signed[order], TIMES: times[order]}


def _before_test(items: np.ndarray, times: np.ndarray, offsets: np.ndarray, cuts: Splits, protocol: Protocol) -> Pair:
    """The events before the test, by user; items of validation are negative."""
    train_end = np.maximum(cuts.test_start - 1, 0) if protocol.name == "loo-paper" else cuts.train_end
    items, lengths = items.astype(np.int32, copy=False), np.diff(offsets)
    place = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)
    signed = np.where(place < np.repeat(train_end, lengths), items, -items)
    known = place < np.repeat(cuts.test_start, lengths)
    return signed[known], times[known]


class EventRuns:
    """The events by time of some shards; files that are missing or of another size are refused at once.

    path, meta: of the dataset. verify: compare files with their SHA-256, and events with those of the shards' users.
    """

    def __init__(self, path: Path, meta: dict[str, Any], verify: bool) -> None:
        self.runs = []
        protocol, num_items = Protocol(**meta["protocol"]), int(meta["counts"]["items"])
        for number, arrays in enumerate(meta["shards"]):
            if ITEMS not in arrays or TIMES not in arrays:
                raise ValueError(
                    f"{path} was prepared by an older version of trope, without its events in the order of time; "
                    "prepare it again, or leave out --memory"
                )
            self.runs.append(_Run(files.shard_folder(path, number), arrays, protocol, num_items, verify))

    def check(self) -> None:
        """Refuse damaged files now; the first read would."""
        for run in self.runs:
            run.check()

    def merged(self, most: int = MERGED) -> Iterator[Pair]:
        """Items, negative for those of validation, and rising times: a piece at a time, `most` events in memory."""
        share = max(most // len(self.runs), LEAST)
        done = [0] * len(self.runs)
        held: list[Pair] = [(np.empty(0, np.int32), np.empty(0, np.int64)) for _ in self.runs]
        while True:
            for number, run in enumerate(self.runs):
                items, times = held[number]
                if len(items) <= share // 2 and done[number] < run.events:
                    more = run.read(done[number], share - len(items))
                    done[number] += len(more[0])
                    held[number] = np.concatenate((items, more[0])), np.concatenate((times, more[1]))
            # Beyond the last event held of a run that goes on, an unread one may come first.
            last = [held[n][1][-1] for n, run in enumerate(self.runs) if done[n] < run.events]
            ends = [np.searchsorted(times, min(last), side="right") if last else len(times) for _, times in held]
            # No name for what is handed over: it would stay in memory a second time until the next one is asked for.
            yield _in_order([(items[:end], times[:end]) for (items, times), end in zip(held, ends, strict=True)])
            if not last:
                return
            held = [(items[end:], times[end:]) for (items, times), end in zip(held, ends, strict=True)]


def _in_order(parts: list[Pair]) -> Pair:
    """The events of all parts in the order of time; of equal times those of the first part come first."""
    items, times = (np.concatenate([pair[side] for pair in parts]) for side in (0, 1))
    order = np.argsort(times, kind="stable")
    return items[order], times[order]


class _Run:
    """The events by time of one shard, read with plain reads: mapped pages would count as memory."""

    def __init__(self, folder: Path, arrays: dict[str, Any], protocol: Protocol, num_items: int, verify: bool) -> None:
        if arrays[ITEMS]["shape"] != arrays[TIMES]["shape"]:
            raise ValueError(f"the events by time in {folder} do not fit together; {_AGAIN}")
        self.folder, self.arrays, self.protocol, self.num_items = folder, arrays, protocol, num_items
        self.verify = verify
        self.events = int(arrays[ITEMS]["shape"][0])
        self._is_new, self._same = True, SameFiles()
        for name in BY_TIME:
            files.find_array(folder, name, {"arrays": arrays})
        self._same.check(folder, BY_TIME)

    def read(self, first: int, count: int) -> Pair:
        """Up to `count` events from the first on. Before the first time, the files are checked."""
        self.check()
        with one_line_if_unreadable(self.folder):
            items, times = (self._part(name, first, min(count, self.events - first)) for name in BY_TIME)
        numbers = np.abs(items)
        if (times[1:] < times[:-1]).any() or numbers.min() < 1 or numbers.max() > self.num_items:
            raise ValueError(f"the events by time in {self.folder} are not in order or not of its items; {_AGAIN}")
        return items, times

    def check(self) -> None:
        """Look at the files the first time; later, refuse those that were replaced since."""
        with one_line_if_unreadable(self.folder):
            self._same.check(self.folder, BY_TIME)
            if self._is_new:
                for name in BY_TIME:
                    files.read_array(self.folder, name, {"arrays": self.arrays}, self.verify)
                if self.verify:
                    self._check_events()
                self._is_new = False

    def _check_events(self) -> None:
        """Refuse other events than those of the users before the test: a later one would let the counts look ahead."""
        meta = {"arrays": self.arrays}
        items, times, offsets, splits = (files.read_array(self.folder, name, meta, False) for name in REQUIRED)
        expected = found = 0
        for first, last in pieces(offsets, _CHECKED):
            own = slice(int(offsets[first]), int(offsets[last]))
            cuts = Splits(*(cut[first:last] for cut in splits))
            whose = offsets[first : last + 1] - own.start
            expected += _fingerprint(*_before_test(items[own], times[own], whose, cuts, self.protocol))
        for place in range(0, self.events, _CHECKED):
            count = min(_CHECKED, self.events - place)
            found += _fingerprint(*(self._part(name, place, count) for name in BY_TIME))
        if expected != found:
            for name in REQUIRED:  # maybe it is one of these
                files.read_array(self.folder, name, meta)
            raise ValueError(f"the events by time in {self.folder} are not those of its users; {_AGAIN}")

    def _part(self, name: str, first: int, count: int) -> np.ndarray:
        dtype = files.ALL_ARRAYS[name]
        header = int(self.arrays[name]["bytes"]) - self.events * dtype.itemsize
        found = np.fromfile(self.folder / f"{name}.npy", dtype, count, offset=header + first * dtype.itemsize)
        if len(found) != count:
            raise ValueError(f"{self.folder / name}.npy ends too early; {_AGAIN}")
        return found


def _fingerprint(items: np.ndarray, times: np.ndarray) -> int:
    """A number that depends on which events there are and not on their order; those of two parts may be added."""
    mixed = items.astype(np.int64).view(np.uint64) * _ODD ^ times.view(np.uint64)
    for shift in (30, 27):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * _ODD
    return int((mixed >> np.uint64(32)).sum(dtype=np.uint64)) + len(items)
