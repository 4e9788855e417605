"""`trope abtest plan`: traffic, spread and CUPED are the log's own; the power is the textbook's."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from abtest_logs import DAY, START, write_outcomes
from scipy import optimize, stats

from trope.cli.main import main
from trope.data.sources.resolve import Request
from trope.online.analysis.plan import Design, forecast
from trope.online.analysis.spending import inflation

DAYS = 12


@pytest.fixture(scope="module")
def log() -> list[tuple[str, str, int, float]]:
    """Twelve days and a second before the end; users differ in appetite."""
    random = np.random.default_rng(0)
    rows = []
    for user, rate in enumerate(random.gamma(1.0, 3.0, 400)):
        moments = random.integers(START, START + DAYS * DAY, random.poisson(rate))
        rows += [(f"u{user}", "i", int(moment), float(random.gamma(2, 5))) for moment in moments]
    rows += [("edge", "i", START, 1.0), ("edge", "i", START + DAYS * DAY - 1, 1.0)]
    return rows


@pytest.fixture(scope="module")
def file(log: list[tuple[str, str, int, float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "log.parquet"
    write_outcomes(path, log)
    return path


def users_after(log: list[tuple[str, str, int, float]], days: int) -> tuple[np.ndarray, np.ndarray]:
    """Revenue of each user of the second half until a day, and revenue of the same users in the first half."""
    start = START + DAYS // 2 * DAY
    now: dict[str, float] = defaultdict(float)
    before: dict[str, float] = defaultdict(float)
    for user, _, time, paid in log:
        if time < start:
            before[user] += paid
        elif time < start + days * DAY:
            now[user] += paid
    return np.array(list(now.values())), np.array([before[user] for user in now])


def needed(variance: float, effect: float, power: float = 0.8, share: float = 0.5) -> float:
    """Users of both arms for a two-sided test at 0.05."""

    def miss(n: float) -> float:
        error = math.sqrt(variance / n * (1 / share + 1 / (1 - share)))
        z = stats.norm.ppf(0.975)
        return float(stats.norm.sf(z - effect / error) + stats.norm.cdf(-z - effect / error)) - power

    return float(optimize.brentq(miss, 4, 1e12))


@pytest.mark.parametrize(("days", "share"), [(3, 0.5), (6, 0.1)])
def test_power_is_the_textbooks(log: list[tuple[str, str, int, float]], file: Path, days: int, share: float) -> None:
    found = forecast(Request(str(file)), Design("revenue", 0.05, share=share)).after(days)
    y, x = users_after(log, days)
    rho2 = np.corrcoef(y, x)[0, 1] ** 2
    assert found.users == len(y) and found.mean == pytest.approx(y.mean(), rel=1e-9)
    assert found.reduction == pytest.approx(rho2, rel=1e-6)
    variance = y.var(ddof=1) * (1 - rho2)
    assert found.needed == math.ceil(needed(variance, 0.05 * y.mean(), share=share))
    assert needed(variance, found.detectable * y.mean(), share=share) == pytest.approx(len(y), rel=1e-6)


def test_days_are_the_first_with_enough_users(file: Path) -> None:
    found = forecast(Request(str(file)), Design("revenue", 0.4))
    assert len(found.rows) == DAYS // 2 and found.days is not None and found.beyond is None
    assert all(row.users < row.needed for row in found.rows[: found.days - 1])
    assert found.after(found.days).users >= found.after(found.days).needed
    small = forecast(Request(str(file)), Design("revenue", 0.001))
    assert small.days is None and small.beyond is not None and small.beyond > 1_000


def test_looks_cost_users(file: Path) -> None:
    one, five = (forecast(Request(str(file)), Design("revenue", 0.05, looks=looks)).rows[-1] for looks in (1, 5))
    factor = inflation([0.2, 0.4, 0.6, 0.8, 1.0], 0.05, 0.8, "obrien-fleming")
    assert five.needed / one.needed == pytest.approx(factor, rel=1e-3) and five.detectable > one.detectable


def test_visits_and_purchases_in_one_log(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    count, path = 3_000, tmp_path / "log.parquet"
    users = random.integers(0, 500, count)
    bought = random.random(count) < 0.1
    columns = {
        "user": users,
        "item": random.integers(0, 9, count),
        "timestamp": START + np.sort(random.integers(0, DAYS * DAY, count)),
        "type": np.where(bought, "buy", "view"),
    }
    pq.write_table(pa.table(columns), path)
    found = forecast(Request(str(path), event_col="type"), Design("conversion", 0.1, events=("buy",)))
    late = columns["timestamp"] >= found.start
    assert found.rows[-1].users == len(set(users[late]))
    assert found.rows[-1].mean == pytest.approx(len(set(users[late & bought])) / len(set(users[late])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "conversion"], "conversion is 1 for every user.*does LOG hold orders only"),
        (["--metric", "orders/exposures"], "a log has no exposures"),
        (["--metric", "clicks"], "unknown metric 'clicks'"),
        (["--mde", "0"], "--mde must lie between 0 and 10"),
        (["--power", "1.5"], "--power must lie between 0 and 1"),
        (["--share", "1"], "--share must lie between 0 and 1"),
        (["--days", "99"], "--days must be from 1 to 6"),
        (["--event", "buy"], "--event buy needs the column of event types"),
        (["--metric", "revenue", "--revenue-col", "price"], "no column 'price' for the revenue"),
        (["--looks", "3", "--spending", "haybittle"], "unknown spending 'haybittle'"),
    ],
)
def test_bad_plans_get_one_line(
    words: list[str], message: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trope", "abtest", "plan", str(file), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_log_of_one_day_is_too_short(tmp_path: Path) -> None:
    write_outcomes(tmp_path / "log.parquet", [("a", "i", START, 1.0), ("b", "i", START + DAY, 1.0)])
    with pytest.raises(ValueError, match="too short to plan with: its halves have 0 days, 2 are needed"):
        forecast(Request(str(tmp_path / "log.parquet")), Design("revenue"))


def test_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = [
        "trope",
        "abtest",
        "plan",
        str(file),
        "--metric",
        "revenue",
        "--mde",
        "0.4",
        "--days",
        "5",
        "--json",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    printed = capsys.readouterr().out
    assert printed.startswith("A lift of 40 % in revenue needs ") and "In 5 days a lift of +" in printed
    found = json.loads(out.read_text())
    assert [row["days"] for row in found["rows"]] == [1, 2, 3, 4, 5, 6] and found["environment"]["trope"]
