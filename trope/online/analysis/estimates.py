"""The fixed-horizon tests, by tea-tasting on aggregated statistics: lift, interval, p-value, CUPED, Holm.

Tests are Welch's. The interval of the relative lift is that of the ratio of means by the delta method on its logarithm.
Ratio metrics use the delta method. Holm keeps the chance of any false win among all comparisons below alpha, whatever
the metrics' correlation; Benjamini and Hochberg would let a share of the wins be false, and one win ships a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import tea_tasting as tt
from tea_tasting.aggr import Aggregates
from tea_tasting.experiment import ExperimentResult

from trope.online.analysis.metrics import Metric
from trope.online.analysis.moments import Moments

Key = TypeVar("Key")
LEAST_USERS = 2
"""Fewest users of an arm that have a variance."""


@dataclass(frozen=True)
class Estimate:
    """One metric of one arm against control.

    control, treatment: the means (adjusted where CUPED was used). lift, low, high: relative, 0.01 is 1 %.
    p: two-sided. z: the difference over its standard error. log_se: standard error of log(treatment / control).
    reduction: the share of the variance that CUPED removed, None without CUPED. plain_lift, plain_p: without CUPED.
    """

    control: float
    treatment: float
    lift: float
    low: float
    high: float
    p: float
    z: float
    log_se: float
    reduction: float | None
    plain_lift: float
    plain_p: float

    @property
    def is_known(self) -> bool:
        """Whether there was anything to test: a metric that never moves has no error."""
        return math.isfinite(self.z) and math.isfinite(self.p)


def compare(metric: Metric, control: Moments, treatment: Moments, alpha: float, cuped: bool) -> Estimate:
    """The test of one metric. cuped: use the covariates from before the experiment where the metric has them."""
    if min(control.count, treatment.count) < LEAST_USERS:
        return _unknown()
    first, second = control.aggregates(), treatment.aggregates()
    if all(arm.var(metric.numer) == 0 for arm in (first, second)) or 0 in [
        arm.mean(metric.denom) for arm in (first, second)
    ]:
        return _unknown(*(_mean(arm, metric) for arm in (first, second)))
    plain = _test(metric, (), alpha).analyze_aggregates(first, second)
    covariates = metric.covariates if cuped and _varies(metric, control, treatment) else ()
    found = _test(metric, covariates, alpha).analyze_aggregates(first, second) if covariates else plain
    if not (math.isfinite(found.pvalue) and math.isfinite(found.statistic)):
        return _unknown(float(found.control), float(found.treatment))
    se, log_se = _errors(metric, covariates, first, second)
    reduction = 1 - (se / _errors(metric, (), first, second)[0]) ** 2 if covariates else None
    return Estimate(
        float(found.control),
        float(found.treatment),
        float(found.rel_effect_size),
        float(found.rel_effect_size_ci_lower),
        float(found.rel_effect_size_ci_upper),
        float(found.pvalue),
        float(found.statistic),
        log_se,
        reduction,
        float(plain.rel_effect_size),
        float(plain.pvalue),
    )


def holm(p_values: Mapping[Key, float], alpha: float) -> dict[Key, float]:
    """Adjusted p-values by Holm's step-down procedure. A test without a p-value counts as one with p = 1."""
    known = {str(place): 1.0 if math.isnan(p) else p for place, p in enumerate(p_values.values())}
    results = ExperimentResult({name: {"pvalue": p} for name, p in known.items()})
    adjusted = tt.adjust_fwer(results, alpha=alpha, arbitrary_dependence=True, method="bonferroni").to_dicts()
    found = {str(row["metric"]): float(str(row["pvalue_adj"])) for row in adjusted}
    return {key: min(1.0, found[str(place)]) for place, key in enumerate(p_values)}


def _test(metric: Metric, covariates: tuple[str, ...], alpha: float, use_t: bool = True) -> tt.RatioOfMeans:
    pre = (*covariates, None, None)[:2]
    return tt.RatioOfMeans(
        metric.numer, metric.denom, pre[0], pre[1], confidence_level=1 - alpha, equal_var=False, use_t=use_t
    )


def _errors(metric: Metric, covariates: tuple[str, ...], first: Aggregates, second: Aggregates) -> tuple[float, float]:
    """Standard errors of the difference and of the log ratio: half the intervals of plus and minus one of them."""
    one = math.erf(1 / math.sqrt(2))
    found = _test(metric, covariates, 1 - one, use_t=False).analyze_aggregates(first, second)
    se = float(found.effect_size_ci_upper - found.effect_size_ci_lower) / 2
    low, high = 1 + float(found.rel_effect_size_ci_lower), 1 + float(found.rel_effect_size_ci_upper)
    return se, math.log(high / low) / 2 if 0 < low < math.inf else math.nan


def _mean(arm: Aggregates, metric: Metric) -> float:
    bottom = arm.mean(metric.denom)
    return float(arm.mean(metric.numer) / bottom) if bottom else math.nan


def _varies(metric: Metric, *arms: Moments) -> bool:
    """Whether every covariate of the metric varies between users: a constant predicts nothing."""
    for name in metric.covariates:
        if all(arm.aggregates().var(name) == 0 for arm in arms):
            return False
    return bool(metric.covariates)


def _unknown(control: float = math.nan, treatment: float = math.nan) -> Estimate:
    lost = math.nan
    return Estimate(control, treatment, lost, lost, lost, lost, lost, lost, None, lost, lost)
