"""What a `Recommender` refuses, since it would give a plausible and wrong answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trope.data.windows import FILTERS
from trope.rotary.checks import check_choice, check_event_values, check_order
from trope.serve.histories import Histories


def check_request(k: int, filter_seen: str, within: int) -> None:
    """Refuse what is no number of items, no filter, or no time ahead."""
    check_choice("filter_seen", filter_seen, FILTERS)
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a whole number from 1, got {k!r}")
    if isinstance(within, bool) or not isinstance(within, int | np.integer) or within < 0:
        raise ValueError(f"within must be a whole number of seconds from 0, got {within!r}")


def check_filled(histories: Histories) -> None:
    """Refuse a history without events, and no history."""
    if len(histories.offsets) < 2 or np.diff(histories.offsets).min() < 1:
        raise ValueError("there must be a history, and an event in each; leave users without events out")


def check_values(histories: Histories, t_now: npt.NDArray[np.int64] | None, num_items: int) -> Histories:
    """Refuse items that the model has not, times that are no Unix seconds, and times that fall within a history.

    Returns the histories in int64: torch compares no unsigned numbers.
    """
    arrays = {"items": histories.items, "times": histories.times, "offsets": histories.offsets, "t_now": t_now}
    for name, x in arrays.items():
        if x is not None and (not isinstance(x, np.ndarray) or x.dtype.kind not in "iu"):
            found = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
            raise ValueError(f"{name} must be a NumPy array of whole numbers, got {found}")
    shapes = histories.items.shape, histories.times.shape
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise ValueError(f"there must be one item and one time for each event, got shapes {shapes[0]} and {shapes[1]}")
    histories = Histories(*(x.astype(np.int64, copy=False) for x in histories))
    foreign = (histories.items < 1) | (histories.items > num_items)
    if foreign.any():
        raise ValueError(
            f"a history's items must be 1 .. {num_items:,}, got {histories.items[foreign][0]}; leave out events where "
            "`catalogue.dense` gives 0: the model does not know their items"
        )
    times, offsets = torch.from_numpy(histories.times), torch.from_numpy(histories.offsets)
    moments = None if t_now is None else torch.from_numpy(t_now.astype(np.int64, copy=False))
    check_event_values(times, None, offsets, moments, allow_past=True)
    check_order(times, None, offsets)
    return histories


def refuse_past(users: list[int | str], histories: Histories, t_now: npt.NDArray[np.int64]) -> None:
    """Refuse a moment before a user's last event; users: their ids, for the message."""
    last = histories.times[histories.offsets[1:] - 1] if len(histories.times) else t_now
    early = np.flatnonzero((t_now < last) & (np.diff(histories.offsets) > 0))
    if len(early):
        row = early[0]
        raise ValueError(
            f"t_now must not lie before a user's last event, got {t_now[row]} < {last[row]} for user {users[row]!r} "
            f"({len(early):,} users in all); cut the events at t_now, or pass allow_past=True if looking back is meant"
        )
