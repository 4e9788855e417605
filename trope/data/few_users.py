"""Advice for a dataset that evaluates too few users, which `trope prepare` prints with its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from trope.times import say_iso, say_minute

# With fewer users, chance alone moves an HR@10 of 0.1 by more than 0.04 in either direction (95 % interval).
FEW_USERS = 200
# Windows are counted in one array; a log of more windows than this gets no cutoff proposed.
_MOST_WINDOWS = 1 << 22
# Times counted at once, so that a memory-mapped log of any size needs little memory.
_PIECE = 1 << 22
# A window below the first share of a typical one is thin; one above the second share is good enough to propose.
_THIN, _ENOUGH = 1 / 10, 1 / 3
# A k-core that dropped a smaller share of the users is not why few are left.
_LOST = 1 / 10


def warn_of_few(meta: dict[str, Any], times: Iterable[np.ndarray], core: str) -> str:
    """A warning where too few users are evaluated, and how to get more; else "".

    times: the times of all events, in any order and any number of arrays. core: the k-core's name for people.
    """
    valid, test = meta["counts"]["valid_users"], meta["counts"]["test_users"]
    fewest = min(valid, test)
    if fewest >= FEW_USERS:
        return ""
    # Half of a 95 % interval of a share of 0.1.
    spread = 1.96 * math.sqrt(0.1 * 0.9 / max(fewest, 1))
    said = (
        f"Only {say_evaluated(meta, ' and ')}, too few to tell models apart: by chance alone an HR@10 of 0.10 varies "
        f"by ± {spread:.2f}."
    )
    lost = meta["dropped"]["core"]
    keep = f"Keep more users with --min-user 1 --min-item 1, without the {core}."
    before, after = lost["users"] if lost else (0, 0)
    advice = [keep] if before - after > _LOST * before else []
    if meta["protocol"]["name"] == "holdout":
        moved = _other_cutoff(meta, times)
        advice = [moved] if moved else ["Choose another --cutoff or a longer --window.", *advice]
    return " ".join([said, *(advice or ["A larger log would have more."])])


def say_evaluated(meta: dict[str, Any], between: str = ", ") -> str:
    """`1 user validates, 6 test`."""
    valid, test = meta["counts"]["valid_users"], meta["counts"]["test_users"]
    validate = "user validates" if valid == 1 else "users validate"
    return f"{valid:,} {validate}{between}{test:,} test{'s' if test == 1 else ''}"


def _other_cutoff(meta: dict[str, Any], times: Iterable[np.ndarray]) -> str:
    """The cutoff to pass where the holdout's windows are thin and others of the log are not; else ""."""
    window, cutoff = meta["protocol"]["window"], meta["protocol"]["cutoff"]
    first, last = meta["time_span"]["all"]
    # Windows begin at multiples of their length: days at midnight UTC.
    low, high = first // window, last // window
    if high - low >= _MOST_WINDOWS:
        return ""
    counts, asked = np.zeros(high - low + 1, np.int64), np.zeros(2, np.int64)
    for array in times:
        for start in range(0, len(array), _PIECE):
            piece = np.asarray(array[start : start + _PIECE])
            counts += np.bincount(piece // window - low, minlength=len(counts))
            valid, test = ((piece >= begin) & (piece < begin + window) for begin in (cutoff - window, cutoff))
            asked += [int(valid.sum()), int(test.sum())]
    typical = _typical(counts)
    if asked.min() >= int(_THIN * typical):  # a whole number: where a handful is typical, no window is thin
        return ""
    enough = counts >= _ENOUGH * typical
    good = np.flatnonzero(enough[1:] & enough[:-1]) + 1
    # `Protocol.resolve` wants a training event before the validation window.
    good = good[(good + low - 1) * window > first]
    if not len(good):
        return ""
    proposed = (int(good[-1]) + low) * window
    thin = f"the log thins out after {say_minute(proposed + window)}"
    where = thin if proposed < cutoff else "the log has more events later"
    return (
        f"The windows hold {asked[0]:,} and {asked[1]:,} events, a typical window of the log {typical:,}: {where}. "
        f"Pass --cutoff {say_iso(proposed)}."
    )


def _typical(counts: np.ndarray) -> int:
    """The size of the window that the median event lies in: however many thin windows a log has, they hardly count."""
    falling = np.sort(counts)[::-1]
    return int(falling[np.searchsorted(np.cumsum(falling), falling.sum() / 2)])
