"""`trope inspect`: numbers against hand counts and plain Python, calendar verdicts against the calendar shop."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from data_logs import Event, loose, prepared, random_log, write_parquet
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.inspect import CalendarSignal, Report, durations, inspect, measure
from trope.data.inspect.calendar import calendar_signals, mutual_information
from trope.data.inspect.summary import calendar_findings, key_figures, length_bins
from trope.data.synthetic import CalendarShop, write_events
from trope.figures.inspect import plots
from trope.figures.inspect.page import write_page
from trope.figures.inspect.terminal import show_report
from trope.figures.style import style
from trope.times import DAY, YEAR

MOMENT = int(datetime(2024, 2, 29, 13, 30, tzinfo=UTC).timestamp())  # a Thursday


def report_of(rows: list[Event], tmp_path: Path) -> Report:
    prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "data")
    return inspect(tmp_path / "data", progress=False)


def test_counts_by_hand(tmp_path: Path) -> None:
    after = [0, 0, 5, 90, 90 + 2 * DAY]
    rows = [("ann", item, MOMENT + later) for item, later in zip("xyxzx", after, strict=True)]
    rows += [("bob", "y", MOMENT), ("bob", "z", MOMENT + YEAR), ("bob", "z", MOMENT + YEAR)]
    report = report_of(rows, tmp_path)
    assert (report.users, report.items, report.events) == (2, 3, 8)
    assert (report.first, report.last) == (MOMENT, MOMENT + YEAR)
    gaps = {"same second": 2, "seconds": 1, "minutes": 1, "days": 1, "years": 1}
    assert durations.by_unit(report.gaps) == dict.fromkeys(durations.UNITS, 0) | gaps
    returns = {"same second": 1, "seconds": 1, "days": 1}
    assert durations.by_unit(report.returns) == dict.fromkeys(durations.UNITS, 0) | returns
    assert report.repeats == 3 / 8
    assert report.ties == 4 / 8
    assert length_bins(report) == {"2-3": 1, "4-7": 1}
    assert report.popularity.tolist() == [3, 3, 2]
    # x lives two days, y not at all, z from ann's purchase to bob's, 90 seconds short of a year.
    assert report.lifetimes.tolist() == [0, 90 + 2 * DAY, YEAR - 90]
    week = report.week()
    assert week.sum() == 8
    assert week[3, 13] == 5  # Thursday
    assert week[5, 13] == 1  # Saturday
    months = report.months()
    assert (months[1], months[2]) == (7, 1)
    days, counts = report.timeline()
    assert str(days[0]) == "2024-02-29"
    assert counts.sum() == 8


def test_random_log_against_plain_python(tmp_path: Path) -> None:
    rows = random_log(rows=500, spread=400)
    report = report_of(rows, tmp_path)
    by_user: dict[int | str, list[tuple[int, int | str]]] = {}
    for user, item, time in rows:
        by_user.setdefault(user, []).append((time, item))
    gaps: list[int] = []
    repeats = ties = 0
    for events in by_user.values():
        times = sorted(time for time, _ in events)
        gaps += [later - sooner for sooner, later in pairwise(times)]
        repeats += len(events) - len({item for _, item in events})
        ties += sum(count for count in Counter(times).values() if count > 1)
    np.testing.assert_array_equal(report.gaps, durations.count_durations(np.array(gaps)))
    assert report.repeats == repeats / len(rows)
    assert report.ties == ties / len(rows)
    hours = Counter(datetime.fromtimestamp(time, UTC).hour for _, _, time in rows)
    assert report.week().sum(axis=0).tolist() == [hours[hour] for hour in range(24)]


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = report_of(random_log(rows=600), tmp_path)
    monkeypatch.setattr(measure, "PIECE", 37)
    parts = inspect(tmp_path / "data", progress=False)
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(value, getattr(parts, name), err_msg=name)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PIECE", 1 << 14)
    monkeypatch.setattr(measure, "SAMPLE", 1 << 14)
    shop = CalendarShop(users=1_000, mean_events=2_000, items=200)
    prepared(write_events(tmp_path / "shop.parquet", shop, progress=False), tmp_path / "data")
    tracemalloc.start()
    report = inspect(tmp_path / "data", progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The times alone would take 8 bytes an event.
    assert peak < 6 * report.events


def test_durations() -> None:
    seconds = np.array([0, 1, 59, 60, 3_599, 86_400, 604_800, 31_556_952])
    units = durations.by_unit(durations.count_durations(seconds))
    assert list(units.values()) == [1, 2, 2, 0, 1, 1, 0, 1]
    assert durations.median(durations.count_durations(np.full(9, 1_000))) == pytest.approx(1_000, rel=0.5)
    assert durations.median(durations.count_durations(np.zeros(3, np.int64))) == 0


def test_mutual_information() -> None:
    assert mutual_information(np.diag([5.0, 5.0, 5.0, 5.0])) == pytest.approx(np.log(4))
    assert mutual_information(np.outer([1.0, 2.0, 3.0], [4.0, 5.0])) == pytest.approx(0)


@pytest.mark.parametrize(
    ("shop", "verdicts"),
    [
        (CalendarShop(), ["clear", "strong", "strong"]),
        (CalendarShop.only("yearly"), ["none seen", "none seen", "strong"]),
        (CalendarShop.only("weekly"), ["none seen", "strong", "none seen"]),
        (CalendarShop.only("daily"), ["clear", "none seen", "none seen"]),
        (CalendarShop.only("lifetimes", "sessions", "replenishment"), ["none seen"] * 3),
        (CalendarShop.only(), ["none seen"] * 3),
    ],
    ids=["all", "yearly", "weekly", "daily", "drift", "off"],
)
def test_calendar_verdicts(shop: CalendarShop, verdicts: list[str], tmp_path: Path) -> None:
    prepared(write_events(tmp_path / "shop.parquet", shop, progress=False), tmp_path / "data")
    assert [signal.verdict for signal in inspect(tmp_path / "data", progress=False).signals] == verdicts


def test_a_short_log_has_no_seasons() -> None:
    times = MOMENT + np.arange(5_000) * 600
    signals = calendar_signals(np.arange(5_000) % 7, times)
    assert [signal.verdict for signal in signals][2] == "cannot tell"


def dated(rows: list[Event], zone: str | None = None) -> list[Event]:
    """The log with dates instead of moments: midnights in UTC, or in a zone with daylight saving."""
    if zone is None:
        return [(user, item, time - time % DAY) for user, item, time in rows]
    place = ZoneInfo(zone)
    days = [(u, i, datetime.fromtimestamp(time, place).date()) for u, i, time in rows]
    return [(u, i, int(datetime(d.year, d.month, d.day, tzinfo=place).timestamp())) for u, i, d in days]


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_a_log_of_plain_dates_cannot_tell_the_hour(tmp_path: Path, zone: str | None) -> None:
    report = report_of(dated(random_log(rows=2_000, spread=YEAR), zone), tmp_path)
    hour, week, _ = report.signals
    assert hour.verdict == "cannot tell" and week.verdict != "cannot tell" and not report.has_hours
    sentence = "Hour of day: cannot tell; the log has plain dates, without a time of day."
    assert sentence in calendar_findings(report)
    console = Console(width=80, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    show_report(report, console)
    text = console.export_text()
    assert "hour: cannot tell" in text and " 03 " not in text and "weekday" in text
    (row,) = [line for line in text.splitlines() if line.strip().startswith("hour of day")]
    assert "%" not in row and "cannot tell" in row
    page = write_page(report, tmp_path / "page.html").read_text()
    assert sentence in page and "by weekday and hour" not in page and 'alt="Events by weekday' in page


def test_a_log_of_moments_tells_the_hour(tmp_path: Path) -> None:
    report = report_of(random_log(rows=2_000, spread=YEAR), tmp_path)
    assert report.has_hours and report.signals[0].verdict == "none seen"
    assert "by weekday and hour" in write_page(report, tmp_path / "page.html").read_text()


def test_a_log_of_one_weekday_cannot_tell_the_week() -> None:
    monday = 1_600_041_600
    signals = calendar_signals(np.arange(5_000) % 7, monday + np.arange(5_000) % 100 * 7 * DAY)
    assert [signal.verdict for signal in signals[:2]] == ["cannot tell", "cannot tell"]
    report = SimpleNamespace(signals=signals)
    assert "Day of week: cannot tell; all events have the same day of week." in calendar_findings(report)


@pytest.mark.parametrize(("years", "said"), [(1.97, "just under two"), (1.94, "1.9"), (0.123, "0.12")])
def test_less_than_two_cycles_are_not_said_to_be_two(years: float, said: str) -> None:
    report = SimpleNamespace(signals=[CalendarSignal("time of year", years, 0.3, 0.2, 0.0)])
    sentence = f"Time of year: cannot tell; the log covers {said} cycles, and a rhythm shows only from two on."
    assert sentence in calendar_findings(report)


def test_a_log_of_one_moment_cannot_tell_anything(tmp_path: Path) -> None:
    report = report_of([(user, item, MOMENT) for user in range(6) for item in range(6)], tmp_path)
    console = Console(width=80, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    show_report(report, console)
    text = console.export_text()
    assert "Hour of day: cannot tell; all events have the same hour of day." in text
    assert "plain dates" not in text and "This log cannot tell whether the calendar matters" in text


def test_items_of_one_event_have_no_lifetime(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(n // 6, n, MOMENT + n) for n in range(36)])
    prepared(log, tmp_path / "data", loose())
    found = dict(key_figures(inspect(tmp_path / "data", progress=False)))
    assert found["item lifetime"] == "every item has one event only"


def test_terminal_view_fits_80_columns(tmp_path: Path) -> None:
    report = report_of(random_log(rows=600), tmp_path)
    console = Console(width=80, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    show_report(report, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(line.startswith("  ") for line in text[text.index("  Hour of day") :].splitlines())
    for word in ("events per user", "gap to the next event", "weekday", "month", "time of year", "UTC"):
        assert word in text


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    prepared(write_parquet(tmp_path / "log.parquet", random_log(rows=600)), tmp_path / "<img src=x onerror=alert(1)>")
    report = inspect(tmp_path / "<img src=x onerror=alert(1)>", progress=False)
    first, second = (write_page(report, tmp_path / name).read_text() for name in ("a.html", "b.html"))
    assert first == second
    assert first.count("<img") == first.count(' src="data:image/svg+xml;base64,') == 8
    assert first.count("&lt;img src=x onerror=alert(1)&gt;") == 2, "in the tab's title and in the heading"
    assert "<img src" not in first and "<script" not in first and "http" not in first
    assert not list(tmp_path.glob(".*"))


def test_no_line_is_cut_off_and_none_runs_through_the_legend() -> None:
    """Returns to an item pile up in one bin and rise far above the gaps, which are spread."""
    gaps, returns = (np.zeros(len(durations.EDGES) + 1, np.int64) for _ in range(2))
    gaps[1:-1], returns[20] = 10, 100
    axes = Figure(figsize=(6.4, 3.0), layout="constrained").subplots()
    plots._gaps(SimpleNamespace(gaps=gaps, returns=returns), axes)
    axes.figure.draw_without_rendering()
    bottom, top = axes.get_ylim()
    legend = axes.get_legend().get_window_extent()
    legend_bottom = axes.transData.inverted().transform(legend.min)[1]
    assert bottom == 0 and 100 < legend_bottom < top


@pytest.mark.parametrize("shares", [(0.9, 0.9, 0.9), (0.0, 0.0, 0.9), (0.9, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_legend_of_the_calendar_covers_no_bar(shares: tuple[float, float, float]) -> None:
    names = ("hour of day", "day of week", "time of year")
    signals = [CalendarSignal(name, 5.0, share, share, 0.0) for name, share in zip(names, shares, strict=True)]
    figure = Figure(figsize=(6.4, 2.4), layout="constrained")
    axes = figure.subplots()
    plots._calendar(SimpleNamespace(signals=signals), axes)
    figure.draw_without_rendering()
    (legend,) = [*figure.legends, *([axes.get_legend()] if axes.get_legend() else [])]
    box = legend.get_window_extent()
    covered = [artist for artist in (*axes.patches, *axes.texts) if box.overlaps(artist.get_window_extent())]
    assert not covered and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1


def test_a_bar_with_a_length_is_not_called_zero() -> None:
    axes = Figure(layout="constrained").subplots()
    plots._calendar(SimpleNamespace(signals=[CalendarSignal("day of week", 5.0, 0.0003, 0.0, 0.0)]), axes)
    assert {text.get_text() for text in axes.texts} == {"<0.1", "0.0"}


def test_the_ticks_of_a_small_catalogue_are_numbers() -> None:
    axes = Figure(figsize=(6.4, 3.0), layout="constrained").subplots()
    with style():
        plots._popularity(SimpleNamespace(popularity=np.array([9, 5, 3, 2, 1, 1]), events=21), axes)
        axes.figure.draw_without_rendering()
        ticks = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert "40" in ticks and "100" in ticks and "$" not in "".join(ticks)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    report_of(random_log(rows=600), tmp_path)
    items = np.load(tmp_path / "data" / "items.npy")
    items[:] = 10**6
    np.save(tmp_path / "data" / "items.npy", items)
    with pytest.raises(ValueError, match=r"items\.npy does not match its checksum"):
        inspect(tmp_path / "data", progress=False)


def test_command(tmp_path: Path) -> None:
    report_of(random_log(rows=600), tmp_path)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "data"), "--html", str(page)])
    assert result.exit_code == 0 and result.stderr == "", result.output  # no bar in a file
    assert page.read_text().startswith("<!doctype html>")
    folder = CliRunner().invoke(app, ["inspect", str(tmp_path / "data"), "--html", str(tmp_path)])
    assert "is a folder; name a file" in str(folder.exception) and folder.stdout == ""  # nothing was counted
    missing = CliRunner().invoke(app, ["inspect", str(tmp_path / "nothing")])
    assert isinstance(missing.exception, FileNotFoundError)
    assert "nothing is not there; a prepared dataset is made by" in str(missing.exception)
