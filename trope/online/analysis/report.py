"""The result of an experiment as tables: on the terminal, as Markdown, as one HTML page and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trope import environment
from trope.data.printable import counted, printable
from trope.experiments.report.html import show_section
from trope.experiments.report.markdown import to_markdown as page_to_markdown
from trope.experiments.report.page import Cell, Grid, Page, Section
from trope.figures.html import card, document, facts, heading, paragraph, picture, warning
from trope.online.analysis.analyse import Analysis, Comparison
from trope.online.analysis.verdict import Verdict, change, number, percent
from trope.times import say_minute

_KINDS = {
    "fixed": "a single test at the end (Welch). The p-value holds for one look at a day fixed in advance",
    "always": "an asymptotic confidence sequence. Interval and p-value hold at every look, with no planned end",
}


def to_page(analysis: Analysis, verdict: Verdict) -> Page:
    """Everything the report says, before it becomes Markdown or HTML."""
    sections = [_result(analysis), _checks(analysis)]
    if analysis.question.plan.kind != "fixed":
        sections.append(_looks(analysis))
    if analysis.segments:
        sections.append(_segments(analysis))
    return Page(f"A/B test {analysis.experiment.name}", verdict.said, _facts(analysis), sections)


def to_markdown(page: Page, figures: Sequence[str] = ()) -> str:
    """figures: names of picture files beside the page."""
    pictures = "".join(f"\n![{name}]({name})\n" for name in figures)
    return page_to_markdown(page) + pictures


def to_html(page: Page, figures: Sequence[tuple[bytes, str]] = ()) -> str:
    """figures: SVG and title of each; the caption is part of the picture."""
    pictures = [card("", picture(svg, title)) for svg, title in figures]
    return document(
        page.title,
        heading(page.title),
        paragraph(page.summary),
        *map(warning, page.warnings),
        show_section(page.sections[0]),
        *pictures,
        *map(show_section, page.sections[1:]),
        card("How this was measured", facts(page.facts, sentences=True)),
    )


def to_json(analysis: Analysis, verdict: Verdict) -> dict[str, Any]:
    """Every number of the analysis."""
    exposed, outcomes = analysis.exposed, analysis.outcomes
    return {
        "verdict": asdict(verdict),
        "experiment": asdict(analysis.experiment),
        "alpha": analysis.question.alpha,
        "plan": asdict(analysis.question.plan),
        "users": analysis.users,
        "exposures": {
            "used": exposed.exposures, "forced": exposed.forced, "ahead": exposed.ahead, "before_start": exposed.early,
        },
        "outcomes": {
            "used": outcomes.used, "before_exposure": outcomes.early, "not_exposed": outcomes.strangers,
            "ahead": outcomes.ahead,
        },
        "days": analysis.last_day + 1,
        "checks": [{**asdict(check), "failed": check.failed} for check in analysis.checks],
        "comparisons": [
            {"arm": each.arm, "metric": each.metric.name, "adjusted_p": each.adjusted, **_plain(asdict(each.reading))}
            for each in analysis.comparisons
        ],
        "segments": [
            {**_plain(asdict(row)), "metric": row.metric.name} for row in analysis.segments
        ],
        "engine": analysis.engine,
        "environment": environment.describe(),
    }  # fmt: skip


def show(page: Page, console: Console) -> None:
    """Print the verdict, then the tables."""
    console.print(Text(printable(page.summary), "bold"), soft_wrap=True)
    for section in page.sections:
        table = Table(title=Text(printable(section.title), "table.title"), title_justify="left", box=None)
        for column, cell in enumerate(section.grid.header):
            table.add_column(Text(printable(cell.text)), justify="left" if column < 2 else "right", overflow="fold")
        for row in section.grid.rows:
            table.add_row(*(Text(printable(cell.text), "bold" if cell.mark else "") for cell in row))
        console.print("", table)


def _result(analysis: Analysis) -> Section:
    several = len(analysis.experiment.treatments) > 1
    level = f"{100 * (1 - analysis.question.alpha):g} % interval"
    names = ["Metric", "Definition", "Relative lift", level, "P-Value", "Adjusted", "CUPED"]
    rows = [_row(each, analysis.question.alpha, several) for each in analysis.comparisons]
    text = (
        f"Relative lifts against {analysis.experiment.control}. Adjusted: p-value by Holm over all {len(rows)} "
        "comparisons; a star is below alpha. CUPED: how much of the variance the time before the experiment explains."
    )
    return Section("Result", text, Grid([Cell(name) for name in names], rows))


def _row(each: Comparison, alpha: float, several: bool) -> list[Cell]:
    reading = each.reading
    strong = each.adjusted < alpha
    reduction = reading.estimate.reduction
    return [
        Cell(f"{each.metric.label}, {each.arm}" if several else each.metric.label),
        Cell(each.metric.definition),
        Cell(change(reading.estimate), mark="best" if strong else ""),
        Cell(interval(reading.low, reading.high)),
        Cell(number(reading.p)),
        Cell(number(each.adjusted) + (" *" if strong else "")),
        Cell("" if reduction is None else f"{-100 * reduction:+.1f} %"),
    ]


def _checks(analysis: Analysis) -> Section:
    rows = [
        [
            Cell(check.name),
            Cell("failed" if check.failed else "passed", mark="best" if check.failed else ""),
            Cell(number(check.p)),
            Cell(check.said),
        ]
        for check in analysis.checks
    ]
    text = "Where a check fails, no difference between the arms means anything, and no winner is called."
    return Section(
        "Checks", text, Grid([Cell(name) for name in ("Check", "", "P-Value", "Found")], rows, numbers=False)
    )


def _looks(analysis: Analysis) -> Section:
    rows = []
    for each in analysis.comparisons:
        for place, point in enumerate(each.reading.points):
            if place in (0, len(each.reading.points) - 1) or point.day == each.reading.crossed:
                limit = "" if point.limit is None else f"{point.limit:.3f}" if math.isfinite(point.limit) else "∞"
                word = " (first crossing)" if point.day == each.reading.crossed else ""
                cells = [f"{each.metric.label}, {each.arm}", f"after day {point.day + 1}{word}", percent(point.lift)]
                rows.append([Cell(text) for text in (*cells, f"{point.z:+.3f}", limit)])
    names = ("Metric", "Look", "Relative lift", "z", "Bound of |z|")
    text = (
        "The first look, the last one, and the first at which the bound was reached. Bounds are those of each metric "
        "alone, before Holm: the verdict follows the adjusted p-values."
    )
    return Section("Looks", text, Grid([Cell(name) for name in names], rows))


def _segments(analysis: Analysis) -> Section:
    alpha, rows = analysis.question.alpha, []
    for row in analysis.segments:
        strong = row.adjusted < alpha
        rows.append(
            [
                Cell(f"{row.column}: {row.value}"),
                Cell(f"{row.metric.label}, {row.arm}"),
                Cell(f"{row.users:,}"),
                Cell(change(row.estimate), mark="best" if strong else ""),
                Cell(interval(row.estimate.low, row.estimate.high)),
                Cell(number(row.estimate.p)),
                Cell(number(row.adjusted) + (" *" if strong else "")),
            ]
        )
    names = ("Segment", "Metric", "Users", "Relative lift", "Interval", "P-Value", "Adjusted")
    text = (
        "For finding out where to look next; segments never decide about a winner. Single tests of all data, adjusted "
        "by Holm over all rows."
    )
    return Section("Segments", text, Grid([Cell(name) for name in names], rows))


def interval(low: float, high: float) -> str:
    return "n/a" if math.isnan(low) or math.isnan(high) else f"[{percent(low)}, {percent(high)}]"


def _facts(analysis: Analysis) -> list[tuple[str, str]]:
    experiment, exposed, outcomes, plan = (
        analysis.experiment, analysis.exposed, analysis.outcomes, analysis.question.plan,
    )  # fmt: skip
    users = ", ".join(f"{count:,} {arm}" for arm, count in analysis.users.items())
    models = ", ".join(f"{arm} {each.model}" for arm, each in experiment.arms.items())
    kind = _KINDS.get(plan.kind) or (
        f"a group sequential test with {plan.looks} looks over {plan.horizon} days, {plan.spending} spending (Lan and "
        "DeMets). Interval and p-value are repeated ones: they hold at all planned looks together"
    )
    if not analysis.question.cuped:
        cuped = "switched off"
    elif outcomes.has_pre:
        cuped = (
            "each metric is adjusted by the same user's value before the experiment; the metrics per exposure are not"
        )
    else:
        cuped = "not used: no outcome precedes the experiment"
    return [
        ("Time", f"{counted(analysis.last_day + 1, 'day')} from {say_minute(experiment.started)}"),
        ("Users", users),
        ("Models", models),
        (
            "Exposures",
            f"{exposed.exposures:,} used; left out: {exposed.forced:,} forced by hand, "
            f"{exposed.ahead:,} for moments over a day after they were answered",
        ),
        (
            "Outcomes",
            f"{outcomes.used:,} used; left out: {outcomes.early:,} before the user's first exposure, "
            f"{outcomes.strangers:,} of people who were not exposed, {outcomes.ahead:,} later than now",
        ),
        ("Test", f"{kind}. Alpha is {analysis.question.alpha:g}, two-sided"),
        ("Multiplicity", "Holm over metrics and arms: the chance of any false win stays below alpha"),
        ("CUPED", cuped),
        ("Engine", analysis.engine),
    ]


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null and text stand for them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
