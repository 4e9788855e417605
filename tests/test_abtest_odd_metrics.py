"""Metrics without a variance, without a relative lift, or with an arm that buys nothing: no crash, nothing missed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from abtest_logs import DAY, START, Logs, experiment
from scipy import stats

from trope.data.sources.resolve import Request
from trope.online.analysis.analyse import Analysis, Question, analyse
from trope.online.analysis.estimates import compare
from trope.online.analysis.looks import Plan
from trope.online.analysis.metrics import metric
from trope.online.analysis.moments import Moments
from trope.online.analysis.plan import Design, forecast
from trope.online.analysis.verdict import judge

PLANS = [Plan(), Plan(looks=2, horizon=4), Plan(always=True)]


def run(folder: Path, logs: Logs, **question: object) -> Analysis:
    exposures, outcomes = logs.write(folder)
    return analyse(exposures, Request(str(outcomes)), Question(**question), threads=1)  # type: ignore[arg-type]


def arm_of(logs: Logs) -> dict[str, str]:
    return {user: arm for user, arm, _, _ in logs.exposures}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind)
@pytest.mark.parametrize("buyers", ["control", "trope"])
def test_an_arm_in_which_nobody_buys_is_noticed(buyers: str, plan: Plan, tmp_path: Path) -> None:
    logs = experiment(users=800)
    arms = arm_of(logs)
    logs.outcomes = [row for row in logs.outcomes if row[2] < START or arms[row[0]] == buyers]
    found = run(tmp_path, logs, metrics="conversion,revenue", plan=plan, cuped=False)
    verdict = judge(found)
    if buyers == "control":
        assert verdict.said.startswith("No winner: trope is worse than control: CVR -100.00 %")
    else:
        assert verdict.winners == ["trope"] and "trope beats control: CVR from 0 to 0." in verdict.said
    reading = found.of("revenue").reading
    assert abs(reading.estimate.z) > 5 and reading.p < 1e-4 and math.isnan(reading.low) and math.isnan(reading.high)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind)
@pytest.mark.parametrize("seed", [5, 6])
def test_a_ratio_that_never_changes_is_not_known(seed: int, plan: Plan, tmp_path: Path) -> None:
    """One price for everything: rounding alone makes revenue / item vary."""
    logs = experiment(users=400, seed=seed)
    logs.outcomes = [(user, item, time, 9.99) for user, item, time, _ in logs.outcomes]
    found = run(tmp_path, logs, metrics="revenue/items,revenue", plan=plan)
    assert not found.of("revenue/items").reading.estimate.is_known and found.of("revenue").reading.estimate.is_known
    assert found.of("revenue/items").reading.estimate.control == pytest.approx(9.99)
    assert judge(found).winners == []


def test_a_covariate_that_is_a_copy_is_not_used() -> None:
    """What users do is what they did before: CUPED would leave rounding alone."""
    values = np.random.default_rng(0).gamma(2, 3.3, (2, 50))
    arms = []
    for x in values:
        products = dict.fromkeys([("pre_revenue", "pre_revenue"), ("pre_revenue", "revenue"), ("revenue", "revenue")])
        sums = {"revenue": float(x.sum()), "pre_revenue": float(x.sum())}
        arms.append(Moments(50, sums, dict.fromkeys(products, float((x * x).sum()))))
    found = compare(metric("revenue"), arms[0], arms[1], 0.05, cuped=True)
    assert found.reduction is None and found.p == pytest.approx(stats.ttest_ind(*values, equal_var=False).pvalue)


@pytest.mark.parametrize("mean", [1e-15, -1e-15, 1e-30])
def test_a_mean_next_to_zero_has_a_p_value_and_no_lift(mean: float) -> None:
    """Refunds that end all sales of a day: no float holds the relative interval."""
    random = np.random.default_rng(0)
    one, other = random.normal(0, 9, 200), random.normal(2, 9, 200)
    one += mean - one.mean()
    arms = [Moments(200, {"revenue": 200 * m}, {("revenue", "revenue"): float((x * x).sum())})
            for m, x in ((mean, one), (other.mean(), other))]  # fmt: skip
    found = compare(metric("revenue"), *arms, 0.05, cuped=False)
    expected = stats.ttest_ind(other, one, equal_var=False)
    assert (found.p, found.z) == pytest.approx((expected.pvalue, expected.statistic), rel=1e-6)
    assert found.se == pytest.approx((other.mean() - mean) / expected.statistic, rel=1e-6)
    assert all(math.isnan(each) for each in (found.lift, found.low, found.high, found.log_se))


def test_a_plan_with_a_ratio_that_never_changes_is_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    count = 2_000
    columns = {
        "user_id": random.integers(0, 300, count),
        "item_id": random.integers(0, 9, count),
        "timestamp": START + random.integers(0, 12 * DAY, count),
        "revenue": np.full(count, 9.99),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    for name in ("revenue/items", "items/orders"):
        if name == "items/orders":  # every second is another: an order is an item
            columns["timestamp"] = START + np.sort(random.choice(12 * DAY, count, replace=False))
            pq.write_table(pa.table(columns), tmp_path / "log.parquet")
        with pytest.raises(ValueError, match=f"{name} is .* for every user, so nothing can change"):
            forecast(Request(str(tmp_path / "log.parquet")), Design(name, 0.1))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind)
def test_a_loss_has_no_relative_lift(plan: Plan, tmp_path: Path) -> None:
    """Control loses money and the treatment earns some: the means are said, and z and p are Welch's."""
    logs = experiment(users=600)
    arms = arm_of(logs)
    logs.outcomes = [
        (user, item, time, paid if arms[user] == "trope" else -paid) for user, item, time, paid in logs.outcomes
    ]
    found = run(tmp_path, logs, metrics="revenue", plan=plan, cuped=False)
    estimate = found.of("revenue").reading.estimate
    assert math.isnan(estimate.lift) and math.isnan(estimate.low) and math.isnan(estimate.high)
    test = stats.ttest_ind(logs.column("revenue", "trope"), logs.column("revenue", "control"), equal_var=False)
    assert (estimate.z, estimate.p) == pytest.approx((test.statistic, test.pvalue), rel=1e-9)
    assert judge(found).winners == ["trope"] and "Revenue from -" in judge(found).said
    # Both arms lose, the treatment more: no lift of +200 %, but a loser.
    logs.outcomes = [(u, i, t, -3 * paid if paid > 0 else paid) for u, i, t, paid in logs.outcomes]
    worse = judge(run(tmp_path, logs, metrics="revenue", plan=plan, cuped=False))
    assert worse.said.startswith("No winner: trope is worse than control: Revenue from -")


def test_the_look_that_decided_is_named(tmp_path: Path) -> None:
    """A lift of two days that turns: the verdict stands, and both lifts are said."""
    logs = experiment(users=3_000, days=8, lift=0.0)
    arms, rows = arm_of(logs), list(logs.outcomes)
    for user, item, time, paid in rows:
        if (START <= time < START + 2 * DAY and arms[user] == "trope") or (
            time > START + 3 * DAY and arms[user] == "control"
        ):
            logs.outcomes += [(user, item, time + 7 * number, paid) for number in (1, 2)]
    found = run(tmp_path, logs, metrics="orders", plan=Plan(looks=8, horizon=8), cuped=False)
    reading, verdict = found.of("orders").reading, judge(found)
    assert reading.decided is not None and reading.decided.lift > 0 > reading.estimate.lift and reading.rises
    assert verdict.said == (
        f"Winner: trope beats control: Orders {100 * reading.decided.lift:+.2f} % at the look after day "
        f"{reading.crossed + 1} (adjusted p < 0.001; now {100 * reading.estimate.lift:+.2f} %)."
    )
