"""DataFrames in and out: events of any kind that Narwhals knows, and recommendations as a table of the same kind.

pandas, polars and Arrow tables are read column by column; none of the three is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import narwhals.stable.v2 as nw
import numpy as np
import numpy.typing as npt

from trope.data.printable import counted
from trope.serve.histories import Ranking
from trope.times import Moment, parse_moment

USER, ITEM, TIME = "user_id", "item_id", "timestamp"
SCORE, RANK, NAME, SOURCE = "score", "rank", "name", "source"
_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Events:
    """A table of events, read and checked, in its own order and with its own ids.

    users: distinct user ids in order of appearance, U of them; rows: [n] each event's user as a place in `users`.
    items: [n] original item ids. times: [n] Unix seconds. ticks: [n] times at the table's own resolution, to sort by.
    """

    frame: nw.DataFrame[Any]
    users: list[int | str]
    rows: npt.NDArray[np.int64]
    items: list[int | str]
    times: npt.NDArray[np.int64]
    ticks: npt.NDArray[np.int64]


def read_events(native: Any, text_items: bool, may_be_empty: bool = False) -> Events:
    """Read a DataFrame of events with columns user_id, item_id and timestamp.

    text_items: whether the catalogue's item ids are text; integers otherwise. may_be_empty: else no event is refused.
    """
    try:
        frame = nw.from_native(native, eager_only=True)
    except TypeError:
        kind = type(native).__name__
        advice = "; collect it first" if kind == "LazyFrame" else ""
        raise ValueError(f"events must be a pandas or polars DataFrame or an Arrow table, got {kind}{advice}") from None
    except nw.exceptions.DuplicateError:
        raise ValueError("events has two columns of one name; leave one of them out") from None
    for column in (USER, ITEM, TIME):
        if column not in frame.columns:
            has = ", ".join(frame.columns) or "none"
            raise ValueError(f"events must have a column {column!r}, got {has}; rename yours")
        if frame[column].null_count():
            without = counted(frame[column].null_count(), "row")
            raise ValueError(f"events has {without} without {column}; drop them")
    if len(frame) == 0 and not may_be_empty:
        raise ValueError("events is empty; give at least one event of each user to recommend for")
    if len(frame) == 0:  # its columns may be of any type
        nothing = np.empty(0, np.int64)
        return Events(frame, [], nothing, [], nothing, nothing)
    _check_items(frame[ITEM], text_items)
    places: dict[int | str, int] = {}
    rows = [places.setdefault(user, len(places)) for user in frame[USER].to_list()]
    times, ticks = _seconds(frame[TIME])
    return Events(frame, list(places), np.array(rows, np.int64), frame[ITEM].to_list(), times, ticks)


def column_per_user(events: Events, column: str) -> dict[int | str, Any]:
    """The one value of `column` that all rows of a user agree on."""
    found: dict[int | str, Any] = {}
    for row, value in zip(events.rows.tolist(), events.frame[column].to_list(), strict=True):
        user = events.users[row]
        if found.setdefault(user, value) != value:
            raise ValueError(
                f"column {column!r} must have one value per user, got {found[user]} and {value} for user {user!r}"
            )
    return found


def moments_per_user(t_now: Moment | Mapping[int | str, Moment], users: Sequence[int | str]) -> list[int]:
    """Unix seconds for each user, from one moment for all or from a mapping by user."""
    if not isinstance(t_now, Mapping):
        return [parse_moment(t_now)] * len(users)
    missing = [user for user in users if user not in t_now]
    if missing:
        raise ValueError(
            f"t_now has no moment for {len(missing):,} of {len(users):,} users, the first is {missing[0]!r}; "
            "give one for every user in events"
        )
    return [parse_moment(t_now[user], f"t_now of user {user!r}") for user in users]


def write_recommendations(
    events: Events,
    ranking: Ranking,
    items: list[int | str],
    more: Mapping[str, list[str]],
    text_items: bool,
) -> Any:
    """A DataFrame of the events' kind with user_id (typed as it came), item_id, score and rank, and `more` columns.

    ranking: its rows are places in `events.users`. items: its items' original ids. text_items: as in `read_events`.
    """
    _, first_events = np.unique(events.rows, return_index=True)
    users = events.frame[USER][first_events[ranking.rows].tolist()]
    backend = events.frame.implementation
    columns = {ITEM: items, SCORE: ranking.scores.tolist(), RANK: ranking.ranks.tolist(), **more}
    table = nw.from_dict(columns, backend=backend)
    # Said here, since a column without values has no type of its own.
    kinds = {ITEM: nw.String if text_items else nw.Int64, SCORE: nw.Float32, RANK: nw.Int64}
    kinds |= dict.fromkeys(more, nw.String)
    table = table.with_columns(users.alias(USER), *(nw.col(name).cast(kind) for name, kind in kinds.items()))
    return table.select(USER, ITEM, SCORE, RANK, *more).to_native()


def refuse_unknown(events: Events, dense: npt.NDArray[np.int64], known: int) -> NoReturn:
    """Refuse events with items that the model does not know; dense: [n] 0 for those, known: how many it knows."""
    where = np.flatnonzero(dense == 0)
    examples = list(dict.fromkeys(events.items[place] for place in where.tolist()))
    shown = ", ".join(repr(item) for item in examples[:3]) + (", ..." if len(examples) > 3 else "")
    raise ValueError(
        f"events has {counted(len(where), 'row')} with {counted(len(examples), 'item')} not among the model's "
        f"{known:,}: {shown}; pass unknown_items='drop' to leave them out, or train on data that has them"
    )


def _check_items(items: nw.Series[Any], text: bool) -> None:
    """Refuse item ids of another type than the catalogue's: 7 and '7' may be different items."""
    kind = items.dtype
    is_text = kind in (nw.String, nw.Categorical, nw.Enum, nw.Object)
    if text and not is_text:
        raise ValueError(f"{ITEM} must be text, as in the training data, got {kind}; cast the column")
    if not text and not kind.is_integer():
        raise ValueError(f"{ITEM} must be integers, as in the training data, got {kind}; cast the column")


def _seconds(times: nw.Series[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Unix seconds, and the column's own finer ticks; a datetime without a zone is UTC, as `trope prepare` reads it."""
    kind = times.dtype
    if kind == nw.Unknown and getattr(getattr(times.to_native(), "dtype", None), "tz", None) is not None:
        # pandas in a zone whose name Narwhals does not read: America/New_York, Etc/GMT+3.
        times = nw.from_native(times.to_native().dt.tz_convert("UTC"), series_only=True)
        kind = times.dtype
    if isinstance(kind, nw.Datetime):
        ticks = times.dt.timestamp("us").to_numpy().astype(np.int64)
        return ticks // _MICROSECONDS, ticks
    if kind.is_integer():
        seconds = times.to_numpy().astype(np.int64)
        return seconds, seconds
    raise ValueError(f"{TIME} must be whole Unix seconds or datetimes, got {kind}; convert the column")
