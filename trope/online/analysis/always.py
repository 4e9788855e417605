"""Asymptotic confidence sequences, for those who look whenever they like and know no end.

The interval holds at all looks at once (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, Robbins' normal mixture).
Its price is width: about 1.4 times a single test's where it is tightest, more elsewhere. Like every test here it leans
on the central limit theorem, so looks with few users are skipped (`looks.LEAST_TO_LOOK`).
"""

from __future__ import annotations

import math

TIGHTEST = 14.0
"""The information, in units of the first look's, at which the sequence is tightest: two weeks of daily looks."""


def _rho2(alpha: float) -> float:
    """The mixture's variance that minimises the width at information TIGHTEST (their equation 10, approximately)."""
    return (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / TIGHTEST


def limit(information: float, alpha: float) -> float:
    """The bound of |Z| at a look. information: relative to that of the first look."""
    grown = information * _rho2(alpha)
    return math.sqrt((1 + 1 / grown) * (math.log(grown + 1) - 2 * math.log(alpha)))


def p_value(z: float, information: float, alpha: float) -> float:
    """The smallest level at which |z| reaches the bound at this look. alpha: the level the sequence is tuned for."""
    grown = information * _rho2(alpha)
    return min(1.0, math.exp(0.5 * math.log(grown + 1) - 0.5 * z * z / (1 + 1 / grown)))
