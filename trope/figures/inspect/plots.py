"""The plots on the page of `trope inspect`, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from trope.data.inspect.durations import EDGES, UNIT_EDGES, UNITS, count_durations
from trope.data.inspect.measure import Report
from trope.data.inspect.summary import MONTHS, PLAIN_DATES, WEEKDAYS, length_bins
from trope.figures.style import BLUE, PALE, VERMILION, content, style

_WIDTH, _FONT_SIZE = 6.4, 10  # smaller than a run's figures: two stand side by side


class Plot(NamedTuple):
    """A plot's title, how to read it, and its SVG."""

    title: str
    caption: str
    svg: bytes


def plots(report: Report) -> Iterator[Plot]:
    """Yield the plots in the order of the page."""
    yield _draw(_calendar, _CALENDAR, report, height=2.4)
    yield _draw(_timeline, _TIMELINE, report, height=2.4)
    yield _draw(_gaps, _GAPS, report)
    yield _draw(_week, _WEEK, report) if report.has_hours else _draw(_weekdays, _WEEKDAYS, report)
    yield _draw(_lengths, _LENGTHS, report)
    yield _draw(_months, _MONTHS, report)
    yield _draw(_lifetimes, _LIFETIMES, report)
    yield _draw(_popularity, _POPULARITY, report)


_CALENDAR = (
    "Explained: how much the item tells about the phase of the cycle, beyond chance. Items that come and go raise it. "
    "Repeating: how much one cycle tells about the next. A calendar-aware model can use that part."
)
_TIMELINE = "Events over the whole log. A ragged end or a jump may be a change in how the data were collected."
_GAPS = "The time scales that an encoding has to resolve: to the user's next event, and back to the same item."
_WEEK = "When users are active. Times are UTC, so a shop in another time zone is shifted by its offset."
_WEEKDAYS = f"When users are active. There are no hours: {PLAIN_DATES}."
_LENGTHS = "How many events a user has. Choose the model's longest history (model.max_len) by it."
_MONTHS = "Activity by month of the year. A log that covers some months more often shows it here, too."
_LIFETIMES = "From an item's first to its last event. If lives are short, a model must learn new items quickly."
_POPULARITY = "The share of all events that the most popular items have."


