"""Checks of a prepared dataset's arrays: what `trope prepare` cannot have written is refused, checksums or not.

A checksum shows that a file is as it was written. These checks show that what was written is a dataset: an item 0 would
be padding and train to a perfect score, times out of order would look into the future.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import numpy as np

from trope.data.protocols import Protocol, Splits, pieces, split
from trope.rotary.checks import LATEST_TIME
from trope.runs import check_kinds

_AGAIN = "prepare the data again"


def read_protocol(path: Path, meta: dict[str, Any]) -> Protocol:
    """The protocol that a dataset's meta.json names, with a moment and a window where it is a holdout."""
    stored: dict[str, Any] = meta["protocol"]
    kinds = typing.get_type_hints(Protocol)
    try:
        check_kinds(path, {**dict.fromkeys(kinds), **stored}, kinds, _AGAIN)
        protocol = Protocol(**stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a protocol that trope does not know: {error}") from None
    if protocol.name == "holdout" and (protocol.cutoff is None or protocol.window is None):
        raise ValueError(f"{path} is a holdout without a cutoff or a window; {_AGAIN}")
    return protocol


def check_users(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Refuse arrays that do not fit each other. Only per-user arrays are read, so a large dataset opens quickly."""
    events, users = len(arrays["items"]), len(arrays["offsets"]) - 1
    counts = meta["counts"]
    if not (
        (counts["users"], counts["events"]) == (users, events)
        and 1 <= counts["items"] <= events
        and _fit_together(arrays)
        and len(meta["time_span"]["train"]) == 2
    ):
        raise ValueError(f"the arrays in {path} do not fit together; {_AGAIN}")


def check_events(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray], protocol: Protocol) -> None:
    """Refuse events that no preparation writes: one pass over all of them, a piece at a time.

    Items are 1 .. V and each occurs; a user's times rise and lie between 1970 and 2100; baskets are numbered in order;
    splits and the time span are what the protocol makes of these events.
    """
    num_items = int(meta["counts"]["items"])
    occurs = np.zeros(num_items + 1, bool)
    _check_pieces(path, arrays, occurs)
    if not occurs[1:].all():
        missing = int((~occurs[1:]).sum())
        raise ValueError(f"{path} has {missing:,} of {num_items:,} items without an event; {_AGAIN}")
    made, times, begins = _check_splits(path, arrays, protocol), arrays["times"], arrays["offsets"][:-1]
    trained = made.train_end > 0
    starts, ends = begins[trained], (begins + made.train_end)[trained]
    span = [int(times[starts].min()), int(times[ends - 1].max())] if trained.any() else meta["time_span"]["train"]
    if span != meta["time_span"]["train"]:
        raise ValueError(
            f"{path} says that its training events lie in {meta['time_span']['train']}, they lie in {span}; {_AGAIN}"
        )


def check_shard(path: Path, num_items: int, arrays: dict[str, np.ndarray], protocol: Protocol) -> None:
    """The same for one shard, as far as it can be seen there; path: the shard's."""
    if not _fit_together(arrays):
        raise ValueError(f"the arrays in {path} do not fit together; {_AGAIN}")
    _check_pieces(path, arrays, np.zeros(num_items + 1, bool))
    _check_splits(path, arrays, protocol)


def check_shard_users(path: Path, arrays: dict[str, np.ndarray], events: int) -> None:
    """What `offsets` and `splits` of a shard show without its events."""
    if not _users_fit(arrays, events):
        raise ValueError(f"the arrays in {path} do not fit together; {_AGAIN}")


def _fit_together(arrays: dict[str, np.ndarray]) -> bool:
    events = len(arrays["items"])
    of_events = (len(arrays[name]) for name in ("times", "baskets") if name in arrays)
    return all(length == events for length in of_events) and _users_fit(arrays, events)


def _users_fit(arrays: dict[str, np.ndarray], events: int) -> bool:
    offsets, splits = arrays["offsets"], arrays["splits"]
    lengths = np.diff(offsets)
    return bool(
        len(lengths) >= 1
        and offsets[0] == 0
        and offsets[-1] == events
        and lengths.min() >= 1
        and splits.shape == (4, len(lengths))
        and splits.min() >= 0
        and (splits <= lengths).all()
        and (splits[0] <= splits[1]).all()
        and (splits[2] <= splits[3]).all()
    )


def _check_pieces(path: Path, arrays: dict[str, np.ndarray], occurs: np.ndarray) -> None:
    """Look at items, times and baskets. occurs: [V+1], marked for each item that does."""
    offsets, num_items = arrays["offsets"], len(occurs) - 1
    for first, last in pieces(offsets):
        start, end = int(offsets[first]), int(offsets[last])
        items, times = np.asarray(arrays["items"][start:end]), np.asarray(arrays["times"][start:end])
        low, high = int(items.min()), int(items.max())
        if low < 1 or high > num_items:
            raise ValueError(f"{path} has items from {low} to {high}, they must be 1 to {num_items:,}; {_AGAIN}")
        occurs[items] = True
        low, high = int(times.min()), int(times.max())
        if low < 1 or high > LATEST_TIME:
            raise ValueError(f"{path} has times from {low} to {high}, they must be Unix seconds until 2100; {_AGAIN}")
        falls = times[1:] < times[:-1]
        falls[offsets[first + 1 : last] - start - 1] = False  # where the next user begins
        if falls.any():
            user = int(np.searchsorted(offsets, start + int(falls.argmax()), side="right")) - 1
            raise ValueError(f"{path} has events out of order, the first are of user {user}; {_AGAIN}")
        if "baskets" in arrays:
            before = int(arrays["baskets"][start - 1]) if start else -1
            steps = np.diff(arrays["baskets"][start:end], prepend=before)
            if steps.min() < 0 or steps.max() > 1 or (steps[offsets[first:last] - start] != 1).any():
                raise ValueError(f"{path} has baskets that are not numbered in order; {_AGAIN}")


def _check_splits(path: Path, arrays: dict[str, np.ndarray], protocol: Protocol) -> Splits:
    made = split(protocol, arrays["offsets"], arrays["times"], arrays.get("baskets"))
    if not np.array_equal(np.stack(made), arrays["splits"]):
        raise ValueError(f"the splits of {path} are not those of its protocol {protocol.name}; {_AGAIN}")
    return made
