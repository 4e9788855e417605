"""Group sequential tests: bounds for looks at known moments, by alpha spending (Lan and DeMets 1983).

The test may stop at look k when |Z_k| reaches bound c_k. A spending function says how much of alpha may be used up by
each look; the bounds follow from it by numerical integration over the joint distribution of Z_1 .. Z_k (Armitage,
McPherson and Rowe 1969), with no tables. Two-sided tests spend half of alpha on each side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import optimize, special

SPENDING = ("obrien-fleming", "pocock")
# Beyond 8 standard deviations there is less than 1e-15 of a normal distribution, the precision of the integrals.
_FAR = 8.0
# Gauss-Legendre nodes for each standard deviation of a step; 2 already give 13 digits of a bound.
_NODES_PER_SD = 3
_LEAST_NODES, _MOST_NODES = 48, 2_000
# Larger rules are panels of this many nodes: NumPy takes seconds for one rule of 1,000.
_PANEL = 128


def spent(kind: str, fraction: float, alpha: float) -> float:
    """The part of alpha (two-sided) that may be used up at a fraction of the experiment.

    `obrien-fleming` spends almost nothing early, so its last bound is near that of a single test. `pocock` spends
    almost evenly and stops earlier.
    """
    if kind not in SPENDING:
        raise ValueError(f"unknown spending {kind!r}; choose one of {', '.join(SPENDING)}")
    if fraction >= 1:
        return alpha
    if kind == "pocock":
        return alpha * math.log(1 + (math.e - 1) * fraction)
    return float(4 * special.ndtr(special.ndtri(alpha / 4) / math.sqrt(fraction)))


def bounds(information: Sequence[float], fractions: Sequence[float], alpha: float, kind: str) -> list[float]:
    """The bound of |Z| at each look; infinity where alpha allows none.

    information: 1 / variance of the estimate at each look, rising; only ratios matter.
    fractions: share of the experiment that is over at each look, from 0 to 1; the last look so far need not be 1.
    """
    walk = _Walk()
    found, used = [], 0.0
    for level, fraction in zip(information, fractions, strict=True):
        due = spent(kind, min(1.0, fraction), alpha)
        bound = walk.bound(level, due - used)
        walk.step(level, bound)
        used = due
        found.append(bound)
    return found


def stopping(information: Sequence[float], limits: Sequence[float], drift: float = 0.0) -> list[float]:
    """The probability to stop first at each look, on either side.

    drift: the mean of Z at information 1; 0 under the null hypothesis.
    """
    walk, found = _Walk(drift), []
    for level, limit in zip(information, limits, strict=True):
        found.append(walk.exit(level, limit))
        walk.step(level, limit)
    return found


def inflation(fractions: Sequence[float], alpha: float, power: float, kind: str) -> float:
    """By how much a group sequential test's largest sample exceeds that of one fixed test of the same power."""
    limits = bounds(fractions, fractions, alpha, kind)
    single = special.ndtri(1 - alpha / 2) + special.ndtri(power)
    drift = optimize.brentq(lambda drift: sum(stopping(fractions, limits, drift)) - power, single / 2, 2 * single)
    fixed = optimize.brentq(
        lambda drift: sum(stopping([1.0], [special.ndtri(1 - alpha / 2)], drift)) - power, single / 2, 2 * single
    )
    return float((drift / fixed) ** 2)


def repeated_p(
    z: Sequence[float], information: Sequence[float], fractions: Sequence[float], kind: str, tolerance: float = 1e-4
) -> float:
    """The smallest alpha at which the test would have stopped at one of the looks so far."""

    def stops(alpha: float) -> bool:
        limits = bounds(information, fractions, alpha, kind)
        return any(abs(value) >= limit for value, limit in zip(z, limits, strict=True))

    low, high = math.log(1e-12), 0.0
    if not stops(1 - 1e-9):
        return 1.0
    if stops(math.exp(low)):
        return math.exp(low)
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if stops(math.exp(middle)) else (middle, high)
    return math.exp(high)


@lru_cache
def _rule(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, rising, and weights of Gauss and Legendre with 16 times `count` nodes or, in panels, a few more."""
    if 16 * count <= _PANEL:
        return np.polynomial.legendre.leggauss(16 * count)
    panels = -(-16 * count // _PANEL)
    nodes, weights = np.polynomial.legendre.leggauss(_PANEL)
    centres = (2 * np.arange(panels) + 1) / panels - 1
    return (centres[:, None] + nodes / panels).ravel(), np.tile(weights / panels, panels)


class _Walk:
    """The density of the score S = Z sqrt(information) among those walks that have not stopped, at nodes.

    drift: the mean of Z at information 1.
    """

    def __init__(self, drift: float = 0.0) -> None:
        self._drift = drift
        self._level = 0.0
        self._nodes = np.zeros(1)
        self._mass = np.ones(1)  # density times weight of each node; a walk begins at 0

    def exit(self, level: float, limit: float) -> float:
        """The probability to be outside of the limit at the next look."""
        if math.isinf(limit):
            return 0.0
        sd, mean, edge = self._next(level, limit)
        outside = special.ndtr((mean - edge) / sd) + special.ndtr((-mean - edge) / sd)
        return float(self._mass @ outside)

    def bound(self, level: float, due: float) -> float:
        """The limit that the next look exceeds with probability `due`."""
        if due <= 1e-15 or self.exit(level, _FAR) >= due:
            return math.inf
        if self.exit(level, 1e-9) <= due:
            return 0.0
        return float(optimize.brentq(lambda limit: self.exit(level, limit) - due, 1e-9, _FAR, xtol=1e-13))

    def step(self, level: float, limit: float) -> None:
        """Go to the next look, and drop the walks that stop there."""
        edge = min(limit, _FAR + abs(self._drift) * math.sqrt(level)) * math.sqrt(level)
        sd, mean, _ = self._next(level, 0.0)
        places, weights = _rule(int(min(_MOST_NODES, max(_LEAST_NODES, _NODES_PER_SD * 2 * edge / sd))) // 16 + 1)
        nodes = edge * places
        density = np.empty(len(nodes))
        for first in range(0, len(nodes), _PANEL):
            part = nodes[first : first + _PANEL]
            # Where steps are short, most nodes are too far away to matter.
            near = slice(*np.searchsorted(mean, (part[0] - (_FAR + 1) * sd, part[-1] + (_FAR + 1) * sd)))
            kernel = np.exp(-0.5 * ((part[:, None] - mean[near]) / sd) ** 2)
            density[first : first + _PANEL] = kernel @ self._mass[near]
        self._mass = edge * weights * density / (sd * math.sqrt(2 * math.pi))
        self._nodes, self._level = nodes, level

    def _next(self, level: float, limit: float) -> tuple[float, np.ndarray, float]:
        """Standard deviation of the step, mean of each node after it, and the limit as a score."""
        sd = math.sqrt(level - self._level)
        return sd, self._nodes + self._drift * (level - self._level), limit * math.sqrt(level)
