"""Two figures of an analysis: all lifts with their intervals (a forest plot), and the lift day by day."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trope.figures.style import BLUE, GREEN, GREY, INK, PURPLE, VERMILION, Drawn, finish, page, unavailable
from trope.online.analysis.analyse import Analysis, Comparison
from trope.online.analysis.verdict import percent
from trope.times import say_day

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, VERMILION, GREEN, PURPLE)
_MARKS = ("o", "s", "D", "^")
_MOST_PANELS = 4
_MOST_SEGMENTS = 40
_INTERVALS = {
    "fixed": "Bars are intervals of a single test.",
    "group-sequential": "Bars are repeated intervals: they hold at all planned looks together.",
    "always": "Bars belong to a confidence sequence: they hold at all looks together.",
}


def draw(analysis: Analysis, title: str) -> list[Drawn]:
    """The forest plot and the lift over days."""
    return [_forest(analysis, title), _days(analysis)]


def _forest(analysis: Analysis, title: str) -> Drawn:
    """One row for each comparison, and below them one for each of the first segments."""
    rows: list[tuple[str, float, float, float, bool, int]] = []
    alpha, arms = analysis.question.alpha, analysis.experiment.treatments
    several = len(arms) > 1
    for each in analysis.comparisons:
        name = f"{each.metric.label}, {each.arm}" if several else each.metric.label
        reading = each.reading
        rows.append(
            (name, reading.estimate.lift, reading.low, reading.high, each.adjusted < alpha, arms.index(each.arm))
        )
    top = len(rows)
    for row in analysis.segments[:_MOST_SEGMENTS]:
        name = f"{row.metric.label}, {row.column} {row.value}" + (f", {row.arm}" if several else "")
        found = row.estimate
        rows.append((name, found.lift, found.low, found.high, row.adjusted < alpha, arms.index(row.arm)))
    shown = [row for row in rows if all(map(math.isfinite, row[1:4]))]
    if not shown:
        return unavailable("forest", "Lifts", "No metric has a lift with an interval yet.")
    figure = page(1.6 + 0.42 * len(rows))
    axes = figure.subplots()
    for place, (_, lift, low, high, strong, arm) in enumerate(rows):
        if not all(map(math.isfinite, (lift, low, high))):
            text = f"{percent(lift)}, no interval" if math.isfinite(lift) else "no lift"
            axes.text(0, place, text, va="center", color=GREY)
            continue
        colour = _COLOURS[arm % len(_COLOURS)]
        axes.plot([100 * low, 100 * high], [place, place], color=colour, lw=3 if strong else 1.6, solid_capstyle="butt")
        axes.plot(100 * lift, place, _MARKS[arm % len(_MARKS)], ms=8, color=colour, mfc=colour if strong else "white")
        axes.annotate(
            percent(lift) + (" *" if strong else ""), (100 * high, place), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=9.5, fontweight="bold" if strong else "normal",
        )  # fmt: skip
    if 0 < top < len(rows):
        axes.axhline(top - 0.5, color=GREY, lw=0.8, ls=":")
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel(f"relative lift against {analysis.experiment.control} (%)")
    caption = f"{_INTERVALS[analysis.question.plan.kind]} Filled marks and stars: adjusted p below {alpha:g}."
    left = len(analysis.segments) - _MOST_SEGMENTS
    if left > 0:
        caption += f" {left} rows of segments are left out; the table has all."
    return finish("forest", figure, title, caption)


def _days(analysis: Analysis) -> Drawn:
    """One panel for each of the first metrics; one line for each arm."""
    metrics = list(dict.fromkeys(each.metric for each in analysis.comparisons))[:_MOST_PANELS]
    panels: dict[str, list[Comparison]] = {
        metric.label: [each for each in analysis.comparisons if each.metric == metric and each.reading.points]
        for metric in metrics
    }
    panels = {label: found for label, found in panels.items() if found}
    if not panels:
        return unavailable("days", "Lift over days", "The plan's first look is still to come.")
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(panels) // 2)
    figure = page(1.2 + 2.6 * rows)
    grid = figure.subplots(rows, min(2, len(panels)), squeeze=False)
    arms = analysis.experiment.treatments
    for axes, (label, found) in zip(grid.flat, panels.items(), strict=False):
        for each in found:
            _line(axes, each, arms.index(each.arm))
        _frame(axes, found)
        axes.axhline(0, color=INK, lw=1)
        axes.set_title(label)
        axes.set_ylabel("lift (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        axes.set_xlabel(f"days since {say_day(analysis.experiment.started)}")
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    if len(arms) > 1:
        grid.flat[0].legend(frameon=False)
    kind = analysis.question.plan.kind
    warning = "the band does not allow for repeated looks" if kind == "fixed" else "the band allows for all looks"
    return finish("days", figure, f"Lift over days: {warning}", "Everything up to the end of each day is counted.")


def _line(axes: Axes, comparison: Comparison, arm: int) -> None:
    points = [point for point in comparison.reading.points if math.isfinite(point.lift)]
    colour, mark = _COLOURS[arm % len(_COLOURS)], _MARKS[arm % len(_MARKS)]
    days = [point.day + 1 for point in points]
    axes.fill_between(
        days, [_shown(point.low) for point in points], [_shown(point.high) for point in points],
        color=colour, alpha=0.18, lw=0,
    )  # fmt: skip
    axes.plot(days, [100 * point.lift for point in points], color=colour, marker=mark, ms=4, label=comparison.arm)


def _frame(axes: Axes, comparisons: list[Comparison]) -> None:
    """Let the axis follow the later half of the days: the first days' bands would hide everything else."""
    later = [point for each in comparisons for point in each.reading.points[len(each.reading.points) // 2 :]]
    edges = [_shown(edge) for point in later for edge in (point.low, point.lift, point.high) if math.isfinite(edge)]
    if edges:
        low, high = min(0.0, *edges), max(0.0, *edges)
        room = 0.25 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)


def _shown(edge: float) -> float:
    """A lift in percent; an infinite one becomes far."""
    return 100 * min(max(edge, -1.0), 10.0) if not math.isnan(edge) else math.nan
