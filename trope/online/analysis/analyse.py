"""From the logs of an experiment to its result: exposures and outcomes in, comparisons and a verdict out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ibis
import ibis.expr.types as ir

from trope.data.engines.base import Engine
from trope.data.engines.failure import explain
from trope.data.engines.open import open_engine
from trope.data.prepare import ON_BAD
from trope.data.sources.description import Columns, Source
from trope.data.sources.resolve import Request
from trope.online.analysis.estimates import Estimate, compare, holm
from trope.online.analysis.experiment import Experiment, read_experiment
from trope.online.analysis.exposures import Exposed, read_exposures
from trope.online.analysis.looks import Plan, Reading, cumulated, read_plan
from trope.online.analysis.metrics import EXPOSURES, Metric, parse_metrics
from trope.online.analysis.moments import Moments, added, read_days, read_moments
from trope.online.analysis.outcomes import SUMS, Outcomes, find_outcomes, read_outcomes, with_conversion
from trope.online.analysis.segments import add_segments
from trope.online.analysis.traffic import Check, checks
from trope.times import DAY, HOUR

MOST_DAYS = 1_000
END = HOUR
"""A day is over when the logs reach its last hour: they may stop with the experiment, shortly before a day ends."""


@dataclass(frozen=True)
class Question:
    """What is asked of an experiment. control, metrics: None for the defaults. pre: outcomes from before, by default
    those of the outcomes that precede the start. segments: a file of `trope.online.analysis.segments`. on_bad: `fail`
    at a bad row of the outcomes, or `skip` it."""

    control: str | None = None
    metrics: str | None = None
    pre: str | None = None
    segments: Path | None = None
    plan: Plan = field(default_factory=Plan)
    alpha: float = 0.05
    cuped: bool = True
    revenue_col: str | None = None
    on_bad: str = "fail"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"--alpha must lie between 0 and 0.5, got {self.alpha}")
        if self.on_bad not in ON_BAD:
            raise ValueError(f"--on-bad must be one of {', '.join(ON_BAD)}, got {self.on_bad!r}")


@dataclass(frozen=True)
class Comparison:
    """One metric of one arm against control. adjusted: p by Holm over all comparisons of the table."""

    arm: str
    metric: Metric
    reading: Reading
    adjusted: float


@dataclass(frozen=True)
class SegmentRow:
    """One metric of one arm in one segment. adjusted: p by Holm over all segments."""

    column: str
    value: str
    arm: str
    metric: Metric
    users: int
    estimate: Estimate
    adjusted: float


@dataclass(frozen=True)
class Analysis:
    """The result. users: per arm. last_day: the last day with data, from 0. engine: its name and version.

    over: the last day that is over, -1 where none is.
    """

    experiment: Experiment
    question: Question
    users: dict[str, int]
    exposed: Exposed
    outcomes: Outcomes
    checks: list[Check]
    comparisons: list[Comparison]
    segments: list[SegmentRow]
    last_day: int
    over: int
    engine: str

    def of(self, metric: str, arm: str | None = None) -> Comparison:
        """The comparison of a metric by name; arm: by default the only treatment."""
        arm = arm or self.experiment.treatments[0]
        return next(each for each in self.comparisons if each.metric.name == metric and each.arm == arm)


def analyse(
    exposures: Path,
    outcomes: Request,
    question: Question | None = None,
    *,
    engine: str = "duckdb",
    threads: int | None = None,
    memory: str | None = None,
    master: str | None = None,
    work: Path | None = None,
) -> Analysis:
    """Analyse an experiment.

    exposures: the folder that `trope serve --exposures` wrote. outcomes: files of user, item, time and revenue.
    engine, threads, memory, master: see `open_engine`. work: where a folder for intermediate tables is made.
    """
    question = question or Question()
    experiment = read_experiment(exposures, question.control)
    source = find_outcomes(outcomes, question.revenue_col)
    metrics = parse_metrics(question.metrics, source.columns.value is not None)
    before = None
    if question.pre is not None:
        before = find_outcomes(_like(outcomes, question.pre), source.columns.value)
    with (
        tempfile.TemporaryDirectory(prefix="trope-abtest-", dir=work) as folder,
        open_engine(engine, source, Path(folder), threads, memory, master) as running,
    ):
        shown = Source(str(exposures), "parquet", Columns())
        with _explained(running, shown):
            exposed = read_exposures(exposures, experiment, running)
        with _explained(running, source):
            until = max(int(time.time()), exposed.last + DAY)
            skip_bad = question.on_bad == "skip"
            done = read_outcomes(source, before, exposed.users, until, experiment, running, skip_bad)
            return _analysis(experiment, question, metrics, exposed, done, running, Path(folder), outcomes)


def _analysis(
    experiment: Experiment,
    question: Question,
    metrics: list[Metric],
    exposed: Exposed,
    outcomes: Outcomes,
    engine: Engine,
    work: Path,
    request: Request,
) -> Analysis:
    since = max(exposed.last, outcomes.last) - experiment.started
    last, over = since // DAY, (since + END) // DAY - 1
    if last >= MOST_DAYS:
        raise ValueError(
            f"the logs reach {last:,} days past the start of the experiment; at most {MOST_DAYS:,} are analysed: "
            "is `started` in experiment.json right?"
        )
    cuped = question.cuped and outcomes.has_pre
    names = sorted({name for metric in metrics for name in metric.columns})
    fixed = sorted({name for metric in metrics for name in metric.covariates}) if cuped else []
    users = outcomes.users
    users = users.mutate(entered=((users["first"] - experiment.started) // DAY).cast("int64"))
    arms = {arm: place for place, arm in enumerate(experiment.names)}
    days = read_days(users, _steps(exposed, outcomes, experiment, names), names, fixed)
    series = {arm: cumulated(days, place, last) for arm, place in arms.items()}
    if question.plan.kind == "fixed":
        # The last day from the users themselves: the same numbers, without the rounding of many differences.
        totals = read_moments(users, [*names, *fixed], ("arm", "entered"))
        for arm, place in arms.items():
            series[arm][-1] = added(moments for (found, _), moments in totals.items() if found == place)
    found: dict[tuple[str, Metric], Reading] = {
        (arm, metric): read_plan(
            question.plan, metric, series[experiment.control], series[arm], question.alpha, cuped, over
        )
        for arm in experiment.treatments
        for metric in metrics
    }
    adjusted = holm({key: reading.p for key, reading in found.items()}, question.alpha)
    segments: list[SegmentRow] = []
    if question.segments is not None:
        column = request.user_col or "user_id"
        divided, columns = add_segments(users, question.segments, column, work, engine)
        segments = _segments(divided, columns, experiment, metrics, [*names, *fixed], question.alpha, cuped)
    return Analysis(
        experiment,
        question,
        {arm: exposed.users_of(place) for arm, place in arms.items()},
        exposed,
        outcomes,
        checks(experiment, exposed),
        [Comparison(arm, metric, reading, adjusted[arm, metric]) for (arm, metric), reading in found.items()],
        segments,
        last,
        over,
        engine.label,
    )


def _steps(exposed: Exposed, outcomes: Outcomes, experiment: Experiment, names: list[str]) -> ir.Table:
    """By how much each user's variables grow on each day."""
    days = outcomes.days
    if EXPOSURES in names:
        # A group for every user and day of exposures: only where a metric asks for it.
        seen = exposed.scan
        seen = seen.group_by("user", day=((seen.moment - experiment.started) // DAY).cast("int64")).aggregate(
            exposures=seen.count()
        )
        zeros = {name: ibis.literal(0).cast(days[name].type()) for name in SUMS}
        both = days.mutate(exposures=ibis.literal(0, "int64")).union(
            seen.mutate(**zeros).select("user", "day", *SUMS, EXPOSURES)
        )
        days = both.group_by("user", "day").aggregate(**{name: both[name].sum() for name in (*SUMS, EXPOSURES)})
    return with_conversion(days).select("user", "day", *names)


def _segments(
    users: ir.Table,
    columns: list[str],
    experiment: Experiment,
    metrics: list[Metric],
    names: list[str],
    alpha: float,
    cuped: bool,
) -> list[SegmentRow]:
    rows: list[SegmentRow] = []
    arms = {arm: place for place, arm in enumerate(experiment.names)}
    nobody = Moments(0, {}, {})
    for place, column in enumerate(columns):
        key = f"segment_{place}"
        totals = read_moments(users, names, (key, "arm"))
        for value in sorted({found for found, _ in totals}):
            control = totals.get((value, arms[experiment.control]), nobody)
            for arm in experiment.treatments:
                other = totals.get((value, arms[arm]), nobody)
                for metric in metrics:
                    found = compare(metric, control, other, alpha, cuped)
                    rows.append(SegmentRow(column, value, arm, metric, control.count + other.count, found, 1.0))
    adjusted = holm({place: row.estimate.p for place, row in enumerate(rows)}, alpha)
    return [SegmentRow(**{**vars(row), "adjusted": adjusted[place]}) for place, row in enumerate(rows)]


@contextmanager
def _explained(engine: Engine, source: Source) -> Iterator[None]:
    """An engine's failure becomes an error that says what to do."""
    try:
        yield
    except engine.errors() as error:
        raise explain(error, source) from error


def _like(request: Request, text: str) -> Request:
    """The same columns in other files."""
    return Request(**{**vars(request), "text": text})
