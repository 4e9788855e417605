"""Moments and durations: how people write them, what is refused, and how they are said back."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from trope.cli.main import app
from trope.times import (
    DAY,
    HOUR,
    MINUTE,
    MONDAY,
    WEEK,
    YEAR,
    parse_duration,
    parse_moment,
    say_day,
    say_duration,
    say_label,
    say_minute,
    say_moment,
    say_roughly,
    say_short,
)

MOMENT = 1_513_792_800  # 2017-12-20T18:00:00Z
MIDNIGHT = 1_513_728_000


@pytest.mark.parametrize(
    "moment",
    [
        "2017-12-20T18:00:00Z",
        " 2017-12-20T18:00:00Z\n",
        "2017-12-20 18:00Z",
        "20171220T180000Z",
        "2017-12-20T19:00:00+01:00",
        "1513792800",
        1_513_792_800,
        np.int64(1_513_792_800),
        np.int32(1_513_792_800),
        datetime(2017, 12, 20, 18, tzinfo=UTC),
        datetime(2017, 12, 20, 19, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=1))),
        pd.Timestamp("2017-12-20 18:00", tz="UTC"),
    ],
)
def test_ways_to_write_a_moment(moment: Any) -> None:
    assert parse_moment(moment) == MOMENT


@pytest.mark.parametrize("day", ["2017-12-20", "20171220", "2017-W51-3", date(2017, 12, 20)])
def test_a_date_is_its_midnight_utc(day: Any) -> None:
    """Eight digits too: read as Unix seconds they would be a day of August 1970."""
    assert parse_moment(day) == MIDNIGHT


def test_a_fraction_of_a_second_is_dropped_towards_the_past() -> None:
    assert parse_moment("1969-12-31T23:59:59.5Z") == -1
    assert parse_moment("1970-01-01T00:00:00.5Z") == 0


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("2017-12-20T18:00:00", "no time zone"),
        (datetime(2017, 12, 20, 18), "no time zone"),
        ("2017-13-20", "not a moment"),
        ("20171320", "not a moment: '20171320'; eight digits are a date"),
        ("99999999", "not a moment: '99999999'; eight digits are a date"),
        ("2017", "not a moment: '2017'; eight digits are a date"),
        ("0", "not a moment"),
        ("", "not a moment"),
        ("-1513792800", "not a moment"),
        ("1513792800.5", "not a moment"),
        ("Christmas", "not a moment"),
        (1_513_792_800.0, "float"),
        (True, "bool"),
        (None, "NoneType"),
        (pd.NaT, "NaT"),
        ("1" * 23, f"not a moment: '{'1' * 23}'; it has 23 digits, Unix seconds have ten"),
        ("9" * 19, "it has 19 digits, Unix seconds have ten"),
        (10**22, "it has 23 digits, Unix seconds have ten"),
        (-(10**19), "it has 20 digits, Unix seconds have ten"),
        ("1" * 5_000, r"not a moment: '1{30}\.\.\.'; it has 5,000 digits, Unix seconds have ten"),
    ],
)
def test_moments_that_are_refused(moment: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^--at.*{said}.*write it like '2017-12-20T18:00:00Z'"):
        parse_moment(moment, "--at")


@given(st.integers(0, 4_102_444_799))
def test_a_moment_that_is_said_can_be_read(seconds: int) -> None:
    assert parse_moment(say_moment(seconds).replace(" UTC", "Z")) == seconds


@pytest.mark.parametrize("flag", ["--since", "--until", "--cutoff"])
def test_prepare_refuses_a_moment_that_it_would_misread(flag: str, tmp_path: Any) -> None:
    """By its flag, before any file is looked for."""
    command = ["prepare", str(tmp_path / "none.csv"), "--out", str(tmp_path / "out"), flag, "2017122"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{flag} is not a moment: '2017122'; eight digits are a date")
    result = CliRunner().invoke(app, [*command[:-1], "12345678901234567890123"])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(
        f"{flag} is not a moment: '12345678901234567890123'; it has 23 digits, Unix"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), (90, 90), ("45s", 45), ("90m", 5_400), ("12h", 12 * HOUR), ("14d", 14 * DAY), (" 2w ", 2 * WEEK)],
)
def test_durations(text: str | int, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["long", "1.5d", "-1d", "d", "", "1 day", "1y", True, None, 1.5, "9" * 19, 10**30, "9" * 17 + "w"]
)
def test_durations_that_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^--window is not a duration: .*write it like '90m', '12h', '14d'"):
        parse_duration(text, "--window")


def test_a_duration_of_thousands_of_digits_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^--window is not a duration: '1{30}\.\.\.'; write it like"):
        parse_duration("1" * 5_000, "--window")


def test_moments_are_said() -> None:
    assert say_moment(MOMENT + 7) == "2017-12-20 18:00:07 UTC"
    assert say_minute(MOMENT + 7) == "2017-12-20 18:00 UTC"
    assert (say_day(MOMENT), say_day(1_420_416_000)) == ("20 Dec 2017", "5 Jan 2015")
    assert say_label(1_420_416_000 + 61 * MINUTE) == "5 Jan 15\n01:01"


def test_a_moment_that_the_calendar_does_not_have_is_said_in_seconds() -> None:
    assert say_moment(10**15) == say_day(10**15) == "1000000000000000 s"


def test_durations_are_said_exactly() -> None:
    told = {
        0: "0 seconds",
        1: "1 second",
        90: "90 seconds",
        90 * MINUTE: "90 minutes",
        2 * HOUR: "2 hours",
        36 * HOUR: "36 hours",
        DAY: "1 day",
        60 * DAY: "60 days",
        400 * DAY: "400 days",
    }
    assert {seconds: say_duration(seconds) for seconds in told} == told


def test_durations_are_said_roughly() -> None:
    told = {
        0: ("0 seconds", "0 s"),
        1: ("1 second", "1 s"),
        90: ("1.5 minutes", "1.5 min"),
        2 * HOUR: ("2 hours", "2 h"),
        2 * DAY: ("2 days", "2 d"),
        67.4 * DAY: ("67 days", "67 d"),
        200 * DAY: ("6.6 months", "6.6 mo"),
        YEAR: ("1 year", "1 y"),
        1e12: ("over 1000 years", "over 1000 y"),
    }
    assert {seconds: (say_roughly(seconds), say_short(seconds)) for seconds in told} == told
    assert say_roughly(float("nan")) == "none"


def test_weeks_count_from_a_monday() -> None:
    assert datetime.fromtimestamp(MONDAY, UTC).weekday() == 0


def test_times_needs_the_standard_library_alone() -> None:
    """The file by itself, since importing the package loads torch."""
    code = (
        "import runpy, sys; before = set(sys.modules); runpy.run_path(sys.argv[1]); "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    path = sys.modules["trope.times"].__file__
    assert path is not None
    command = [sys.executable, "-I", "-c", code, path]
    assert not subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
