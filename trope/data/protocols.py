"""Protocols: which of a user's events train, validate and test a model.

Every protocol cuts each user's events, in order of time, at four positions. The store reads only these:

    training   [0, train_end)
    validation [train_end, valid_end)      history: everything before train_end
    test       [test_start, test_end)      history: everything before test_start

Positions count from the user's first event. A part that is empty, or has no history before it, is not evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from trope.data.printable import counted
from trope.times import DAY, say_duration, say_moment

PROTOCOLS = ("loo-strict", "loo-paper", "holdout", "next-basket")
MOSTLY_TIED = 0.5
"""Above this share of ties, most of the order that a model would learn from is the order of the file."""
# Users are cut a piece at a time, so that a memory-mapped log of any size needs little memory.
_PIECE = 1 << 22


class Splits(NamedTuple):
    """The four cuts, each int32 [users]; stored in this order as `splits.npy`."""

    train_end: np.ndarray
    valid_end: np.ndarray
    test_start: np.ndarray
    test_end: np.ndarray


@dataclass(frozen=True)
class Protocol:
    """A protocol's name, and for `holdout` its moment and length in seconds.

    name: one of `PROTOCOLS`.
    cutoff: start of the test window, Unix seconds. None: one window before the last event.
    window: length of the test window, and of the validation window right before it.
    """

    name: str = "loo-strict"
    cutoff: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            raise ValueError(f"unknown protocol {self.name!r}; choose one of {', '.join(PROTOCOLS)}")
        if self.name != "holdout" and (self.cutoff is not None or self.window is not None):
            raise ValueError(f"a cutoff or window belongs to protocol 'holdout', not to {self.name!r}; leave it out")
        if self.window is not None and self.window <= 0:
            raise ValueError(f"the holdout window must be longer than 0 seconds, got {self.window}")

    def resolve(self, first: int, last: int) -> Protocol:
        """Fill in the holdout's cutoff and window for a log from `first` to `last`, and check that they lie in it."""
        if self.name != "holdout":
            return self
        window = DAY if self.window is None else self.window
        cutoff = last + 1 - window if self.cutoff is None else self.cutoff
        if not first < cutoff - window or not cutoff <= last:
            raise ValueError(
                f"holdout with cutoff {say_moment(cutoff)} ({cutoff}) and window {say_duration(window)} leaves no "
                f"training or no test events: the log runs from {say_moment(first)} ({first}) to {say_moment(last)} "
                f"({last}); choose a cutoff inside it, with one window of validation before, or a shorter window"
            )
        return Protocol(self.name, cutoff, window)

    def t_now(self, split: str) -> int | None:
        """The moment every user is asked at in `split`, where the protocol fixes one: the window's start."""
        if self.name != "holdout":
            return None
        assert self.cutoff is not None
        assert self.window is not None
        return self.cutoff if split == "test" else self.cutoff - self.window

    def nobody_to_test(self, name: str, users: int, longest: int) -> str:
        """The error of a log `name` in which nobody can be tested. longest: events of the user with most."""
        if self.name == "holdout":
            least = "an event before the window and one inside"
        else:
            least = {"loo-paper": "two events", "next-basket": "three baskets"}.get(self.name, "three events")
        return (
            f"protocol {self.name} leaves no user of {name} to test: nobody has {least}, the longest of "
            f"{counted(users, 'user')} has {counted(longest, 'event')}; choose {self.alternative}, or loosen a filter"
        )

    @property
    def alternative(self) -> str:
        """What to prepare with instead where this protocol leaves nobody to evaluate."""
        return "another --cutoff or a longer --window" if self.name == "holdout" else "another --protocol"

    def to_dict(self) -> dict[str, Any]:
        """For `meta.json`; `Protocol(**d)` reads it back."""
        return asdict(self)


