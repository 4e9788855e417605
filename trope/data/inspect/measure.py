"""Measure a prepared dataset in one pass over its memory-mapped events, one range of users at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from trope.data.inspect.calendar import CalendarSignal, calendar_signals
from trope.data.inspect.durations import count_durations
from trope.data.protocols import pieces
from trope.data.sequences import Sequences
from trope.times import HOUR

PIECE = 1 << 21
"""Events looked at in one go: bounds the memory, whatever the size of the data."""
SAMPLE = 2_000_000
"""Events on which the calendar signals are measured."""
RUN = 1 << 14
"""Events of neighbouring users that enter the sample together."""
SAMPLE_ITEMS = 5_000
"""The calendar signals use only the most popular items; rarer items add noise."""


@dataclass(frozen=True)
class Report:
    """What `trope inspect` shows. Durations are counted in the bins of `durations.EDGES`; the calendar is UTC.

    lengths: [users] events of each user, sorted
    gaps: between a user's consecutive events; returns: since the user's last event with the same item
    hourly: [hours] events in each hour from `first_hour` (hours since the epoch) on
    lifetimes: [items seen] seconds between an item's first and last event, sorted
    popularity: [items seen] events of each item, falling
    repeats: share of events whose item the user had before; ties: share that share their moment with another
    """

    name: str
    protocol: str
    users: int
    items: int
    events: int
    first: int
    last: int
    lengths: NDArray[np.int64]
    gaps: NDArray[np.int64]
    returns: NDArray[np.int64]
    hourly: NDArray[np.int64]
    first_hour: int
    lifetimes: NDArray[np.int64]
    popularity: NDArray[np.int64]
    repeats: float
    ties: float
    signals: list[CalendarSignal]

    @property
    def has_hours(self) -> bool:
        """Whether the log has times of day; a log of plain dates has none."""
        return self.signals[0].is_told

    def week(self) -> NDArray[np.int64]:
        """Return events by weekday (Monday first) and hour, [7, 24]."""
        # Hour 0 of the epoch was a Thursday's: 72 hours after Monday.
        slot = (self.first_hour + 72 + np.arange(len(self.hourly))) % 168
        return np.bincount(slot, self.hourly, minlength=168).reshape(7, 24).astype(np.int64)

    def months(self) -> NDArray[np.int64]:
        """Return events by month of the year, [12]."""
        return np.bincount(self._month_numbers() % 12, self.hourly, minlength=12).astype(np.int64)

    def timeline(self) -> tuple[NDArray[np.datetime64], NDArray[np.int64]]:
        """Return days and the events on each, from first to last."""
        day = (self.first_hour + np.arange(len(self.hourly))) // 24
        counts = np.bincount(day - day[0], self.hourly).astype(np.int64)
        return (day[0] + np.arange(len(counts))).astype("datetime64[D]"), counts

    def _month_numbers(self) -> NDArray[np.int64]:
        hours = (self.first_hour + np.arange(len(self.hourly))).astype("datetime64[h]")
        return hours.astype("datetime64[M]").astype(np.int64)


def inspect(path: Path | str, progress: bool = True) -> Report:
    """Measure the prepared dataset in folder `path`."""
    data = Sequences.load(path)
    items, times, offsets = data.items.numpy(), data.times.numpy(), data.offsets.numpy()
    totals = _Totals(data.num_items, int(times.min()), int(times.max()))
    with tqdm(total=len(items), unit=" events", unit_scale=True, desc="inspect", disable=not progress) as bar:
        for first, last in pieces(offsets, PIECE):
            begin, end = int(offsets[first]), int(offsets[last])
            totals.add(items[begin:end].astype(np.int64), times[begin:end], np.diff(offsets[first : last + 1]))
            bar.update(end - begin)
    seen = totals.popularity > 0
    return Report(
        name=Path(path).resolve().name,
        protocol=data.protocol.name,
        users=data.num_users,
        items=data.num_items,
        events=len(items),
        first=totals.first,
        last=totals.last,
        lengths=np.sort(np.diff(offsets)),
        gaps=totals.gaps,
        returns=totals.returns,
        hourly=totals.hourly,
        first_hour=totals.first // HOUR,
        lifetimes=np.sort(totals.last_seen[seen] - totals.first_seen[seen]),
        popularity=np.sort(totals.popularity[seen])[::-1],
        repeats=totals.repeats / len(items),
        ties=totals.ties / len(items),
        signals=calendar_signals(*_sample(items, times, offsets, totals.popularity)),
    )


class _Totals:
    """Running sums over pieces of users."""

    def __init__(self, num_items: int, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.gaps = count_durations(np.empty(0, np.int64))
        self.returns = self.gaps.copy()
        self.hourly = np.zeros(last // HOUR - first // HOUR + 1, np.int64)
        # Row 0 is padding and stays empty.
        self.popularity = np.zeros(num_items + 1, np.int64)
        self.first_seen = np.full(num_items + 1, last)
        self.last_seen = np.full(num_items + 1, first)
        self.repeats = self.ties = 0

    def add(self, items: NDArray[np.int64], times: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Take in the events of some users, in order; lengths: events of each."""
        self.hourly += np.bincount(times // HOUR - self.first // HOUR, minlength=len(self.hourly))
        self.popularity += np.bincount(items, minlength=len(self.popularity))
        np.minimum.at(self.first_seen, items, times)
        np.maximum.at(self.last_seen, items, times)

        user = np.repeat(np.arange(len(lengths)), lengths)
        same_user = user[1:] == user[:-1]
        gap = np.diff(times)
        self.gaps += count_durations(gap[same_user])
        tied = same_user & (gap == 0)
        self.ties += int(np.count_nonzero(np.append(tied, False) | np.append(False, tied)))

        # A stable sort by (user, item) puts a user's purchases of one item side by side, in order of time.
        key = user * len(self.popularity) + items
        order = np.argsort(key, kind="stable")
        again = np.diff(key[order]) == 0
        self.repeats += int(np.count_nonzero(again))
        self.returns += count_durations(np.diff(times[order])[again])


def _sample(
    items: NDArray[np.int32], times: NDArray[np.int64], offsets: NDArray[np.int64], popularity: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return items (renumbered from 0) and times of about SAMPLE events: runs of users, evenly spread."""
    rank = np.full(len(popularity), -1)
    popular = np.argsort(-popularity, kind="stable")[:SAMPLE_ITEMS]
    popular = popular[popularity[popular] > 0]
    rank[popular] = np.arange(len(popular))

    runs = list(pieces(offsets, RUN))
    keep = max(1, min(len(runs), SAMPLE // RUN))
    chosen = (runs[at] for at in np.linspace(0, len(runs) - 1, keep).astype(np.int64))
    bounds = [(int(offsets[first]), int(offsets[last])) for first, last in chosen]
    sampled = np.concatenate([rank[items[begin:end]] for begin, end in bounds])
    moments = np.concatenate([times[begin:end] for begin, end in bounds])
    return sampled[sampled >= 0], moments[sampled >= 0]
