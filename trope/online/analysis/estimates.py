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
from tea_tasting.metrics.mean import MeanResult

from trope.online.analysis.metrics import Metric
from trope.online.analysis.moments import Moments

Key = TypeVar("Key")
LEAST_USERS = 2
"""Fewest users of an arm that have a variance."""
# Below this share of its mean square, a variance is what rounding leaves of zero.
_STILL = 1e-12
# A covariate that leaves less than this share of the variance is a copy of the metric.
_COPY = 1e-9
# Of a confidence interval without width: one half and half of this is one half.
_NO_WIDTH = 2.0**-60


@dataclass(frozen=True)
class Estimate:
    """One metric of one arm against control.

    control, treatment: the means (adjusted where CUPED was used). lift, low, high: relative, 0.01 is 1 %; NaN where a
    mean is negative or control's is zero. p: two-sided. z: the difference over its standard error. se: that error.
    log_se: standard error of log(treatment / control), NaN where a mean is not above zero.
    reduction: the share of the variance that CUPED removed, None without CUPED. plain_lift, plain_p: without CUPED.
    """

    control: float
    treatment: float
    lift: float
    low: float
    high: float
    p: float
    z: float
    se: float
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
    still = not any(varies(arm, metric.numer, metric.denom) for arm in (first, second))
    if still or any(arm.mean(metric.denom) == 0 for arm in (first, second)):
        return _unknown(*(_mean(arm, metric) for arm in (first, second)))
    plain = _tested(metric, (), 1 - alpha, first, second)
    covariates = metric.covariates if cuped and predicts(first + second, metric) else ()
    found = _tested(metric, covariates, 1 - alpha, first, second) if covariates else plain
    if not (math.isfinite(found.pvalue) and math.isfinite(found.statistic)):
        return _unknown(float(found.control), float(found.treatment))
    se, log_se = _errors(metric, covariates, first, second)
    reduction = 1 - (se / _errors(metric, (), first, second)[0]) ** 2 if covariates else None
    has_interval = found.control > 0 and found.treatment > 0 and math.isfinite(found.rel_effect_size_ci_upper)
    return Estimate(
        float(found.control),
        float(found.treatment),
        _lift(found),
        float(found.rel_effect_size_ci_lower) if has_interval else math.nan,
        float(found.rel_effect_size_ci_upper) if has_interval else math.nan,
        float(found.pvalue),
        float(found.statistic),
        se,
        log_se if has_interval else math.nan,
        reduction,
        _lift(plain),
        float(plain.pvalue),
    )


def varies(arm: Aggregates, numer: str, denom: str | None = None) -> bool:
    """Whether a mean, or a ratio of two sums, varies between users by more than rounding (delta method)."""
    top, bottom = arm.mean(numer), arm.mean(denom)
    if bottom == 0:
        return False
    ratio = top / bottom
    size = arm.var(numer) + top**2 + (0 if denom is None else ratio**2 * (arm.var(denom) + bottom**2))
    return bool(arm.ratio_var(numer, denom) * bottom**2 > _STILL * size)


def predicts(users: Aggregates, metric: Metric) -> bool:
    """Whether CUPED can use the metric's covariates. A constant predicts nothing, and a copy would leave no error."""
    if not metric.covariates:
        return False
    numer, denom = (*metric.covariates, None)[:2]
    assert numer is not None
    if not varies(users, numer, denom):
        return False
    explained = users.ratio_cov(metric.numer, metric.denom, numer, denom) ** 2 / users.ratio_var(numer, denom)
    return bool(users.ratio_var(metric.numer, metric.denom) > explained * (1 + _COPY))


def holm(p_values: Mapping[Key, float], alpha: float) -> dict[Key, float]:
    """Adjusted p-values by Holm's step-down procedure. A test without a p-value counts as one with p = 1."""
    known = {str(place): 1.0 if math.isnan(p) else p for place, p in enumerate(p_values.values())}
    results = ExperimentResult({name: {"pvalue": p} for name, p in known.items()})
    adjusted = tt.adjust_fwer(results, alpha=alpha, arbitrary_dependence=True, method="bonferroni").to_dicts()
    found = {str(row["metric"]): float(str(row["pvalue_adj"])) for row in adjusted}
    return {key: min(1.0, found[str(place)]) for place, key in enumerate(p_values)}


def _tested(
    metric: Metric,
    covariates: tuple[str, ...],
    confidence: float,
    first: Aggregates,
    second: Aggregates,
    use_t: bool = True,
) -> MeanResult:
    """Welch's test. A relative interval that no float holds, since a mean is next to zero, is not a number."""
    pre = (*covariates, None, None)[:2]

    def test(level: float) -> MeanResult:
        kind = tt.RatioOfMeans(
            metric.numer, metric.denom, pre[0], pre[1], confidence_level=level, equal_var=False, use_t=use_t
        )
        return kind.analyze_aggregates(first, second)

    try:
        return test(confidence)
    except OverflowError:
        lost = ("rel_effect_size", "rel_effect_size_ci_lower", "rel_effect_size_ci_upper")
        return test(_NO_WIDTH)._replace(**dict.fromkeys(lost, math.nan))


def _errors(metric: Metric, covariates: tuple[str, ...], first: Aggregates, second: Aggregates) -> tuple[float, float]:
    """Standard errors of the difference and of the log ratio: half the intervals of plus and minus one of them."""
    one = math.erf(1 / math.sqrt(2))
    found = _tested(metric, covariates, one, first, second, use_t=False)
    if math.isnan(found.rel_effect_size):
        return float(found.effect_size / found.statistic) if found.statistic else math.nan, math.nan
    se = float(found.effect_size_ci_upper - found.effect_size_ci_lower) / 2
    low, high = 1 + float(found.rel_effect_size_ci_lower), 1 + float(found.rel_effect_size_ci_upper)
    return se, math.log(high / low) / 2 if 0 < low < math.inf else math.nan


def _mean(arm: Aggregates, metric: Metric) -> float:
    bottom = arm.mean(metric.denom)
    return float(arm.mean(metric.numer) / bottom) if bottom else math.nan


def _lift(found: MeanResult) -> float:
    """The relative lift. A ratio to zero or to a loss says nothing, and neither does the ratio of a loss."""
    return float(found.rel_effect_size) if found.control > 0 and found.treatment >= 0 else math.nan


def _unknown(control: float = math.nan, treatment: float = math.nan) -> Estimate:
    lost = math.nan
    return Estimate(control, treatment, lost, lost, lost, lost, lost, lost, lost, None, lost, lost)
