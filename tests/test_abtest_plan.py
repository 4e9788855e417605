"""`trope abtest plan`: traffic, spread and CUPED are the log's own; the power is the textbook's."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from abtest_logs import DAY, START
from scipy import optimize, stats

from trope.cli.main import main
from trope.data.sources.resolve import Request
from trope.online.analysis.plan import Design, forecast
from trope.online.analysis.plan_report import conditions
from trope.online.analysis.spending import inflation

DAYS = 12


Row = tuple[str, str, int, float, str]
"""User, item, time, revenue, type of event."""


def write(path: Path, rows: list[Row]) -> Request:
    names = ("user_id", "item_id", "timestamp", "revenue", "type")
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)
    return Request(str(path), event_col="type")


def design(metric: str, mde: float = 0.02, **settings: Any) -> Design:
    return Design(metric, mde, events=("buy",), **settings)


@pytest.fixture(scope="module")
def log() -> list[Row]:
    """Twelve days and a second before the end; users differ in appetite, and buy on a third of their visits."""
    random = np.random.default_rng(0)
    rows: list[Row] = []
    for user, rate in enumerate(random.gamma(1.0, 6.0, 400)):
        for moment in random.integers(START, START + DAYS * DAY - 60, random.poisson(rate)).tolist():
            rows.append((f"u{user}", "i", moment, 0.0, "view"))
            if random.random() < 1 / 3:
                rows.append((f"u{user}", "i", moment + 50, float(random.gamma(2, 5)), "buy"))
    rows += [("edge", "i", START, 1.0, "buy"), ("edge", "i", START + DAYS * DAY - 1, 1.0, "buy")]
    return rows


@pytest.fixture(scope="module")
def file(log: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "log.parquet"
    write(path, log)
    return path


@pytest.fixture(scope="module")
def log_file(file: Path) -> Request:
    return Request(str(file), event_col="type")


def users_after(log: list[Row], days: int) -> tuple[np.ndarray, np.ndarray]:
    """Revenue of each user who came in the second half until a day, and of the same users in the first half."""
    start = START + DAYS // 2 * DAY
    now: dict[str, float] = defaultdict(float)
    before: dict[str, float] = defaultdict(float)
    for user, _, time, paid, _ in log:
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
def test_power_is_the_textbooks(log: list[Row], log_file: Request, days: int, share: float) -> None:
    found = forecast(log_file, design("revenue", 0.05, share=share)).after(days)
    y, x = users_after(log, days)
    rho2 = np.corrcoef(y, x)[0, 1] ** 2
    assert found.users == len(y) and found.mean == pytest.approx(y.mean(), rel=1e-9)
    assert found.reduction == pytest.approx(rho2, rel=1e-6)
    variance = y.var(ddof=1) * (1 - rho2)
    assert found.needed == math.ceil(needed(variance, 0.05 * y.mean(), share=share))
    assert needed(variance, found.detectable * y.mean(), share=share) == pytest.approx(len(y), rel=1e-6)


def test_days_are_the_first_with_enough_users(log_file: Request) -> None:
    found = forecast(log_file, design("revenue", 0.4))
    assert len(found.rows) == DAYS // 2 and found.days is not None and found.beyond is None
    assert all(row.users < row.needed for row in found.rows[: found.days - 1])
    assert found.after(found.days).users >= found.after(found.days).needed
    small = forecast(log_file, design("revenue", 0.001))
    assert small.days is None and small.beyond is not None and small.beyond > 1_000


def test_looks_cost_users(log_file: Request) -> None:
    one, five = (forecast(log_file, design("revenue", 0.05, looks=looks)).rows[-1] for looks in (1, 5))
    factor = inflation([0.2, 0.4, 0.6, 0.8, 1.0], 0.05, 0.8, "obrien-fleming")
    assert five.needed / one.needed == pytest.approx(factor, rel=1e-3) and five.detectable > one.detectable


def test_a_lucky_first_day_is_no_plan(tmp_path: Path) -> None:
    """On the first day almost everybody buys once, so few users seem to suffice; on the next almost nobody buys."""
    rows: list[Row] = [("edge", "i", START, 0.0, "view"), ("edge", "i", START + 4 * DAY - 1, 0.0, "view")]
    for day, count, buyers in ((2, 40, 39), (3, 100, 5)):
        for user in range(count):
            rows.append((f"{day}-{user}", "i", START + day * DAY + user, 0.0, "view"))
            if user < buyers:
                rows.append((f"{day}-{user}", "i", START + day * DAY + user + 9, 1.0, "buy"))
    found = forecast(write(tmp_path / "log.parquet", rows), design("orders", 0.2))
    assert found.rows[0].users >= found.rows[0].needed and found.rows[1].users < found.rows[1].needed
    assert found.days is None and found.beyond is not None


def test_a_log_of_orders_is_refused_for_means_per_user(log: list[Row], tmp_path: Path) -> None:
    orders = write(tmp_path / "log.parquet", [row for row in log if row[4] == "buy"])
    for metric in ("conversion", "orders", "items", "revenue"):
        for settings in ({}, {"events": ("buy",)}):
            with pytest.raises(ValueError, match=r"every user of .* enters with an order.*--event-col") as caught:
                forecast(orders, Design(metric, 0.1, **settings))  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
    found = forecast(orders, Design("revenue/orders", 0.1))
    assert found.only_buyers and "users are buyers" in conditions(found)


def test_visitors_who_buy_nothing_do_not_change_a_ratio(log: list[Row], tmp_path: Path, log_file: Request) -> None:
    """Days with enough users are the same; the users are fewer, as they are buyers."""
    orders = write(tmp_path / "log.parquet", [row for row in log if row[4] == "buy"])
    some, every = forecast(orders, Design("revenue/orders", 0.1)), forecast(log_file, design("revenue/orders", 0.1))
    one, other = some.rows[-1], every.rows[-1]
    assert not every.only_buyers and one.users < other.users and one.mean == pytest.approx(other.mean, rel=1e-9)
    assert one.detectable == pytest.approx(other.detectable, rel=0.02)


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
    events = [] if "--event" in words else ["--event-col", "type", "--event", "buy"]
    monkeypatch.setattr(sys, "argv", ["trope", "abtest", "plan", str(file), *events, *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_log_of_one_day_is_too_short(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", [("a", "i", START, 1.0, "buy"), ("b", "i", START + DAY, 1.0, "view")])
    with pytest.raises(ValueError, match="too short to plan with: its halves have 0 days, 2 are needed"):
        forecast(log, design("revenue"))


def test_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = [
        "trope",
        "abtest",
        "plan",
        str(file),
        "--event-col",
        "type",
        "--event",
        "buy",
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
