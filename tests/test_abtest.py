"""The analysis of an experiment equals SciPy's tests and textbook formulas on the users themselves, to 1e-9."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path
from time import time as now

import numpy as np
import pytest
from abtest_logs import DAY, SHARES, START, Logs, experiment, write_outcomes, write_record
from scipy import stats

from trope.data.sources.resolve import Request
from trope.online.analysis.analyse import Analysis, Question, analyse
from trope.online.analysis.estimates import holm
from trope.online.analysis.looks import LEAST_TO_LOOK, Plan
from trope.online.analysis.moments import Moments, added, pairs

CLOSE = 1e-9
ALL = "conversion,orders,items,revenue,orders/exposures,revenue/orders"
COLUMN = {"conversion": "converted", "orders": "orders", "items": "items", "revenue": "revenue"}


@pytest.fixture(scope="module")
def logs() -> Logs:
    logs = experiment()
    logs.exposures += [("u0", "trope", START + 5, True), ("tester", "trope", START + 9, True)]  # by hand: left out
    logs.outcomes += [("stranger", "i1", START + 99, 5.0)] * 3
    return logs


@pytest.fixture(scope="module")
def found(logs: Logs, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return run(logs, tmp_path_factory.mktemp("fixed"), Question(metrics=ALL))


@pytest.fixture(scope="module")
def plain(logs: Logs, tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return run(logs, tmp_path_factory.mktemp("plain"), Question(metrics=ALL, cuped=False))


def run(logs: Logs, folder: Path, question: Question | None = None) -> Analysis:
    exposures, outcomes = logs.write(folder)
    return analyse(exposures, Request(str(outcomes)), question, threads=1)


def welch(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float, float]:
    """Lift, low, high and p of SciPy's Welch test and of the delta method on the log of the ratio of means."""
    test = stats.ttest_ind(other, one, equal_var=False)
    return log_interval(one.mean(), one.var(ddof=1), len(one), other.mean(), other.var(ddof=1), len(other), test.pvalue)


def log_interval(
    mean: float, var: float, n: int, mean2: float, var2: float, n2: int, p: float
) -> tuple[float, float, float, float]:
    parts = var / mean**2 / n, var2 / mean2**2 / n2
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (n2 - 1))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    ratio = mean2 / mean
    return ratio - 1, ratio * math.exp(-half) - 1, ratio * math.exp(half) - 1, p


def readings(analysis: Analysis, metric: str) -> tuple[float, float, float, float]:
    reading = analysis.of(metric).reading
    return reading.estimate.lift, reading.low, reading.high, reading.p


