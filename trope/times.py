"""Times: units in seconds, one parser of moments, one parser of durations, and how both are said to people.

A moment is a Unix second (UTC). A duration is a number of seconds. Only the standard library is imported.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime
from numbers import Integral

MINUTE = 60
HOUR = 3_600
DAY = 86_400
WEEK = 7 * DAY
YEAR = 31_556_952
"""The mean Gregorian year, 365.2425 days."""
MONTH = YEAR // 12
MONDAY = 4 * DAY
"""The first Monday 00:00 UTC after the Unix epoch: weeks count from here."""

Moment = str | int | date | datetime
"""What `parse_moment` reads."""

_WRITE_MOMENT = (
    "write it like '2017-12-20T18:00:00Z', as a date like '2017-12-20' (its midnight UTC), as whole Unix seconds, or "
    "as a datetime with a zone"
)
_WRITE_DURATION = "write it like '90m', '12h', '14d' or '2w', or as whole seconds"
_MOST = 2**63 - 1
"""The largest moment or duration: arrays hold both as int64."""
_SHOWN_DIGITS = 30
_SUFFIXES = {"": 1, "s": 1, "m": MINUTE, "h": HOUR, "d": DAY, "w": WEEK}
# Letter and word of a unit, its seconds, and the amount from which on it is used: 90 days are days to most people.
_ROUGH_UNITS = (
    ("y", "year", YEAR, 1.0),
    ("mo", "month", MONTH, 3.3),
    ("d", "day", DAY, 1.0),
    ("h", "hour", HOUR, 1.0),
    ("min", "minute", MINUTE, 1.0),
    ("s", "second", 1, 0.0),
)


def parse_moment(moment: Moment, name: str = "t_now") -> int:
    """Unix seconds of a moment.

    moment: one of
        text in ISO 8601: a date ('2017-12-20' or '20171220', its midnight UTC), or a date and time with a zone
            ('2017-12-20T18:00:00Z');
        text of nine digits or more, or an int: Unix seconds;
        a date (its midnight UTC), or a datetime with a zone.
    name: what the moment is called in an error.

    A time of day without a zone is refused: the writer's zone would be a guess. Whether Unix seconds are plausible (no
    milliseconds, no zero) is checked later, with all other times; here they must fit into int64.
    """
    if isinstance(moment, Integral) and not isinstance(moment, bool):
        return _parse_seconds(str(int(moment)), name)
    if isinstance(moment, str):
        return _parse_text(moment.strip(), name)
    if isinstance(moment, date) and moment == moment:  # pandas' NaT is a datetime, and does not equal itself
        return _from_datetime(moment, name, str(moment)) if isinstance(moment, datetime) else _midnight(moment)
    raise ValueError(f"{name} must be a moment, got {moment!r} ({type(moment).__name__}); {_WRITE_MOMENT}")


def parse_duration(duration: str | int, name: str = "duration") -> int:
    """Seconds of a duration: whole seconds, or text such as '45s', '90m', '12h', '14d' or '2w'.

    name: what the duration is called in an error.
    """
    if isinstance(duration, Integral) and not isinstance(duration, bool):
        seconds = int(duration)
    else:
        # Python refuses to read thousands of digits, in words of its own; int64 has no more than 19.
        found = re.fullmatch(r"([0-9]{1,19})([smhdw]?)", duration.strip()) if isinstance(duration, str) else None
        seconds = int(found[1]) * _SUFFIXES[found[2]] if found else _MOST + 1
    if abs(seconds) > _MOST:
        shown = _shorten(duration) if isinstance(duration, str) else repr(duration)
        raise ValueError(f"{name} is not a duration: {shown}; {_WRITE_DURATION}")
    return seconds


def say_moment(seconds: int) -> str:
    """A moment to the second: '2017-12-20 18:00:00 UTC'."""
    return _say(seconds, "%Y-%m-%d %H:%M:%S UTC")


def say_iso(seconds: int) -> str:
    """A moment as an option takes it: '2017-12-20T18:00:00Z'."""
    return _say(seconds, "%Y-%m-%dT%H:%M:%SZ")


def say_minute(seconds: int) -> str:
    """A moment to the minute: '2017-12-20 18:00 UTC'."""
    return _say(seconds, "%Y-%m-%d %H:%M UTC")


def say_day(seconds: int) -> str:
    """A moment's day in UTC: '5 Jan 2015'."""
    return _say(seconds, "%d %b %Y").removeprefix("0")