def split(protocol: Protocol, offsets: np.ndarray, times: np.ndarray, baskets: np.ndarray | None) -> Splits:
    """Cut every user's events by a resolved protocol.

    offsets: int64 [users+1]. times: int64 [events]. baskets: int32 [events]; without them, `next-basket` takes
    the events of one moment as one basket.
    """
    lengths = np.diff(offsets)
    cuts: tuple[np.ndarray, ...]
    if protocol.name == "holdout":
        assert protocol.cutoff is not None
        assert protocol.window is not None
        train_end = count_before(times, offsets, protocol.cutoff - protocol.window)
        valid_end = count_before(times, offsets, protocol.cutoff)
        test_end = count_before(times, offsets, protocol.cutoff + protocol.window)
        cuts = (train_end, valid_end, valid_end, test_end)
    elif protocol.name == "next-basket":
        last, one_before = basket_starts(times if baskets is None else baskets, offsets)
        # With fewer than three baskets nothing is left to train on; such a user is training only.
        few = one_before <= 0
        cuts = tuple(np.where(few, lengths, cut) for cut in (one_before, last, last, lengths))
    elif protocol.name == "loo-paper":
        few = lengths < 2
        last = np.where(few, lengths, lengths - 1)
        cuts = (last, lengths, last, lengths)
    else:
        few = lengths < 3
        last = np.where(few, lengths, lengths - 1)
        cuts = (np.where(few, lengths, lengths - 2), last, last, lengths)
    return Splits(*(cut.astype(np.int32) for cut in cuts))


def pieces(offsets: np.ndarray, size: int = _PIECE) -> Iterator[tuple[int, int]]:
    """Ranges of users that own at most `size` events; a user with more events is a range alone."""
    users, first = len(offsets) - 1, 0
    while first < users:
        last = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        last = min(max(last, first + 1), users)
        yield first, last
        first = last


def count_before(times: np.ndarray, offsets: np.ndarray, moment: int) -> np.ndarray:
    """The number of each user's events before `moment`, int64 [users]."""
    counts = np.zeros(len(offsets) - 1, np.int64)
    for first, last in pieces(offsets):
        start, end = int(offsets[first]), int(offsets[last])
        running = np.concatenate(([0], np.cumsum(times[start:end] < moment)))
        counts[first:last] = np.diff(running[offsets[first : last + 1] - start])
    return counts


def basket_starts(labels: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start of each user's last run of equal `labels`, and of the run before it (0 or less if there is none)."""
    last = np.zeros(len(offsets) - 1, np.int64)
    one_before = np.zeros_like(last)
    for first, end_user in pieces(offsets):
        start = int(offsets[first])
        bounds = offsets[first : end_user + 1] - start
        here = np.asarray(labels[start : int(offsets[end_user])])
        begins = np.ones(len(here), bool)
        begins[1:] = here[1:] != here[:-1]
        begins[bounds[:-1][np.diff(bounds) > 0]] = True
        starts = np.flatnonzero(begins)
        # The run that holds a user's last event, and the one before it, as positions from the user's first event.
        run = np.searchsorted(starts, bounds[1:] - 1, side="right") - 1
        last[first:end_user] = starts[run] - bounds[:-1]
        one_before[first:end_user] = starts[np.maximum(run - 1, 0)] - bounds[:-1]
    return last, one_before


def tied_share(times: np.ndarray, offsets: np.ndarray) -> float:
    """The share of events that share their time with another event of the same user."""
    tied = 0
    for first, last in pieces(offsets):
        start, end = int(offsets[first]), int(offsets[last])
        as_next = np.append(times[start + 1 : end] == times[start : end - 1], False)
        as_next[offsets[first + 1 : last + 1] - start - 1] = False  # a user's last event has no next
        tied += int(np.count_nonzero(as_next | np.append(False, as_next[:-1])))
    return tied / max(int(offsets[-1]), 1)


def say_ties(share: float, protocol: str) -> str:
    """What a share of tied events means under a protocol, and what to train with."""
    said = f"{100 * share:.0f} % of events share their time with another of the same user: their order is the file's. "
    if protocol.startswith("loo"):
        return said + (
            "Leave-one-out asks for the last of them with the others as history. To predict the next basket, prepare "
            "with --protocol next-basket or holdout, and train with --set model.predicts=next-moment."
        )
    return said + (
        "Train with --set model.predicts=next-moment: they then predict the next basket, not the next line of the file."
    )