@pytest.mark.parametrize("metric", list(COLUMN))
def test_means_are_scipys_welch_test(metric: str, plain: Analysis, logs: Logs) -> None:
    arms = [logs.column(COLUMN[metric], arm) for arm in ("control", "trope")]
    assert readings(plain, metric) == pytest.approx(welch(*arms), rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("metric", list(COLUMN))
def test_cuped_is_the_textbook_adjustment(metric: str, found: Analysis, plain: Analysis, logs: Logs) -> None:
    y = [logs.column(COLUMN[metric], arm) for arm in ("control", "trope")]
    x = [logs.column(f"pre_{COLUMN[metric]}", arm) for arm in ("control", "trope")]
    theta = np.cov(np.concatenate(y), np.concatenate(x))[0, 1] / np.concatenate(x).var(ddof=1)
    mean = np.concatenate(x).mean()
    adjusted = [y[arm] - theta * (x[arm] - mean) for arm in (0, 1)]
    assert readings(found, metric) == pytest.approx(welch(*adjusted), rel=CLOSE, abs=CLOSE)
    spread, before = (sum(each.var(ddof=1) / len(each) for each in both) for both in (adjusted, y))
    assert found.of(metric).reading.estimate.reduction == pytest.approx(1 - spread / before, rel=1e-6)
    assert found.of(metric).reading.estimate.plain_p == pytest.approx(plain.of(metric).reading.p, rel=CLOSE)


@pytest.mark.parametrize("metric", ["orders/exposures", "revenue/orders"])
def test_ratios_follow_the_delta_method(metric: str, plain: Analysis, logs: Logs) -> None:
    top, bottom = metric.split("/")
    ratios, variances, counts = [], [], []
    for arm in ("control", "trope"):
        a, b = logs.column(top, arm), logs.column(bottom, arm)
        ratio = a.mean() / b.mean()
        variances.append((a - ratio * b).var(ddof=1) / b.mean() ** 2)  # of the linearised ratio
        ratios.append(ratio)
        counts.append(len(a))
    parts = [variance / count for variance, count in zip(variances, counts, strict=True)]
    freedom = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    p = 2 * stats.t.sf(abs(ratios[1] - ratios[0]) / math.sqrt(sum(parts)), freedom)
    expected = log_interval(ratios[0], variances[0], counts[0], ratios[1], variances[1], counts[1], p)
    assert readings(plain, metric) == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_a_metric_per_exposure_has_no_cuped(found: Analysis) -> None:
    assert found.of("orders/exposures").reading.estimate.reduction is None
    assert found.of("revenue/orders").reading.estimate.reduction is not None


def test_what_is_left_out_is_counted(found: Analysis, logs: Logs) -> None:
    users = logs.per_user()
    early = sum(START <= time < users[user]["first"] for user, _, time, _ in logs.outcomes if user in users)
    assert (found.exposed.forced, found.outcomes.strangers, found.outcomes.early) == (2, 3, early)
    assert found.outcomes.used == sum(user["items"] for user in users.values())
    assert found.exposed.exposures == sum(user["exposures"] for user in users.values())
    assert sum(found.users.values()) == len(users) == 300


@pytest.mark.parametrize("day", [0, 1, 3])
def test_each_day_counts_what_was_known_then(day: int, logs: Logs, found: Analysis) -> None:
    until = START + (day + 1) * DAY
    for metric in ("conversion", "revenue"):
        point = found.of(metric).reading.points[day]
        y = [logs.column(COLUMN[metric], arm, until) for arm in ("control", "trope")]
        x = [logs.column(f"pre_{COLUMN[metric]}", arm, until) for arm in ("control", "trope")]
        theta = np.cov(np.concatenate(y), np.concatenate(x))[0, 1] / np.concatenate(x).var(ddof=1)
        adjusted = [y[arm] - theta * (x[arm] - np.concatenate(x).mean()) for arm in (0, 1)]
        assert (point.lift, point.low, point.high) == pytest.approx(welch(*adjusted)[:3], rel=CLOSE, abs=CLOSE)
    ratio = found.of("orders/exposures").reading.points[day]
    sums = [
        logs.column("orders", arm, until).sum() / logs.column("exposures", arm, until).sum()
        for arm in ("control", "trope")
    ]
    assert ratio.lift == pytest.approx(sums[1] / sums[0] - 1, rel=CLOSE)


def test_sequential_plans_use_the_same_estimates(logs: Logs, found: Analysis, tmp_path: Path) -> None:
    group = run(logs, tmp_path, Question(metrics="conversion,revenue", plan=Plan(looks=2, horizon=4)))
    always = run(logs, tmp_path, Question(metrics="conversion,revenue", plan=Plan(always=True)))
    known = [min(len(logs.column("items", arm, START + day * DAY)) for arm in SHARES) for day in (1, 2, 3, 4)]
    assert known[0] < LEAST_TO_LOOK <= known[1]
    for metric in ("conversion", "revenue"):
        reading = found.of(metric).reading
        assert [point.day for point in group.of(metric).reading.points] == [1, 3]
        assert [point.day for point in always.of(metric).reading.points] == [1, 2, 3]
        for other in (group, always):
            now = other.of(metric).reading
            assert now.estimate.lift == pytest.approx(reading.estimate.lift, rel=CLOSE)
            assert now.low < reading.low < reading.high < now.high
            half = now.points[-1].limit * now.estimate.log_se
            assert (now.low, now.high) == pytest.approx(
                [(1 + now.estimate.lift) * math.exp(s * half) - 1 for s in (-1, 1)]
            )


def test_an_outcome_later_than_now_is_left_out(logs: Logs, tmp_path: Path, found: Analysis) -> None:
    """Else one wrong clock makes the first look the last."""
    exposures, outcomes = logs.write(tmp_path)
    write_outcomes(outcomes, [*logs.outcomes, (logs.exposures[0][0], "a", int(now()) + DAY, 1.0)])
    again = analyse(exposures, Request(str(outcomes)), Question(metrics="revenue"), threads=1)
    assert again.outcomes.ahead == 1
    assert (again.last_day, again.over) == (found.last_day, found.over)
    assert readings(again, "revenue") == readings(found, "revenue")


def test_csv_parquet_and_json_lines_agree_and_a_basket_is_an_order(logs: Logs, tmp_path: Path, found: Analysis) -> None:
    exposures, _ = logs.write(tmp_path)
    file = tmp_path / "outcomes.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["who", "what", "when", "paid", "order"])
        writer.writerows([user, item, time, repr(paid), f"{user}-{time}"] for user, item, time, paid in logs.outcomes)
    request = Request(str(file), user_col="who", item_col="what", time_col="when", basket_col="order")
    again = analyse(exposures, request, Question(metrics="orders,revenue", revenue_col="paid"), threads=1)
    for metric in ("orders", "revenue"):
        assert readings(again, metric) == pytest.approx(readings(found, metric), rel=1e-12)
    lines = tmp_path / "outcomes.jsonl"
    names = ("user", "item", "timestamp", "revenue")
    lines.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in logs.outcomes))
    in_lines = analyse(exposures, Request(str(lines)), Question(metrics="revenue"), threads=1)  # the usual names
    assert readings(in_lines, "revenue") == pytest.approx(readings(found, "revenue"), rel=1e-12)
    whole = Request(str(file), user_col="who", item_col="what", time_col="when", basket_col="who")
    once = analyse(exposures, whole, Question(metrics="conversion", revenue_col="paid", cuped=False), threads=1)
    # One basket for each user: it begins before the experiment for most, who then buy nothing after it.
    assert once.outcomes.used < found.outcomes.used


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_an_order_is_a_second_in_every_unit(unit: str, logs: Logs, tmp_path: Path, found: Analysis) -> None:
    """The rows of an order a few milliseconds apart."""
    exposures, _ = logs.write(tmp_path)
    factor, seen = {"ms": 10**3, "us": 10**6}[unit], Counter[tuple[str, int]]()
    rows = []
    for user, item, time, paid in logs.outcomes:
        rows.append((user, item, time * factor + 7 * seen[user, time], paid))
        seen[user, time] += 1
    write_outcomes(tmp_path / "fine.parquet", rows)
    request = Request(str(tmp_path / "fine.parquet"), time_unit=unit)
    again = analyse(exposures, request, Question(metrics="orders,items"), threads=1)
    assert max(seen.values()) > 1
    for metric in ("orders", "items"):
        assert readings(again, metric) == readings(found, metric)


