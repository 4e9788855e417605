"""Which looks count: days that are over, with enough users, up to the horizon. The report speaks of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from abtest_logs import DAY, START, Logs, experiment

from trope.data.sources.resolve import Request
from trope.figures.style import style
from trope.online.analysis.analyse import Analysis, Question, analyse
from trope.online.analysis.figures import draw
from trope.online.analysis.looks import Plan
from trope.online.analysis.report import to_page
from trope.online.analysis.verdict import judge


def run(folder: Path, logs: Logs, **question: object) -> Analysis:
    exposures, outcomes = logs.write(folder)
    return analyse(exposures, Request(str(outcomes)), Question(metrics="orders", **question), threads=1)  # type: ignore[arg-type]


def until(logs: Logs, end: int) -> Logs:
    return Logs([row for row in logs.exposures if row[2] < end], [row for row in logs.outcomes if row[2] < end])


@pytest.mark.parametrize(
    ("end", "looks"), [(DAY + 3_600, 0), (2 * DAY - 3 * 3_600, 0), (2 * DAY, 1), (3 * DAY, 1), (4 * DAY, 2)]
)
def test_a_look_counts_when_its_day_is_over(end: int, looks: int, tmp_path: Path) -> None:
    logs = until(experiment(users=1_500, days=4), START + end)
    found = run(tmp_path, logs, plan=Plan(looks=2, horizon=4))
    assert len(found.of("orders").reading.points) == looks
    said = {0: "the first of 2 looks is still to come", 1: "at look 1 of 2", 2: "at the last look"}
    assert said[looks] in judge(found).said or judge(found).winners
    # A confidence sequence may be looked at in the middle of a day.
    always = run(tmp_path, logs, plan=Plan(always=True))
    assert always.of("orders").reading.points[-1].day == (end - 1) // DAY


@pytest.mark.parametrize("plan", [Plan(looks=4, horizon=4), Plan(always=True)], ids=lambda plan: plan.kind)
def test_looks_with_few_users_are_said_to_be_skipped(plan: Plan, tmp_path: Path) -> None:
    found = run(tmp_path, experiment(users=90, days=4), plan=plan)
    said = judge(found).said
    assert said.startswith("No winner yet: 4 ") and "all were skipped because an arm had fewer than 100 users" in said


def test_the_result_is_that_of_the_horizon(tmp_path: Path) -> None:
    logs = experiment(users=1_000, days=8)
    long = run(tmp_path, logs, plan=Plan(looks=2, horizon=4))
    assert judge(long).said.endswith("This is the result of day 4; what the logs have up to day 8 is not used.")
    short = run(tmp_path, until(logs, START + 4 * DAY), plan=Plan(looks=2, horizon=4))
    assert "This is the result of day" not in judge(short).said
    one, other = (found.of("orders").reading for found in (long, short))
    assert (one.p, one.low, one.high) == pytest.approx((other.p, other.low, other.high), rel=1e-9)
    text = next(section.text for section in to_page(long, judge(long)).sections if section.title == "Looks")
    assert "before Holm" in text


def test_a_test_of_one_day_has_one_day(tmp_path: Path) -> None:
    found = run(tmp_path, until(experiment(users=600), START + DAY))
    with style():
        days = draw(found, "one day")[1]
    assert all(tick == round(tick) for axes in days.figure.axes for tick in axes.get_xticks())
    assert "1 day from" in str(to_page(found, judge(found)))


def test_a_forest_of_many_segments_keeps_a_readable_height(tmp_path: Path) -> None:
    file = tmp_path / "segments.csv"
    names = [f"s{number}" for number in range(4)]
    rows = [",".join([f"u{user}", *(str(user % 18) for _ in names)]) for user in range(600)]
    file.write_text("\n".join([",".join(["user_id", *names]), *rows]))
    found = run(tmp_path, experiment(users=600), segments=file)
    assert len(found.segments) == 72
    with style():
        forest = draw(found, "many")[0]
    assert forest.figure.get_size_inches()[1] < 20
    texts = " ".join(text.get_text() for text in forest.figure.findobj(lambda each: hasattr(each, "get_text")))
    assert "32 rows of segments are left out; the table has all." in " ".join(texts.split())
