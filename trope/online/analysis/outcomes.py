"""The outcomes, reduced to orders and then to users: what each user did after the first exposure, and before the test.

An order is what one user bought under one basket id or, without baskets, at one second. An order counts from its first
row on, so that its rows never fall on two sides of an exposure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import ibis
import ibis.expr.types as ir

from trope.data.engines.base import Engine
from trope.data.events import clean
from trope.data.sources.description import Columns, Source
from trope.data.sources.files import check_columns
from trope.data.sources.resolve import Request, resolve
from trope.data.sources.text import keys
from trope.data.sources.urls import shown
from trope.online.analysis.experiment import Experiment
from trope.times import DAY

OUTCOMES = ("converted", "items", "orders", "revenue")
"""What is summed per user. `converted` is 1 for a user with an order."""
SUMS = ("items", "orders", "revenue")
REVENUE = "revenue"
# When an order was made: before the experiment, by somebody never exposed, before the first exposure, after it; or
# later than now, by a clock that is wrong.
_BEFORE, _STRANGER, _EARLY, _AFTER, _AHEAD = _PHASES = range(5)


@dataclass(frozen=True)
class Outcomes:
    """users: `Exposed.users` with OUTCOMES after the first exposure, and with OUTCOMES from before as `pre_NAME`.

    days: columns `user`, `day` since the start, and the day's `items`, `orders`, `revenue` after the first exposure.
    has_revenue, has_pre: whether there is a revenue column, and an outcome of an exposed user before the experiment.
    rows: all outcome rows. ahead: rows left out because nobody can have made them yet.
    used, early, strangers: rows after the user's first exposure; rows after the start but
    before that exposure; rows after the start of people who were never exposed.
    last: moment of the last outcome that is used.
    """

    users: ir.Table
    days: ir.Table
    has_revenue: bool
    has_pre: bool
    rows: int
    ahead: int
    used: int
    early: int
    strangers: int
    last: int


def find_outcomes(request: Request, revenue_col: str | None = None) -> Source:
    """The source of a file, folder or glob of outcomes. Columns are user_id (or user), item_id (or item), timestamp.

    revenue_col: the column with an amount; by default `revenue` where the files have it.
    """
    if "://" in request.text:
        raise ValueError(
            f"OUTCOMES must be files, as EXPOSURES are; export the table of {shown(request.text)} as Parquet"
        )
    source = _resolved(request)
    column = revenue_col or (REVENUE if REVENUE in _fields(source) else None)
    if column is None:
        return source
    if source.kind != "json" and column not in source.fields:
        raise ValueError(f"{source.name} has no column {column!r} for the revenue; it has {', '.join(source.fields)}")
    return check_columns(replace(source, columns=_with_value(source.columns, column)))


def _resolved(request: Request) -> Source:
    """The source, under the first names that its files have: those of a server's events, or those of a log."""
    errors = []
    for user, item in (("user_id", "item_id"), ("user", "item")):
        try:
            named = replace(request, user_col=request.user_col or user, item_col=request.item_col or item)
            found = resolve(named)
            if found.kind == "json":  # others have been asked for their columns
                missing = {found.columns.user, found.columns.item} - _fields(found)
                if missing:
                    raise ValueError(f"{found.name} has no {' and no '.join(map(repr, sorted(missing)))} in its lines")
            return found
        except FileNotFoundError:
            raise
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _fields(source: Source) -> set[str]:
    """The names of the columns; of JSON lines, the keys at the beginning of each file."""
    if source.kind == "json":
        return set().union(*(keys(file) for file in source.files))
    return set(source.fields)


def read_outcomes(
    source: Source,
    before: Source | None,
    exposed: ir.Table,
    until: int,
    experiment: Experiment,
    engine: Engine,
    skip_bad: bool = False,
) -> Outcomes:
    """Join outcomes to exposed users.

    before: outcomes from before the experiment; None takes those of `source`.
    exposed: `Exposed.users`. until: the last moment at which an outcome can have been.
    skip_bad: leave bad rows out instead of refusing them.
    """
    orders = read_orders(source, engine, skip_bad)
    known = orders.join(exposed.select("user", "first"), "user", how="left")
    phase = ibis.cases(
        (known.time < experiment.started, _BEFORE),
        (known.time > until, _AHEAD),
        (known["first"].isnull(), _STRANGER),
        (known.time < known["first"], _EARLY),
        else_=_AFTER,
    )
    known = known.mutate(phase=phase.cast("int8"), exposed=known["first"].notnull())
    known = engine.keep(known.select("user", "time", "items", "revenue", "phase", "exposed"))
    by_phase = known.group_by("phase").aggregate(
        rows=known["items"].sum(), exposed=known["items"].sum(where=known.exposed), last=known.time.max()
    )
    phases = {row["phase"]: row for row in by_phase.to_pyarrow().to_pylist()}
    counts = {phase: int(phases[phase]["rows"]) if phase in phases else 0 for phase in _PHASES}
    if not counts[_AFTER]:
        raise _nothing_follows(known, exposed, sum(int(row["exposed"] or 0) for row in phases.values()), source)
    mine = known.filter(known.exposed)
    parts = {"": mine.phase == _AFTER, "pre_": mine.phase == _BEFORE}
    if before is None:
        users = joined(exposed, totals(mine, parts), *parts)
    else:
        past = read_orders(before, engine, skip_bad)
        users = joined(exposed, totals(mine, {"": parts[""]}), "")
        users = joined(users, totals(past, {"pre_": past.time < experiment.started}), "pre_")
    users = engine.keep(users)
    days = by_day(mine.filter(mine.phase == _AFTER), experiment.started)
    has_pre = bool(users.pre_orders.sum().to_pyarrow().as_py())
    if before is not None and not has_pre:
        raise ValueError(
            f"{before.name} has no outcome of an exposed user before the experiment started; leave out --pre"
        )
    return Outcomes(
        users,
        days,
        source.columns.value is not None,
        has_pre,
        sum(counts.values()),
        counts[_AHEAD],
        counts[_AFTER],
        counts[_EARLY],
        counts[_STRANGER],
        int(phases[_AFTER]["last"]),
    )