def test_outcomes_from_before_may_be_another_file(logs: Logs, tmp_path: Path, found: Analysis) -> None:
    parts = [Logs(logs.exposures, [row for row in logs.outcomes if (row[2] < START) == before]) for before in (0, 1)]
    exposures, outcomes = parts[0].write(tmp_path / "now")
    _, before = parts[1].write(tmp_path / "before")
    question = Question(metrics="revenue", pre=str(before))
    again = analyse(exposures, Request(str(outcomes)), question, threads=1)
    assert readings(again, "revenue") == pytest.approx(readings(found, "revenue"), rel=1e-12)
    without = analyse(exposures, Request(str(outcomes)), Question(metrics="revenue"), threads=1)
    assert not without.outcomes.has_pre and without.of("revenue").reading.estimate.reduction is None


def test_three_arms_are_each_compared_with_control(tmp_path: Path) -> None:
    logs = experiment(arms=("a", "control", "b"), users=200)
    found = run(logs, tmp_path, Question(metrics="revenue", cuped=False))
    assert [each.arm for each in found.comparisons] == ["a", "b"]
    for each in found.comparisons:
        expected = welch(logs.column("revenue", "control"), logs.column("revenue", each.arm))
        assert each.reading.p == pytest.approx(expected[3], rel=CLOSE)
    other = run(logs, tmp_path, Question(metrics="revenue", cuped=False, control="a"))
    assert [each.arm for each in other.comparisons] == ["control", "b"]


