"""The moments a recommendation is made for: people's ways of writing them, as Unix seconds.

Whether a number of seconds is plausible (no milliseconds, no zero) is checked later, with all other times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime

import numpy as np

Moment = str | int | date | datetime
"""ISO 8601 with a zone, a plain date (its midnight UTC), Unix seconds, or a datetime with a zone."""
_WAYS = (
    "write it like '2017-12-20T18:00:00Z', as a date like '2017-12-20' (its midnight UTC), as whole Unix seconds, or "
    "as a datetime with a zone"
)


def unix_seconds(moment: Moment, name: str = "t_now") -> int:
    """Unix seconds of one moment; a time of day without a zone is refused, since the reader's zone would be a guess."""
    if isinstance(moment, (int, np.integer)) and not isinstance(moment, bool):
        return int(moment)
    if isinstance(moment, str):
        # Eight digits are a date to ISO 8601; a Unix second since 1973 has nine or more.
        if re.fullmatch(r"\d{9,}", moment):
            return int(moment)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", moment):
            return _midnight(_from_iso(moment, name))
        return _from_datetime(_from_iso(moment, name), name, moment)
    if isinstance(moment, datetime):
        return _from_datetime(moment, name, str(moment))
    if isinstance(moment, date):
        return _midnight(moment)
    raise ValueError(f"{name} must be a moment, got {moment!r} ({type(moment).__name__}); {_WAYS}")


def seconds_per_user(t_now: Moment | Mapping[int | str, Moment], users: Sequence[int | str]) -> list[int]:
    """One moment for each user, from one for all or from a mapping by user."""
    if not isinstance(t_now, Mapping):
        return [unix_seconds(t_now)] * len(users)
    missing = [user for user in users if user not in t_now]
    if missing:
        raise ValueError(
            f"t_now has no moment for {len(missing):,} of {len(users):,} users, the first is {missing[0]!r}; "
            "give one for every user in events"
        )
    return [unix_seconds(t_now[user], f"t_now of user {user!r}") for user in users]


def _midnight(day: date) -> int:
    """The day's first second, in UTC as `trope prepare` reads dates."""
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())


def _from_iso(text: str, name: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name} is not a moment: {text!r}; {_WAYS}") from None


def _from_datetime(moment: datetime, name: str, shown: str) -> int:
    if moment.utcoffset() is None:
        raise ValueError(f"{name} has no time zone: {shown!r}; {_WAYS}")
    return int(moment.timestamp() // 1)
