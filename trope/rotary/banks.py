"""Banks of time constants beta, one per plane: geometric as in the paper, or harmonics of the calendar.

Shape letters: P planes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trope.times import DAY, WEEK, YEAR


def frequency_bank(planes: int, beta_min: float = 1e2, beta_max: float = 1e8) -> Tensor:
    """Base time constants beta_d in seconds, geometric from beta_min to beta_max, float64 [P] (eq. geomspace)."""
    if planes < 1 or not 0 < beta_min <= beta_max:
        raise ValueError(
            f"a bank needs at least one plane and 0 < beta_min <= beta_max, got {planes} planes, beta_min {beta_min:g} "
            f"and beta_max {beta_max:g}"
        )
    return torch.logspace(math.log10(beta_min), math.log10(beta_max), planes, dtype=torch.float64)


def calendar_bank(planes: int) -> Tensor:
    """beta of calendar harmonics, float64 [P]: year, week, day, year/2, week/2, day/2, ... each period once."""
    periods: list[float] = []
    harmonic = 0
    while len(periods) < planes:
        harmonic += 1
        for period in (YEAR / harmonic, WEEK / harmonic, DAY / harmonic):
            if not any(math.isclose(period, known) for known in periods):  # week/7 is the day
                periods.append(period)
    return torch.tensor(periods[:planes], dtype=torch.float64) / (2 * math.pi)
