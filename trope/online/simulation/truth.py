"""The true effect: everybody in one arm against everybody in the other, the same visitors with the same luck."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from trope.online.simulation.answers import InProcess
from trope.online.simulation.loop import Outcome, simulate
from trope.online.simulation.population import Floats, Population
from trope.online.simulation.traffic import Traffic

METRICS = ("conversion", "orders", "revenue")
"""Means per visitor, named as the analysis names them."""
FIRST_SEED = 1_000_000
"""Experiments have smaller seeds, so that no experiment is part of its own truth."""


class Effect(NamedTuple):
    """Relative lift of a metric, 0.01 is 1 %, and its standard error; means of both arms."""

    lift: float
    error: float
    control: float
    treatment: float


def per_visitor(population: Population, traffic: Traffic, outcome: Outcome) -> Floats:
    """`METRICS` of an outcome: means over everybody who came at least once."""
    came = np.unique(traffic.user)
    bought = outcome.place >= 0
    converted = len(np.unique(traffic.user[bought]))
    return np.array([converted, bought.sum(), outcome.revenue(population.prices).sum()]) / len(came)


def true_effects(
    population: Population,
    days: int,
    control: InProcess,
    treatment: InProcess,
    seeds: int,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Effect]:
    """The effect on each metric over `seeds` repetitions. tell: called with the number that are done."""
    if seeds < 2:
        raise ValueError(f"the true effect needs at least 2 repetitions, to know its error; got {seeds}")
    means = np.empty((seeds, 2, len(METRICS)))
    for number in range(seeds):
        traffic = Traffic.of(population, days, FIRST_SEED + number)
        for side, arm in enumerate((control, treatment)):
            arm.reset()
            means[number, side] = per_visitor(population, traffic, simulate(population, traffic, arm, arm.k))
        tell(number + 1)
    return {name: _effect(means[:, 0, place], means[:, 1, place]) for place, name in enumerate(METRICS)}


def _effect(control: Floats, treatment: Floats) -> Effect:
    """The ratio of two means over pairs, and its error by the delta method."""
    if not control.mean():  # nothing was bought
        return Effect(math.nan, math.nan, 0.0, float(treatment.mean()))
    ratio = treatment.mean() / control.mean()
    error = (treatment - ratio * control).std(ddof=1) / math.sqrt(len(control)) / control.mean()
    return Effect(ratio - 1.0, float(error), float(control.mean()), float(treatment.mean()))


def holds(low: float, high: float, effect: Effect) -> bool:
    """Whether an interval holds a true lift."""
    return low <= effect.lift <= high


def share(found: Iterable[bool]) -> float:
    """The share of true values."""
    values = list(found)
    return sum(values) / len(values)
