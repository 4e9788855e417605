"""Plan an experiment from a log: how many users, how many days, and which lift can be seen in how many days.

The second half of the log plays the experiment: a user enters with the first event there, and all of it is counted as
`analyse` would. The first half gives CUPED's covariates. So traffic, spread and correlation are the log's own, and
returning users count once. tea-tasting computes the power; looks multiply the sample (`spending.inflation`).

A log of orders only shows no visitor who buys nothing. Users would seem to vary far less than they do, so such a log is
refused for means per user. It serves for ratios as revenue / orders: who buys nothing adds nothing to either sum.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis
import tea_tasting as tt

from trope.data.engines.base import Engine
from trope.data.engines.failure import explain
from trope.data.engines.open import open_engine
from trope.data.events import clean
from trope.data.prepare import ON_BAD
from trope.data.sources.description import Source
from trope.data.sources.resolve import Request
from trope.online.analysis.estimates import predicts, varies
from trope.online.analysis.looks import cumulated
from trope.online.analysis.metrics import EXPOSURES, Metric, metric
from trope.online.analysis.moments import Moments, read_days
from trope.online.analysis.outcomes import by_day, find_outcomes, joined, orders_of, totals, with_conversion
from trope.online.analysis.spending import SPENDING, inflation
from trope.times import DAY

LEAST_DAYS = 2


@dataclass(frozen=True)
class Design:
    """What one wants to see. mde: the smallest relative lift to detect. share: of the users, for the treatment.

    looks: planned looks of a group sequential test, 1 for a single test. events: types of events that are outcomes;
    all if empty. on_bad: `fail` at a bad row, or `skip` it.
    """

    metric: str = "conversion"
    mde: float = 0.02
    power: float = 0.8
    alpha: float = 0.05
    share: float = 0.5
    looks: int = 1
    spending: str = SPENDING[0]
    events: tuple[str, ...] = ()
    on_bad: str = "fail"

    def __post_init__(self) -> None:
        for flag, value, high in (("--power", self.power, 1), ("--alpha", self.alpha, 0.5), ("--share", self.share, 1)):
            if not 0 < value < high:
                raise ValueError(f"{flag} must lie between 0 and {high}, got {value:g}")
        if not 0 < self.mde < 10:
            raise ValueError(f"--mde must lie between 0 and 10 (0.02 is a lift of 2 %), got {self.mde:g}")
        if self.power <= self.alpha:
            raise ValueError(f"--power {self.power:g} must exceed --alpha {self.alpha:g}")
        if self.on_bad not in ON_BAD:
            raise ValueError(f"--on-bad must be one of {', '.join(ON_BAD)}, got {self.on_bad!r}")
        if EXPOSURES in self.metric:
            raise ValueError(f"--metric {self.metric}: a log has no exposures; plan with a mean per user or order")


@dataclass(frozen=True)
class Row:
    """After so many days: users who came, the metric, CUPED's share of the variance, users needed, lift detectable.

    needed: for `Design.mde`. detectable: with the users who came. Both with CUPED and looks.
    """

    days: int
    users: int
    mean: float
    reduction: float | None
    needed: float
    detectable: float


@dataclass(frozen=True)
class Forecast:
    """rows: one for each day. days: the first from which on users suffice every day, None if the log is too short.

    beyond: a guess of the days where the log is too short: new users keep coming as in its last week.
    inflation: what looking more than once costs. start: Unix seconds at which the log's second half begins.
    only_buyers: whether the log shows no visitor who buys nothing.
    """

    design: Design
    rows: list[Row]
    days: int | None
    beyond: int | None
    inflation: float
    start: int
    only_buyers: bool = False

    def after(self, days: int) -> Row:
        """The row of a number of days."""
        if not 1 <= days <= len(self.rows):
            raise ValueError(f"--days must be from 1 to {len(self.rows)}, half of the log; got {days}")
        return self.rows[days - 1]


def forecast(log: Request, design: Design, revenue_col: str | None = None, work: Path | None = None) -> Forecast:
    """Plan an experiment on the shop of a log. work: where a folder for intermediate tables is made."""
    asked = metric(design.metric)
    source = find_outcomes(log, revenue_col)
    if "revenue" in asked.columns and source.columns.value is None:
        raise ValueError(f"--metric {design.metric} needs a revenue column, and {source.name} has none: --revenue-col")
    if design.events and source.columns.event is None:
        raise ValueError(f"--event {design.events[0]} needs the column of event types: --event-col")
    with (
        tempfile.TemporaryDirectory(prefix="trope-abtest-", dir=work) as folder,
        open_engine("duckdb", source, Path(folder), None, None, None) as engine,
    ):
        try:
            series, start, only_buyers = _series(source, asked, design, engine)
        except engine.errors() as error:
            raise explain(error, source) from error
    return _forecast(series, start, asked, design, source, only_buyers)


def _series(source: Source, asked: Metric, design: Design, engine: Engine) -> tuple[list[Moments], int, bool]:
    """Moments of all users after each day of the log's second half, its start, and `Forecast.only_buyers`."""
    events = clean(engine.read(source), source, design.on_bad == "skip")
    table = engine.keep(events.table)
    seen = table.select(user=table.user.cast("string"), time=(table.tick // events.ticks).cast("int64"))
    ends = seen.aggregate(first=seen.time.min(), last=seen.time.max()).to_pyarrow().to_pylist()[0]
    days = (ends["last"] + 1 - ends["first"]) // DAY // 2
    if days < LEAST_DAYS:
        raise ValueError(
            f"{source.name} is too short to plan with: its halves have {days} days, {LEAST_DAYS} are needed"
        )
    start = ends["last"] + 1 - days * DAY
    only_buyers = True
    if design.events:
        found = table.filter(table.event.cast("string").isin(design.events))
        if not found.count().to_pyarrow().as_py():
            raise ValueError(f"{source.name} has no event of type {', '.join(design.events)}; there is no outcome")
        only_buyers = found.count().to_pyarrow().as_py() == table.count().to_pyarrow().as_py()
        table = found
    if only_buyers and asked.denom is None:
        raise ValueError(
            f"every user of {source.name} enters with an order, so the log does not show visitors who buy nothing, and "
            f"{design.metric} per visitor is not known; give a log with visits and purchases, and say --event-col "
            "COLUMN and --event TYPE for the purchases"
        )
    orders = engine.keep(orders_of(table, events.ticks, source, design.on_bad == "skip"))
    late = seen.filter(seen.time >= start)
    users = late.group_by("user").aggregate(first=late.time.min())
    users = joined(users, totals(orders, {"pre_": orders.time < start}), "pre_")
    users = users.mutate(arm=ibis.literal(0, "int32"), entered=((users["first"] - start) // DAY).cast("int64"))
    users = engine.keep(users)
    steps = with_conversion(by_day(orders.filter(orders.time >= start), start)).select("user", "day", *asked.columns)
    fixed = sorted(asked.covariates)
    series = cumulated(read_days(users, steps, sorted(asked.columns), fixed), 0, days - 1)
    return series, start, only_buyers


def _forecast(
    series: Sequence[Moments], start: int, asked: Metric, design: Design, source: Source, only_buyers: bool
) -> Forecast:
    looks = [(look + 1) / design.looks for look in range(design.looks)]
    more = inflation(looks, design.alpha, design.power, design.spending) if design.looks > 1 else 1.0
    rows = [_row(day + 1, moments, asked, design, more) for day, moments in enumerate(series)]
    last = rows[-1]
    if not math.isfinite(last.needed):
        raise ValueError(f"{source.name}: {design.metric} is {last.mean:g} for every user, so nothing can change")
    # The first day from which on users suffice: one lucky day among the first, with few users, is no plan.
    short = [row.days for row in rows if not row.users >= row.needed]
    days = None if last.days in short else max(short, default=0) + 1
    beyond = None
    if days is None:
        week = rows[-min(8, len(rows))]
        pace = (last.users - week.users) / max(1, last.days - week.days)
        beyond = last.days + math.ceil((last.needed - last.users) / pace) if pace > 0 else None
    return Forecast(design, rows, days, beyond, more, start, only_buyers)


def _row(days: int, moments: Moments, asked: Metric, design: Design, more: float) -> Row:
    """The power after some days."""
    lost = math.nan
    if moments.count < 3:
        return Row(days, moments.count, lost, None, lost, lost)
    found = moments.aggregates()
    bottom = found.mean(asked.denom)
    mean = float(found.mean(asked.numer) / bottom) if bottom else lost
    if not varies(found, asked.numer, asked.denom) or mean <= 0:
        return Row(days, moments.count, mean, None, lost, lost)
    covariates = asked.covariates if predicts(found, asked) else ()

    def solve(wanted: str, covariates: tuple[str, ...]) -> float:
        pre = (*covariates, None, None)[:2]
        given = {"rel_effect_size": design.mde} if wanted == "n_obs" else {"n_obs": max(4, int(moments.count / more))}
        test = tt.RatioOfMeans(
            asked.numer, asked.denom, pre[0], pre[1], use_t=False, equal_var=False, alpha=design.alpha,
            power=design.power, ratio=design.share / (1 - design.share), **given,
        )  # fmt: skip
        return float(getattr(test.solve_power_from_aggregates(found, wanted)[0], wanted))

    plain, needed = solve("n_obs", ()), solve("n_obs", covariates)
    reduction = 1 - (solve("rel_effect_size", covariates) / solve("rel_effect_size", ())) ** 2 if covariates else None
    if not math.isfinite(plain):
        return Row(days, moments.count, mean, None, lost, lost)
    return Row(days, moments.count, mean, reduction, math.ceil(needed * more), solve("rel_effect_size", covariates))
