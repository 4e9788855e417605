"""The exposures, reduced to one row per user: arm, first exposure, number of exposures.

Two passes: one checks every row, one groups by user. Only the users are kept; the exposures never leave the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir
import pyarrow as pa

from trope.data.engines.base import Engine
from trope.data.events import FAR_FUTURE
from trope.data.sources import parquet
from trope.online.analysis.experiment import Experiment
from trope.times import DAY, HOUR, say_moment

PATTERN = "exposures-*.parquet"
COLUMNS = ("experiment", "user_id", "arm", "moment", "forced")
ANSWERED = "answered"
"""When the server answered. Logs of other servers may lack this column."""
AHEAD = DAY
"""How far a moment may lie behind its answer. What is asked for later moments is a preview: nobody saw it then."""
_KINDS = {"experiment": "text", "user_id": "text", "arm": "text", "moment": "whole numbers", "forced": "true or false",
          ANSWERED: "numbers"}  # fmt: skip


@dataclass(frozen=True)
class Exposed:
    """Users who were exposed. users: columns `user`, `arm` (its place in `Experiment.names`), `first`, `exposures`.

    scan: all exposures that count, columns `user` and `moment`, not computed yet.
    exposures, forced: rows used, and rows left out because somebody chose the arm by hand. ahead: rows left out because
    their moment is over a day after the answer. early: exposures before the experiment started. last: the last
    exposure's moment, which is never after its answer.
    counts: (arm, day, hour) of the first exposure -> users; the day counts from the start, the hour is of the day, UTC.
    """

    users: ir.Table
    scan: ir.Table
    exposures: int
    forced: int
    ahead: int
    early: int
    last: int
    counts: dict[tuple[int, int, int], int]

    def users_of(self, arm: int) -> int:
        return sum(count for (found, _, _), count in self.counts.items() if found == arm)


def find_exposures(folder: Path) -> tuple[Path, ...]:
    """The Parquet files of a folder of exposures, each with the columns and types of the contract."""
    files = tuple(sorted(file.absolute() for file in folder.glob(PATTERN)))
    if not files:
        raise FileNotFoundError(f"no {PATTERN} in {folder}; has the server answered anybody yet?")
    for file in files:
        found = parquet.schema(file)
        for column in (*COLUMNS, ANSWERED):
            if column not in found.names:
                if column == ANSWERED:
                    continue
                raise ValueError(f"{file} has no column {column!r}; it has {', '.join(found.names)}")
            if not _is_kind(column, found.field(column).type):
                raise ValueError(
                    f"{file} has column {column!r} as {found.field(column).type}; it must be {_KINDS[column]}"
                )
    return files


def read_exposures(folder: Path, experiment: Experiment, engine: Engine) -> Exposed:
    """Reduce a folder of exposures to users, and refuse what cannot be analysed."""
    scan = _scan(find_exposures(folder), engine)
    codes = [(scan.arm == arm, place) for place, arm in enumerate(experiment.names)]
    scan = scan.mutate(
        user=scan.user_id, code=ibis.cases(*codes, else_=-1).cast("int32"), used=~scan.forced & ~scan.ahead
    )
    facts = _facts(scan, experiment)
    _check(facts, scan, folder, experiment)
    used = scan.filter(scan.used) if facts["exposures"] < facts["rows"] else scan
    users = engine.keep(
        used.group_by("user").aggregate(
            arm=used.code.min(), other=used.code.max(), first=used.moment.min(), exposures=used.count()
        )
    )
    _check_users(users, folder)
    counts = _first_exposures(users, experiment.started)
    empty = [arm for place, arm in enumerate(experiment.names) if not any(key[0] == place for key in counts)]
    if empty:
        raise ValueError(
            f"no user was exposed to arm {empty[0]!r} of {folder}; "
            f"there is nothing to compare ({facts['exposures']:,} exposures of the other arms)"
        )
    return Exposed(
        users.drop("other"),
        used.select("user", "moment"),
        facts["exposures"],
        facts["rows"] - facts["exposures"] - facts["ahead"],
        facts["ahead"],
        facts["early"],
        facts["last"],
        counts,
    )


def _scan(files: tuple[Path, ...], engine: Engine) -> ir.Table:
    """The rows, with `ahead`. A list was seen when it was answered, even where it was asked for a later moment."""
    has_answered = all(ANSWERED in parquet.schema(file).names for file in files)
    scan = engine.scan(files, (*COLUMNS, ANSWERED) if has_answered else COLUMNS)
    if scan.moment.type() != dt.int64:  # differences of unsigned numbers would not fit
        scan = scan.mutate(moment=scan.moment.try_cast("int64"))
    if not has_answered:
        return scan.mutate(ahead=ibis.literal(False))
    moment, answered = scan.moment.cast("float64"), scan.answered.cast("float64")
    ahead = (moment > answered + AHEAD).fill_null(False)
    # Where `answered` is missing or NaN, the comparison is not true and the moment stays.
    seen = ibis.ifelse((answered < moment).fill_null(False), answered.floor(), moment).cast("int64")
    return scan.mutate(ahead=ahead, moment=seen)


def _facts(scan: ir.Table, experiment: Experiment) -> dict[str, int]:
    """What the checks need to know, in one pass over the rows."""
    used = scan.used
    found: dict[str, Any] = (
        scan.aggregate(
            rows=scan.count(),
            exposures=used.cast("int64").sum(),
            ahead=(~scan.forced & scan.ahead).cast("int64").sum(),
            early=(used & (scan.moment < experiment.started)).cast("int64").sum(),
            foreign=_is_foreign(scan, experiment).cast("int64").sum(),
            no_time=scan.moment.isnull().cast("int64").sum(),
            no_flag=scan.forced.isnull().cast("int64").sum(),
            unknown=(used & (scan.code < 0)).cast("int64").sum(),
            first=scan.moment.min(where=used),
            last=scan.moment.max(where=used),
        )
        .to_pyarrow()
        .to_pylist()[0]
    )
    return {name: 0 if value is None else int(value) for name, value in found.items()}


def _is_foreign(scan: ir.Table, experiment: Experiment) -> ir.BooleanValue:
    return (scan.experiment != experiment.name).fill_null(True)


def _check(facts: dict[str, int], scan: ir.Table, folder: Path, experiment: Experiment) -> None:
    if not facts["rows"]:
        raise ValueError(f"{folder} has no exposures: its Parquet files hold no rows")
    if facts["foreign"]:
        other = _one(scan.filter(_is_foreign(scan, experiment)), "experiment")
        raise ValueError(
            f"{folder} has {facts['foreign']:,} exposures of another experiment ({other!r}, not {experiment.name!r}); "
            "move those files into a folder of their own"
        )
    for what, missing in (("moment", "no_time"), ("forced", "no_flag")):
        if facts[missing]:
            raise ValueError(f"{folder} has {facts[missing]:,} exposures without {what}; mend or remove those rows")
    if not facts["exposures"] and facts["ahead"]:
        raise ValueError(
            f"{facts['ahead']:,} exposures of {folder} are for moments over a day after they were answered, and no "
            "other is left; is `moment` in milliseconds, or the server's clock wrong?"
        )
    if not facts["exposures"]:
        raise ValueError(f"all {facts['rows']:,} exposures of {folder} are forced (tests by hand); nobody is left")
    if facts["unknown"]:
        other = _one(scan.filter(scan.used & (scan.code < 0)), "arm")
        raise ValueError(
            f"{folder} has an arm that experiment.json does not name: {other!r}, in {facts['unknown']:,} rows; "
            f"it names {', '.join(experiment.arms)}"
        )
    if facts["last"] >= FAR_FUTURE:
        raise ValueError(
            f"{folder}: moments up to {facts['last']} are after the year 2099 when read as seconds; "
            "they look like milliseconds: divide them by 1000"
        )
    if facts["first"] <= 0:
        raise ValueError(f"{folder}: moment {facts['first']} is zero or negative; moments are Unix seconds")
    if facts["last"] < experiment.started:
        raise ValueError(
            f"all exposures of {folder} precede the start of the experiment, {say_moment(experiment.started)}; "
            "is `started` in experiment.json right?"
        )


def _check_users(users: ir.Table, folder: Path) -> None:
    """Refuse users without a name, and users who saw two arms."""
    nobody = users.filter(users.user.isnull() | (users.user == "")).exposures.sum().to_pyarrow().as_py()
    if nobody:
        raise ValueError(f"{folder} has {int(nobody):,} exposures without user_id; mend or remove those rows")
    both = users.filter(users.arm != users.other)
    count = int(both.count().to_pyarrow().as_py())
    if count:
        raise ValueError(
            f"{count:,} users saw two arms, {_one(both, 'user')!r} for one; an experiment needs one arm for each user: "
            "did the shares or the salt change under way?"
        )


def _first_exposures(users: ir.Table, started: int) -> dict[tuple[int, int, int], int]:
    by = users.group_by(
        "arm",
        day=((users["first"] - started) // DAY).cast("int64"),
        hour=((users["first"] % DAY) // HOUR).cast("int64"),
    )
    rows = by.aggregate(users=users.count()).to_pyarrow().to_pylist()
    return {(row["arm"], row["day"], row["hour"]): row["users"] for row in rows}


def _one(table: ir.Table, column: str) -> str:
    return str(table.select(column).order_by(column).limit(1).to_pyarrow().to_pylist()[0][column])


def _is_kind(column: str, kind: pa.DataType) -> bool:
    if column == "moment":
        return pa.types.is_integer(kind)
    if column == "forced":
        return pa.types.is_boolean(kind)
    if column == ANSWERED:
        return pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return parquet.is_text(kind)
