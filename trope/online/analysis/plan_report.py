"""A forecast in words and as a table."""

from __future__ import annotations

import math

from rich.table import Table

from trope.online.analysis.plan import Forecast, Row
from trope.online.analysis.verdict import percent
from trope.times import say_day

HEADINGS = ("days", "users", "mean", "CUPED", "detectable lift")
_SHOWN = (1, 2, 3, 5, 7, 10, 14, 21, 28, 42, 56, 84, 112, 140, 168, 252, 365)


def finding(found: Forecast) -> str:
    """How long the experiment must run, in a sentence."""
    design, last = found.design, found.rows[-1]
    lift = f"A lift of {100 * design.mde:g} % in {design.metric}"
    if found.days is not None:
        row = found.after(found.days)
        users, days = f"{row.needed:,.0f} users", "1 day" if found.days == 1 else f"{found.days} days"
        return f"{lift} needs {users}: {days} of this traffic."
    rest = f"; about {found.beyond:,} days if users keep coming as in the last week" if found.beyond else ""
    return (
        f"{lift} needs {last.needed:,.0f} users, and {last.users:,} came in {last.days} days, half of the log{rest}. "
        f"These days can show {percent(last.detectable)}."
    )


def conditions(found: Forecast) -> str:
    """What the numbers hold for, in a sentence."""
    design = found.design
    looks = f"{design.looks} looks ({design.spending}), which cost {100 * (found.inflation - 1):.1f} % more users"
    return (
        f"Power {design.power:g}, alpha {design.alpha:g} two-sided, {100 * design.share:g} % of the users in the "
        f"treatment, {looks if design.looks > 1 else 'one look at the end'}. Traffic from {say_day(found.start)} on; "
        "CUPED from the time before."
        + (" The log shows no visitor who buys nothing: users are buyers." if found.only_buyers else "")
    )


def shown_rows(found: Forecast, days: int | None = None) -> list[Row]:
    """A few days, the needed one and the asked one among them."""
    picked = {day for day in _SHOWN if day <= len(found.rows)} | {len(found.rows)}
    picked |= {day for day in (found.days, days) if day is not None}
    return [found.after(day) for day in sorted(picked)]


def to_table(found: Forecast, days: int | None = None) -> Table:
    """For the screen."""
    table = Table(box=None)
    for name in HEADINGS:
        table.add_column(name, justify="right")
    for row in shown_rows(found, days):
        mark = "bold" if row.days in (found.days, days) else ""
        cuped = "" if row.reduction is None else f"{-100 * row.reduction:+.1f} %"
        lift = "n/a" if math.isnan(row.detectable) else percent(row.detectable)
        table.add_row(f"{row.days}", f"{row.users:,}", f"{row.mean:.4g}", cuped, lift, style=mark)
    return table