def _draw(plot: Callable[[Report, Axes], None], caption: str, report: Report, height: float = 3.0) -> Plot:
    with style(), matplotlib.rc_context({"font.size": _FONT_SIZE}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        plot(report, axes)
    return Plot(axes.get_title(loc="left"), caption, content(figure, "svg"))


def _calendar(report: Report, axes: Axes) -> None:
    axes.set_title("Calendar structure: % of the phase told by the item")
    names = [signal.name for signal in report.signals]
    at = np.arange(len(names))
    for offset, label, colour, unknown, values in (
        (-0.18, "repeating", BLUE, "cannot tell", [100 * signal.repeating for signal in report.signals]),
        (0.18, "explained, drift included", PALE, "", [100 * signal.explained for signal in report.signals]),
    ):
        bars = axes.barh(at + offset, values, 0.34, color=colour, label=label)
        told = ["<0.1" if 0 < value < 0.05 else f"{value:.1f}" for value in values]  # as `percent` of the summary
        # Where the log cannot tell there is no bar, and the words stand in its place, once.
        words = [text if signal.is_told else unknown for text, signal in zip(told, report.signals, strict=True)]
        axes.bar_label(bars, words, padding=3)
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    # Below the plot: bars may reach anywhere in it.
    axes.figure.legend(frameon=False, loc="outside lower left", ncols=2)


def _timeline(report: Report, axes: Axes) -> None:
    days, counts = report.timeline()
    steps = ((1, "day"), (7, "week"), (28, "four weeks"))
    step, word = next(((size, name) for size, name in steps if len(days) <= 200 * size), steps[-1])
    # The last, incomplete step would look like a fall.
    whole = max(1, len(days) // step)
    sums = np.add.reduceat(counts, np.arange(0, len(counts), step))[:whole]
    axes.set_title(f"Events per {word}")
    axes.fill_between(days[::step][:whole], sums, color=BLUE, alpha=0.8, linewidth=0)
    axes.set_ylim(bottom=0)
    dates = ConciseDateFormatter(axes.xaxis.get_major_locator())
    axes.xaxis.set_major_formatter(dates)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _gaps(report: Report, axes: Axes) -> None:
    axes.set_title("Time between events")
    _durations(axes, report.gaps, BLUE, "to the next event", fill=True)
    if report.returns.sum():
        _durations(axes, report.returns, VERMILION, "since the same item", fill=False)
    _duration_axes(axes)
    axes.set_ylabel("% of gaps above 0 s")


def _lifetimes(report: Report, axes: Axes) -> None:
    axes.set_title("Item lifetime")
    _durations(axes, count_durations(report.lifetimes), BLUE, "items", fill=True)
    _duration_axes(axes)
    axes.set_ylabel("% of items above 0 s")


def _durations(axes: Axes, counts: NDArray[np.int64], colour: str, label: str, fill: bool) -> None:
    """Draw a histogram of durations: each unit is as wide as the others, and logarithmic inside.

    Durations of zero, which would dwarf the rest in a shop that stamps whole baskets, are told in the legend.
    """
    edges = np.interp(np.log(EDGES), np.log(UNIT_EDGES), np.arange(len(UNIT_EDGES)))
    above = counts[1:-1]
    if counts[0] >= 0.005 * counts.sum():
        label += f" ({100 * counts[0] / max(counts.sum(), 1):.0f} % in the same second)"
    share = 100 * above / max(above.sum(), 1)
    axes.stairs(share, edges, fill=fill, color=colour, label=label, linewidth=1.6, alpha=0.8 if fill else 1.0)


def _duration_axes(axes: Axes) -> None:
    """Name the units, and leave head room for the legend; after the last histogram, whose height counts as well."""
    units = np.arange(len(UNIT_EDGES))
    axes.set_xticks(units, [""] * len(units))
    axes.set_xticks(units[:-1] + 0.5, UNITS[1:], minor=True)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlim(0, units[-1])
    axes.margins(y=0.25 if len(axes.patches) == 1 else 0.4)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _week(report: Report, axes: Axes) -> None:
    axes.set_title("Events by weekday and hour (UTC)")
    share = 100 * report.week() / report.events
    image = axes.imshow(share, aspect="auto", cmap="cividis", vmin=0)
    axes.set_yticks(range(7), WEEKDAYS)
    axes.set_xticks(range(0, 24, 3), [f"{hour:02d}:00" for hour in range(0, 24, 3)])
    axes.figure.colorbar(image, ax=axes, label="% of events")


def _weekdays(report: Report, axes: Axes) -> None:
    axes.set_title("Events by weekday (UTC)")
    axes.bar(range(7), 100 * report.week().sum(axis=1) / report.events, color=BLUE, alpha=0.8)
    axes.set_xticks(range(7), WEEKDAYS)
    axes.set_ylabel("% of events")


def _lengths(report: Report, axes: Axes) -> None:
    bins = length_bins(report)
    axes.set_title("Events per user")
    axes.bar(range(len(bins)), [100 * count / report.users for count in bins.values()], color=BLUE, alpha=0.8)
    axes.set_xticks(range(len(bins)), list(bins), rotation=30 if len(bins) > 6 else 0)
    axes.set_ylabel("% of users")


def _months(report: Report, axes: Axes) -> None:
    axes.set_title("Events by month (UTC)")
    axes.bar(range(12), 100 * report.months() / report.events, color=BLUE, alpha=0.8)
    axes.set_xticks(range(12), MONTHS)
    axes.set_ylabel("% of events")


def _popularity(report: Report, axes: Axes) -> None:
    axes.set_title("Concentration on popular items")
    items = np.arange(1, len(report.popularity) + 1) / len(report.popularity)
    # A thousand points draw the curve of a catalogue of any size.
    points = np.unique(np.geomspace(1, len(items), 1000).astype(np.int64)) - 1
    axes.plot(100 * items[points], 100 * np.cumsum(report.popularity)[points] / report.events, color=BLUE, linewidth=2)
    axes.set_xscale("log")
    axes.set_xlabel("top % of items")
    axes.set_ylabel("% of events")
    axes.set_ylim(0, 103)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(LogFormatter())  # the default writes TeX, which is not typeset here