def read_orders(source: Source, engine: Engine, skip_bad: bool = False) -> ir.Table:
    """The orders of a log: columns `user` (text), `time` (Unix seconds), `items` (rows), `revenue` (0 without it)."""
    events = clean(engine.read(source), source, skip_bad)
    return orders_of(events.table, events.ticks, source, skip_bad)


def orders_of(table: ir.Table, ticks: int, source: Source, skip_bad: bool = False) -> ir.Table:
    """The orders of checked events. ticks: units of `tick` in a second. skip_bad: leave out rows without an amount."""
    table = table.mutate(amount=_revenue(table, source), second=(table.tick // ticks).cast("int64"))
    table = _with_amounts(table, source, skip_bad)
    key = table.basket if "basket" in table.columns else table.second
    table = table.select(user=table.user.cast("string"), key=key, time=table.second, revenue=table.amount)
    return (
        table.group_by("user", "key")
        .aggregate(time=table.time.min(), items=table.count(), revenue=table.revenue.sum())
        .drop("key")
    )


def _revenue(table: ir.Table, source: Source) -> ir.Value:
    if source.columns.value is None:
        return ibis.literal(0.0, "float64")
    kind = table.value.type()
    if not (kind.is_numeric() or kind.is_string()):
        raise ValueError(f"{source.name}: the revenue column is {kind}; it must be a number")
    return table.value.try_cast("float64") if kind.is_string() else table.value.cast("float64")


def _with_amounts(table: ir.Table, source: Source, skip_bad: bool) -> ir.Table:
    """The rows, after a check that all amounts are numbers; with `skip_bad` only the rows whose amount is one."""
    if source.columns.value is None:
        return table
    # NaN and the infinities are no amounts; a comparison with a number is false or null for them on every engine.
    bad = ~(table.amount.abs() < 1e15).fill_null(False) | table.amount.isnan().fill_null(False)
    found = table.aggregate(rows=table.count(), bad=bad.cast("int64").sum()).to_pyarrow().to_pylist()[0]
    count = int(found["bad"] or 0)
    if not count:
        return table
    if not skip_bad or count == found["rows"]:
        raise ValueError(
            f"{source.name} has {count:,} rows whose {source.columns.value!r} is missing or not a number below 1e15; "
            "write 0 where nothing was paid" + (", or pass --on-bad skip" if count < found["rows"] else "")
        )
    return table.filter(~bad)


def by_day(orders: ir.Table, started: int) -> ir.Table:
    """Sums of each user's orders of each day since the start: columns `user`, `day` and SUMS."""
    return orders.group_by("user", day=((orders.time - started) // DAY).cast("int64")).aggregate(
        items=orders["items"].sum(), orders=orders.count(), revenue=orders.revenue.sum()
    )


def with_conversion(days: ir.Table) -> ir.Table:
    """Days with `converted`: 1 on the day of the user's first order, else 0."""
    ordered = ibis.ifelse(days.orders > 0, days.day, ibis.null("int64"))
    first = ordered.min().over(ibis.window(group_by="user"))
    return days.mutate(converted=(days.day == first).fill_null(False).cast("int64"))


def totals(orders: ir.Table, parts: Mapping[str, ir.BooleanValue]) -> ir.Table:
    """Sums of each user's orders: SUMS under each prefix, over the orders that its condition holds for."""
    wanted = {}
    for prefix, holds in parts.items():
        wanted[f"{prefix}items"] = orders["items"].sum(where=holds)
        wanted[f"{prefix}orders"] = orders.count(where=holds)
        wanted[f"{prefix}revenue"] = orders.revenue.sum(where=holds)
    return orders.group_by("user").aggregate(**wanted)


def joined(users: ir.Table, sums: ir.Table, *prefixes: str) -> ir.Table:
    """The users with their sums, and `converted`, under each prefix; users without an order have zeros."""
    found = users.join(sums, "user", how="left")
    names = [f"{prefix}{name}" for prefix in prefixes for name in SUMS]
    found = found.select(*users.columns, **{name: found[name].fill_null(0).cast("float64") for name in names})
    return found.mutate(**{f"{prefix}converted": (found[f"{prefix}orders"] > 0).cast("float64") for prefix in prefixes})


def _nothing_follows(known: ir.Table, exposed: ir.Table, count: int, source: Source) -> ValueError:
    """Why no outcome follows an exposure. count: outcomes of exposed users."""
    if count:
        return ValueError(
            f"all {count:,} outcomes of exposed users in {source.name} precede their user's first exposure; "
            "are both clocks UTC and in the same unit?"
        )
    names = [str(table.user.min().to_pyarrow().as_py())[:60] for table in (known, exposed)]
    return ValueError(
        f"no outcome of {source.name} is of an exposed user: it has users such as {names[0]!r}, and the exposures such "
        f"as {names[1]!r}; do both logs write user ids alike?"
    )


def _with_value(columns: Columns, column: str) -> Columns:
    return replace(columns, value=column)
