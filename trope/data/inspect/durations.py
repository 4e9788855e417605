"""Histograms of durations: bins on a logarithmic scale, summed by unit (seconds, minutes, … years)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trope.times import DAY, HOUR, MINUTE, MONTH, WEEK, YEAR

UNITS = ("same second", "seconds", "minutes", "hours", "days", "weeks", "months", "years")
UNIT_EDGES = (1, MINUTE, HOUR, DAY, WEEK, MONTH, YEAR, 100 * YEAR)
"""Where each unit after the first begins, in seconds, and an end to the last."""
_STEPS = 6

EDGES: NDArray[np.int64] = np.array(
    sorted({round(edge) for low, high in pairwise(UNIT_EDGES) for edge in np.geomspace(low, high, _STEPS + 1)})
)
"""Inner edges of the fine bins in seconds: six geometric steps from one unit to the next; below 1 is bin 0."""


def count_durations(seconds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of durations in each of the len(EDGES) + 1 fine bins."""
    return np.bincount(np.searchsorted(EDGES, seconds, side="right"), minlength=len(EDGES) + 1)


def by_unit(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return the fine counts summed by unit."""
    lower = np.concatenate([[0], EDGES])
    unit = np.minimum(np.searchsorted(UNIT_EDGES, lower, side="right"), len(UNITS) - 1)
    return {name: int(counts[unit == index].sum()) for index, name in enumerate(UNITS)}


def median(counts: NDArray[np.int64]) -> float:
    """Return the median duration in seconds, interpolated geometrically inside its bin; NaN if there is none."""
    total = counts.sum()
    if total == 0:
        return float("nan")
    reached = np.cumsum(counts)
    at = int(np.searchsorted(reached, total / 2))
    if at == 0:
        return 0.0
    low, high = EDGES[at - 1], EDGES[min(at, len(EDGES) - 1)]
    inside = (total / 2 - reached[at - 1]) / counts[at]
    return float(low * (high / low) ** inside)