def say_label(seconds: int) -> str:
    """A moment in two short lines, for a figure: '5 Jan 15' above '18:00'."""
    return _say(seconds, "%d %b %y\n%H:%M").removeprefix("0")


def say_duration(seconds: int) -> str:
    """A duration, exactly, in the largest unit up to days that it fills: '60 days', '12 hours', '1 day'."""
    units = ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute"), (1, "second"))
    size, word = next((size, word) for size, word in units if (seconds and seconds % size == 0) or size == 1)
    return _plural(f"{seconds // size}", word)


def say_roughly(seconds: float) -> str:
    """A duration to about two digits, in words: '1.5 minutes', '67 days', '4.2 months'; 'none' for NaN."""
    if math.isnan(seconds):
        return "none"
    amount, _, word = _round(seconds)
    return _plural(amount, word)


def say_short(seconds: float) -> str:
    """A duration to about two digits, in letters: '7 d', '67 d', '4.2 mo', '1.4 y'."""
    amount, letters, _ = _round(seconds)
    return f"{amount} {letters}"


def _parse_text(text: str, name: str) -> int:
    # Eight digits are a date to ISO 8601. As Unix seconds they would lie before March 1973, where no log begins.
    if re.fullmatch(r"[0-9]{9,}", text):
        return _parse_seconds(text, name)
    try:
        return _midnight(date.fromisoformat(text))
    except ValueError:
        pass
    if re.fullmatch(r"[0-9]+", text):
        raise ValueError(
            f"{name} is not a moment: {text!r}; eight digits are a date (20171220), and Unix seconds have nine digits "
            f"or more; {_WRITE_MOMENT}"
        )
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name} is not a moment: {text!r}; {_WRITE_MOMENT}") from None
    return _from_datetime(moment, name, text)


def _parse_seconds(digits: str, name: str) -> int:
    """Unix seconds that fit into int64. Python itself refuses to read thousands of digits, in words of its own."""
    count = len(digits.lstrip("-"))
    if count > len(str(_MOST)) or abs(int(digits)) > _MOST:
        raise ValueError(
            f"{name} is not a moment: {_shorten(digits)}; it has {count:,} digits, Unix seconds have ten; "
            f"{_WRITE_MOMENT}"
        )
    return int(digits)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_DIGITS else f"{text[:_SHOWN_DIGITS]}...")


def _midnight(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())


def _from_datetime(moment: datetime, name: str, shown: str) -> int:
    if moment.utcoffset() is None:
        raise ValueError(f"{name} has no time zone: {shown!r}; {_WRITE_MOMENT}")
    return math.floor(moment.timestamp())


def _say(seconds: int, form: str) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):  # the calendar ends with the year 9999
        return f"{seconds} s"


def _round(seconds: float) -> tuple[str, str, str]:
    """The amount in the largest unit that fits, and the unit's letters and word."""
    if seconds > 1000 * YEAR:
        return "over 1000", "y", "year"
    letters, word, size, _ = next(unit for unit in _ROUGH_UNITS if seconds >= 0.995 * unit[3] * unit[2])
    value = seconds / size
    is_whole = value >= 9.95 or math.isclose(value, round(value))
    return (f"{value:.0f}" if is_whole else f"{value:.1f}"), letters, word


def _plural(amount: str, word: str) -> str:
    return f"{amount} {word}" if amount == "1" else f"{amount} {word}s"
