"""Is there a winner? One sentence, and a refusal where the experiment itself is broken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trope.online.analysis.analyse import Analysis, Comparison
from trope.online.analysis.estimates import Estimate
from trope.online.analysis.looks import LEAST_TO_LOOK
from trope.times import say_minute

_FEW = f"and all were skipped because an arm had fewer than {LEAST_TO_LOOK} users"


@dataclass(frozen=True)
class Verdict:
    """winners: arms that beat control. refused: why no winner may be called, [] where the experiment is sound.

    said: the first line of every report.
    """

    winners: list[str]
    refused: list[str]
    said: str


def judge(analysis: Analysis) -> Verdict:
    """Call a winner, or say why there is none.

    An arm wins if at least one metric rises, none falls, each by its adjusted p-value, and no check failed.
    """
    refused = refusals(analysis)
    if refused:
        return Verdict([], refused, f"No winner is called: {'; '.join(refused)}.")
    said, winners = [], []
    for arm in analysis.experiment.treatments:
        sentence, wins = _arm(analysis, arm)
        said.append(sentence)
        winners += [arm] if wins else []
    if len(winners) > 1:
        said.append(f"{' and '.join(winners)} were compared with control only, not with each other.")
    horizon = analysis.question.plan.horizon
    if horizon is not None and analysis.last_day >= horizon:
        said.append(
            f"This is the result of day {horizon}; what the logs have up to day {analysis.last_day + 1} is not used."
        )
    return Verdict(winners, [], " ".join(said))


def refusals(analysis: Analysis) -> list[str]:
    """What is wrong with the experiment itself, a clause each."""
    found = []
    for check in analysis.checks:
        if check.failed:
            what = "the sample ratio is off" if check.name.startswith("sample ratio") else "the arms saw other traffic"
            p = "" if "p = " in check.said else f" (p = {check.p:.2g})"
            found.append(f"{what}: {check.said}{p}")
    if analysis.exposed.early:
        start = say_minute(analysis.experiment.started)
        found.append(f"{analysis.exposed.early:,} exposures precede the assignment, which began {start}")
    return found


def _arm(analysis: Analysis, arm: str) -> tuple[str, bool]:
    """The sentence about one arm, and whether it wins."""
    control, alpha, plan = analysis.experiment.control, analysis.question.alpha, analysis.question.plan
    found = [each for each in analysis.comparisons if each.arm == arm]
    moved = [each for each in found if each.adjusted < alpha]
    up = [each for each in moved if each.reading.rises]
    down = [each for each in moved if not each.reading.rises]
    if up and down:
        return f"No winner: {arm} gains {_said(up)} and loses {_said(down)} against {control}.", False
    if up:
        return f"Winner: {arm} beats {control}: {_said(up)}.", True
    if down:
        return f"No winner: {arm} is worse than {control}: {_said(down)}.", False
    most = min(found, key=lambda each: each.reading.p if math.isfinite(each.reading.p) else 2.0)
    word = "No winner"
    if plan.kind == "group-sequential":
        assert plan.looks is not None
        done = len(plan.days(analysis.over))
        if done == 0:
            return f"No winner yet: the first of {plan.looks} looks is still to come.", False
        if most.reading.few == done:
            return f"No winner yet: {done} of {plan.looks} looks are over, {_FEW}.", False
        word = f"No winner at look {done} of {plan.looks}" if done < plan.looks else "No winner at the last look"
    elif plan.kind == "always":
        if most.reading.few == analysis.last_day + 1:
            return f"No winner yet: {analysis.last_day + 1} days were looked at, {_FEW}.", False
        word = "No winner so far"
    return f"{word}: no metric of {arm} differs from {control} (nearest: {_said([most])}).", False


def _said(comparisons: list[Comparison]) -> str:
    return ", ".join(_comparison(each) for each in comparisons)


def _comparison(each: Comparison) -> str:
    """`CVR +3.10 % (adjusted p = 0.037)`, with the day of the look that decided where it is not the last one."""
    reading, p = each.reading, f"adjusted p {_equals(each.adjusted)}"
    if reading.decided is None or reading.crossed == reading.points[-1].day:
        return f"{each.metric.label} {change(reading.estimate)} ({p})"
    assert reading.crossed is not None
    return (
        f"{each.metric.label} {change(reading.decided)} at the look after day {reading.crossed + 1} "
        f"({p}; now {change(reading.estimate)})"
    )


def change(estimate: Estimate) -> str:
    """The lift, or both means where there is no relative lift."""
    if math.isnan(estimate.lift) and estimate.is_known:
        return f"from {estimate.control:.4g} to {estimate.treatment:.4g}"
    return percent(estimate.lift)


def _equals(p: float) -> str:
    """`= 0.037`, or `< 0.001`."""
    said = number(p)
    return f"< {said[1:]}" if said.startswith("<") else f"= {said}"


def percent(value: float) -> str:
    """A lift as the paper writes it, `+0.33 %`."""
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{100 * value:+.2f} %"


def number(p: float) -> str:
    """A p-value as the paper writes it, to three digits after the point."""
    if math.isnan(p):
        return "n/a"
    return f"{p:.3f}" if p >= 1e-3 else "<0.001"
