"""Check raw columns and turn them into events: whole ticks, integer ids where all are integers, bad rows listed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from trope.data.dates import guess_format
from trope.data.engines.base import ROW_BITS, BadRow, RawEvents
from trope.data.sources.description import Source

TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# The start of the year 2100, and of 1973: no log of people's clicks lies wholly before it.
FAR_FUTURE = 4_102_444_800
_LONG_AGO = 94_694_400
_LISTED = 20
_ISO_LIKE = r"\s*\d{4}([-/])\d{1,2}\1\d{1,2}([ T]\d{1,2}:\d\d(:\d\d|$)|\s*$)(?!.*[AaPp][Mm])"
_NO_NUMBER, _NO_DATE = "time is missing or not a number", "time is missing or not a date"


@dataclass(frozen=True)
class BadRows:
    """The number of bad rows, by reason, and the first few of them."""

    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: list[BadRow] = field(default_factory=list)

    def describe(self, word: str, most: int = 5) -> str:
        """`file line 12: time is missing; ...` for the first few."""
        listed = "; ".join(f"{bad.file} {word} {bad.row}: {bad.reason}" for bad in self.first[:most])
        return listed + (f"; and {self.count - most:,} more" if self.count > most else "")


@dataclass(frozen=True)
class Events:
    """Valid events: columns `user`, `item`, `tick`, `place`, and `basket` and `event` where the source has them.

    ticks: units of `tick` in a second. rows: all rows read, bad ones included.
    """

    table: ir.Table
    ticks: int
    bad: BadRows
    rows: int


def clean(raw: RawEvents, source: Source, skip_bad: bool) -> Events:
    """Check every row. Bad rows are an error; with `skip_bad` they are left out and counted."""
    kind = raw.table.time.type().copy(nullable=True)  # a column that is never null has another type, "!float32"
    if kind in (dt.float16, dt.float32):
        raise ValueError(
            f"{source.name}: the time column {source.columns.time!r} is {kind}, which rounds Unix seconds to "
            "multiples of 128 or more; write the times as integers or float64"
        )
    if raw.time_unit == "iso":
        todo = "cast it to a timestamp" if kind.is_string() else "pass --time-unit s, ms, us or ns"
        raise ValueError(
            f"{source.name}: --time-unit iso is for text in files, but the time column {source.columns.time!r} is "
            f"{kind}{' of a table' if source.kind == 'table' else ''}; {todo}"
        )
    table = raw.table.mutate(tick=_tick(raw.table.time))
    if kind.is_string() and source.files:
        table = table.mutate(written=table.time)
    table = table.drop("time")
    for role in ("user", "item", "basket"):
        if role in table.columns and not (table[role].type().is_integer() or table[role].type().is_string()):
            raise ValueError(
                f"{source.name}: the {role} column is {table[role].type()}; ids must be integers or text, cast it first"
            )
    no_time = _NO_DATE if source.time_unit == "iso" else _NO_NUMBER
    table = table.mutate(reason=_reason(table, TICKS[raw.time_unit], no_time))
    facts = _facts(table)
    rows = facts["rows"] + len(raw.rejected)
    if rows == 0:
        raise ValueError(f"{source.name} has no events: its files hold no rows")
    _check_unit(facts, raw.time_unit, source)
    bad = _bad_rows(table, facts, raw, source)
    texts = _unreadable_times(table, no_time) if bad.reasons.get(no_time, 0) else []
    other_unit = _other_unit(texts, no_time, source) if 2 * bad.reasons.get(no_time, 0) > rows else ""
    # Leaving out what is only misread would leave nothing, or little that is right.
    if bad.count and (other_unit or not skip_bad):
        raise ValueError(
            f"{source.name} has {bad.count:,} bad row{'s' if bad.count > 1 else ''}: "
            f"{bad.describe(source.row_word, 1 if other_unit else 5)}. " + (other_unit or _advice(texts, raw, source))
        )
    # Without bad rows there is nothing to filter, and later passes need not read the times for it.
    good = (table.filter(table.reason.isnull()) if facts["bad"] else table).drop("reason")
    if "written" in good.columns:
        good = good.drop("written")
    return Events(_typed(good, facts), TICKS[raw.time_unit], bad, rows)


def _advice(texts: list[str], raw: RawEvents, source: Source) -> str:
    """What to do about bad rows that nothing explains together."""
    found = f"The first time that cannot be read is {texts[0][:60]!r}. " if texts else ""
    if raw.rejected and source.header and source.fields and not source.fields[-1]:
        found += (
            f"The header has {len(source.fields)} fields, the last one empty: does it end with a delimiter too many? "
        )
    return found + "Mend them, or pass --on-bad skip to leave them out"


def _tick(time: ir.Value) -> ir.Value:
    """Time in whole units, null where it is no number; a fraction of a unit is dropped."""
    kind = time.type()
    if kind.is_integer():
        # Of the integers only uint64 may not fit, and such a time is none.
        return time.try_cast("int64") if kind.is_uint64() else time.cast("int64")
    if kind.is_floating() or kind.is_decimal():
        return _floor(time.cast("float64"))
    if not kind.is_string():
        raise ValueError(f"the time column is {kind}; it must be a number, a timestamp or text")
    # Engines disagree on the integer in "12.5" (13, 12, none): trust it only where the text is a whole number.
    number, whole = time.try_cast("float64"), time.try_cast("int64")
    return ibis.ifelse(whole.cast("float64") == number, whole, _floor(number))


def _floor(number: ir.Value) -> ir.Value:
    # NaN and the infinities are no times, and an error to cast; no engine calls them small.
    return ibis.ifelse(number.abs() < 2.0**62, number, ibis.null("float64")).floor().cast("int64")


def _reason(table: ir.Table, ticks: int, no_time: str) -> ir.Value:
    """Why a row cannot be used, or null."""
    cases: list[tuple[ir.BooleanValue, str]] = []
    for role in ("user", "item", "basket"):
        if role in table.columns:
            missing = table[role].isnull()
            if table[role].type().is_string():
                missing = missing | (table[role] == "")
            cases.append((missing, f"{role} is missing"))
    cases += [
        (table.tick.isnull(), no_time),
        (table.tick <= 0, "time is zero or negative"),
        (table.tick >= FAR_FUTURE * ticks, "time is after the year 2099"),
    ]
    return ibis.cases(*cases, else_=ibis.null("string"))


def _facts(table: ir.Table) -> dict[str, Any]:
    """Everything validation needs to know, in one pass over the log."""
    wanted = {
        "rows": table.count(),
        "bad": table.reason.notnull().sum(),
        "first": table.tick.min(where=table.tick > 0),
        "last": table.tick.max(),
    }
    for role in _text_roles(table):
        number = table[role].try_cast("int64")
        # "007" and "7" are two ids: text counts as an integer only if it is written as one.
        whole = (number.cast("string") == table[role]).fill_null(False)
        wanted[f"{role}_text"] = (table.reason.isnull() & ~whole).sum()
    facts: dict[str, Any] = table.aggregate(**wanted).to_pyarrow().to_pylist()[0]
    return {name: 0 if value is None else int(value) for name, value in facts.items()}


def _text_roles(table: ir.Table) -> list[str]:
    return [role for role in ("user", "item", "basket") if role in table.columns and table[role].type().is_string()]


def _typed(table: ir.Table, facts: dict[str, Any]) -> ir.Table:
    """Text ids that are all integers as such, so that a CSV and a Parquet file of one log give the same dataset."""
    return table.cast({role: "int64" for role in _text_roles(table) if not facts[f"{role}_text"]})


def _check_unit(facts: dict[str, Any], unit: str, source: Source) -> None:
    """Refuse a whole column in another unit, and say which."""
    first, last = facts["first"], facts["last"]
    if first >= FAR_FUTURE * TICKS[unit]:
        guess = next((u for u, ticks in TICKS.items() if first < FAR_FUTURE * ticks), None)
        hint = f"; they look like {UNIT_NAMES[guess]}: pass --time-unit {guess}" if guess else ""
        raise ValueError(
            f"{source.name}: times from {first} are after the year 2099 when read as {UNIT_NAMES[unit]}{hint}"
        )
    # Read as seconds they would all lie in August 1970.
    if unit == "s" and first >= 19_000_101 and last <= 20_991_231:
        raise ValueError(
            f"{source.name}: times such as {first} lie in 1970 when read as seconds; they look like days: "
            "pass --time-format %Y%m%d"
        )
    if unit != "s" and 0 < last < _LONG_AGO * TICKS[unit]:
        guess = next(u for u, ticks in TICKS.items() if last < FAR_FUTURE * ticks)
        raise ValueError(
            f"{source.name}: times up to {last} end before 1973 when read as {UNIT_NAMES[unit]}; "
            f"they look like {UNIT_NAMES[guess]}: pass --time-unit {guess}"
        )


def _other_unit(texts: list[str], no_time: str, source: Source) -> str:
    """Advice where the first unreadable times are numbers, or dates in another format; else ""."""
    if not texts:
        return ""
    if (no_time == _NO_NUMBER or source.time_format) and all(re.match(_ISO_LIKE, text) for text in texts):
        return f"The times look like dates ({texts[0]!r}): pass --time-unit iso"
    if no_time == _NO_DATE and all(re.fullmatch(r"\s*\d+(\.\d*)?\s*", text) for text in texts):
        guess = next((u for u, ticks in TICKS.items() if float(texts[0]) < FAR_FUTURE * ticks), "s")
        return f"The times look like {UNIT_NAMES[guess]} ({texts[0]!r}): pass --time-unit {guess}"
    if forms := guess_format(texts):
        return f"The times look like dates ({texts[0]!r}): pass --time-format {forms}"
    return ""


def _unreadable_times(table: ir.Table, no_time: str) -> list[str]:
    """The text of the first times that cannot be read."""
    if "written" not in table.columns:
        return []
    bad = table.filter((table.reason == no_time) & table.written.notnull())
    return [row["written"] for row in bad.order_by("place").limit(_LISTED).select("written").to_pyarrow().to_pylist()]


def _bad_rows(table: ir.Table, facts: dict[str, Any], raw: RawEvents, source: Source) -> BadRows:
    total = facts["bad"] + len(raw.rejected)
    if not total:
        return BadRows()
    reasons = Counter(bad.reason for bad in raw.rejected)
    listed = list(raw.rejected)
    if facts["bad"]:
        bad = table.filter(table.reason.notnull())
        for row in bad.group_by("reason").agg(rows=bad.count()).to_pyarrow().to_pylist():
            reasons[row["reason"]] += row["rows"]
        first = bad.order_by("place").limit(_LISTED).select("place", "reason").to_pyarrow().to_pylist()
        listed += [_locate(row["place"], row["reason"], raw, source) for row in first]
    names = source.labels
    listed.sort(key=lambda row: (names.index(row.file) if row.file in names else 0, row.row))
    return BadRows(total, dict(sorted(reasons.items())), listed[:_LISTED])


def _locate(place: int, reason: str, raw: RawEvents, source: Source) -> BadRow:
    """File and row, counted from 1 with the header, as an editor shows it."""
    if not source.files:
        return BadRow(source.table, 0, reason)
    file = source.labels[place >> ROW_BITS]
    row = (place & ((1 << ROW_BITS) - 1)) + 1 + source.header_lines
    if raw.renumber:
        for rejected in sorted(bad.row for bad in raw.rejected if bad.file == file):
            row += rejected <= row
    return BadRow(file, row, reason)