def test_control_is_the_arm_that_the_server_wrote(tmp_path: Path) -> None:
    logs = experiment(arms=("trope", "control"), users=200)
    old = run(logs, tmp_path, Question(metrics="revenue"))
    assert old.experiment.control == "control", "files without the entry"
    write_record(tmp_path / "exposures", logs.shares, control="trope")
    request = Request(str(tmp_path / "outcomes.parquet"))
    new = analyse(tmp_path / "exposures", request, Question(metrics="revenue"), threads=1)
    assert new.experiment.control == "trope" and new.experiment.treatments == ["control"]
    asked = analyse(tmp_path / "exposures", request, Question(metrics="revenue", control="control"), threads=1)
    assert asked.comparisons == old.comparisons
    write_record(tmp_path / "exposures", logs.shares, control="b")
    with pytest.raises(ValueError, match=r"control 'b' is no arm; there are trope, control"):
        analyse(tmp_path / "exposures", request, threads=1)


def test_segments_are_the_same_test_on_fewer_users(logs: Logs, tmp_path: Path) -> None:
    file = tmp_path / "segments.csv"
    file.write_text(
        "user_id,country\n" + "".join(f"u{number},{'PL' if number % 2 else 'DE'}\n" for number in range(280))
    )
    found = run(logs, tmp_path, Question(metrics="revenue", cuped=False, segments=file))
    assert [(row.value, row.users) for row in found.segments] == [("(none)", 20), ("DE", 140), ("PL", 140)]
    odd = Logs(
        [row for row in logs.exposures if row[0][1:].isdigit() and int(row[0][1:]) % 2 and int(row[0][1:]) < 280],
        logs.outcomes,
    )
    expected = welch(odd.column("revenue", "control"), odd.column("revenue", "trope"))
    row = found.segments[2].estimate
    assert (row.lift, row.low, row.high, row.p) == pytest.approx(expected, rel=CLOSE)


def test_holm() -> None:
    # Holm 1979: the k-th smallest p-value times the number of those not smaller, never falling.
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}, 0.05) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.9, "b": math.nan}, 0.05) == pytest.approx({"a": 1.0, "b": 1.0})


def test_moments_of_parts_add_up() -> None:
    random = np.random.default_rng(0)
    x = {"a": random.normal(5, 2, 50), "b": random.normal(1, 1, 50)}

    def moments(part: slice) -> Moments:
        cut = {name: values[part] for name, values in x.items()}
        products = {(a, b): float((cut[a] * cut[b]).sum()) for a, b in pairs(list(cut))}
        return Moments(len(cut["a"]), {name: float(values.sum()) for name, values in cut.items()}, products)

    whole = added([moments(slice(0, 10)), moments(slice(10, 50))]).aggregates()
    assert whole.var("a") == pytest.approx(x["a"].var(ddof=1), rel=1e-12)
    assert whole.cov("a", "b") == pytest.approx(np.cov(x["a"], x["b"])[0, 1], rel=1e-12)
