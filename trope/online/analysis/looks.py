"""The lift after each day, and what may be concluded by those who looked more than once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trope.online.analysis import always, spending
from trope.online.analysis.estimates import Estimate, compare
from trope.online.analysis.metrics import Metric
from trope.online.analysis.moments import Moments, added

LEAST_TO_LOOK = 100
"""Fewest users of each arm at a look. Looks with fewer are skipped: the central limit theorem does not hold yet."""
# Information must rise from look to look; where heavy tails make it fall, it counts as this much more than before.
_LEAST_STEP = 1e-3


@dataclass(frozen=True)
class Plan:
    """How often one looks. looks, horizon: so many looks over so many days; always: at any time, with no end.

    spending: how alpha is spent over the looks (`spending.spent`).
    """

    looks: int | None = None
    horizon: int | None = None
    always: bool = False
    spending: str = spending.SPENDING[0]

    def __post_init__(self) -> None:
        if self.always and (self.looks or self.horizon):
            raise ValueError("--always needs no --looks and no --horizon: leave out one or the other")
        if (self.looks is None) != (self.horizon is None):
            raise ValueError("--looks K and --horizon DAYS go together; for looks without an end use --always")
        if self.looks is not None and self.horizon is not None and not 1 <= self.looks <= self.horizon:
            raise ValueError(f"--looks {self.looks} must be from 1 to --horizon {self.horizon} days: at most one a day")
        if self.spending not in spending.SPENDING:
            raise ValueError(f"unknown --spending {self.spending!r}; choose one of {', '.join(spending.SPENDING)}")

    @property
    def kind(self) -> str:
        return "always" if self.always else "fixed" if self.looks is None else "group-sequential"

    def days(self, last: int) -> list[int]:
        """The days, counted from 0, after which one looked, up to the last day that counts."""
        if self.looks is None or self.horizon is None:
            return list(range(last + 1)) if self.always else [last]
        planned = [math.ceil(look * self.horizon / self.looks) - 1 for look in range(1, self.looks + 1)]
        return [day for day in planned if day <= last]


@dataclass(frozen=True)
class Point:
    """The lift after a day. low, high: of the plan's interval; limit: of |z|, None for a single test."""

    day: int
    lift: float
    low: float
    high: float
    z: float
    limit: float | None


@dataclass(frozen=True)
class Reading:
    """What the plan allows to say now. estimate: after the last look; p, low, high: valid under the plan.

    crossed: the first look's day at which the bound was reached, None if none was. decided: the estimate of that look.
    few: looks that were skipped because an arm had fewer than LEAST_TO_LOOK users.
    """

    estimate: Estimate
    p: float
    low: float
    high: float
    points: list[Point]
    crossed: int | None
    decided: Estimate | None = None
    few: int = 0

    @property
    def rises(self) -> bool:
        """Whether the arm is above control, at the look that decided where there was one."""
        return (self.decided or self.estimate).z > 0


def cumulated(days: Mapping[tuple[int, int], Moments], arm: int, last: int) -> list[Moments]:
    """Moments of an arm after each of the days 0 .. last."""
    found, parts = [], [moments for (place, day), moments in days.items() if place == arm and day < 0]
    total = added(parts)
    for day in range(last + 1):
        new = [days[arm, day]] if (arm, day) in days else []
        total = added([part for part in (total, *new) if part.sums])
        found.append(total)
    return found


def read_plan(
    plan: Plan,
    metric: Metric,
    control: Sequence[Moments],
    treatment: Sequence[Moments],
    alpha: float,
    cuped: bool,
    over: int | None = None,
) -> Reading:
    """Apply the plan to one metric of one arm.

    control, treatment: moments after each day. over: the last day that is over, by default the last one; planned looks
    of later days are still to come.
    """
    last = len(control) - 1
    looks = plan.days(last if over is None or plan.kind != "group-sequential" else over)
    needed = {*looks, last} if plan.kind == "group-sequential" else range(last + 1)
    every = {day: compare(metric, control[day], treatment[day], alpha, cuped) for day in needed}
    if plan.kind == "fixed":
        now = every[last]
        points = [Point(day, each.lift, each.low, each.high, each.z, None) for day, each in every.items()]
        return Reading(now, now.p, now.low, now.high, points, None)
    enough = [day for day in looks if min(control[day].count, treatment[day].count) >= LEAST_TO_LOOK]
    few = len(looks) - len(enough)
    looks = [day for day in enough if every[day].is_known]
    if not looks:
        return Reading(every[last], 1.0, math.nan, math.nan, [], None, None, few)
    seen = [every[day] for day in looks]
    information = _rising(_information(seen))
    if plan.always:
        limits = [always.limit(level / information[0], alpha) for level in information]
        p = min(
            always.p_value(each.z, level / information[0], alpha) for each, level in zip(seen, information, strict=True)
        )
    else:
        assert plan.horizon is not None
        fractions = [min(1.0, (day + 1) / plan.horizon) for day in looks]
        limits = spending.bounds(information, fractions, alpha, plan.spending)
        p = spending.repeated_p([each.z for each in seen], information, fractions, plan.spending)
    points = [_point(day, each, limit) for day, each, limit in zip(looks, seen, limits, strict=True)]
    crossed = next((point.day for point in points if abs(point.z) >= (point.limit or 0)), None)
    decided = None if crossed is None else every[crossed]
    return Reading(seen[-1], p, points[-1].low, points[-1].high, points, crossed, decided, few)


def _point(day: int, estimate: Estimate, limit: float) -> Point:
    if math.isnan(estimate.log_se):
        return Point(day, estimate.lift, math.nan, math.nan, estimate.z, limit)
    half = limit * estimate.log_se
    ratio = 1 + estimate.lift
    high = ratio * math.exp(half) - 1 if half < 700 else math.inf
    return Point(day, estimate.lift, ratio * math.exp(-half) - 1, high, estimate.z, limit)


def _information(seen: Sequence[Estimate]) -> list[float]:
    """1 / variance of the relative lift at each look; of the difference where the lift means nothing.

    Relative, because a mean per user grows from day to day, and with it the error of the difference.
    """
    if all(math.isfinite(each.log_se) for each in seen):
        return [1 / each.log_se**2 for each in seen]
    # An arm in which nobody buys has no logarithm, but its z is as good as any other.
    means = [(each.control + each.treatment) / 2 for each in seen]
    scales = means if min(means) > 0 else [1.0] * len(seen)
    return [(scale / each.se) ** 2 for scale, each in zip(scales, seen, strict=True)]


def _rising(levels: Sequence[float]) -> list[float]:
    found: list[float] = []
    for level in levels:
        found.append(max(level, found[-1] * (1 + _LEAST_STEP)) if found else level)
    return found
