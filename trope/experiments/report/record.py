"""A comparison as JSON: what was compared, on which machines, and every mean with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trope.evaluate.compare import Comparison
from trope.evaluate.metrics import Interval
from trope.experiments.report.baselines import Baselines
from trope.experiments.report.comparison import over_seeds
from trope.experiments.report.controls import mean_controls
from trope.experiments.train_many import Trained


def describe(trained: Trained, common: Sequence[str], baselines: Baselines) -> dict[str, Any]:
    """What was compared: settings, data, machines, baselines, controls, and the standard deviation over seeds."""
    seeds = len({run.seed for run in trained.runs})
    finished = {name: sum(line["name"] == name for line in trained.lines) for name in trained.values}
    deviation = {}
    for name, values in trained.values.items():
        found = {metric: over_seeds(trained.lines, name, metric) for metric in values}
        deviation[name] = {metric: float(each.std(ddof=1)) for metric, each in found.items() if len(each) > 1}
    return {
        "split": "test", "seeds": seeds, "finished": finished, "settings": list(common),
        "data": trained.lines[0]["data"], "environments": environments(trained.lines),
        "baselines": baselines, "with_counting": mean_controls(trained.lines),
        "deviation_over_seeds": deviation,
    }  # fmt: skip


def environments(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The distinct machines, versions and commits of the runs."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line["environment"] not in found:
            found.append(line["environment"])
    return found


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Means and intervals of each system, as fractions, and its difference from the first."""
    systems = {}
    for system in comparison.systems:
        systems[system.name] = _intervals(comparison.metrics, system.values)
        if system.difference is not None:
            systems[system.name]["minus_first"] = _intervals(comparison.metrics, system.difference)
    return {"users": comparison.users, "reference": comparison.systems[0].name, "systems": systems}


def _intervals(metrics: list[str], interval: Interval) -> dict[str, Any]:
    rows = zip(metrics, interval.mean, interval.low, interval.high, strict=True)
    return {metric: {"mean": float(mean), "low": float(low), "high": float(high)} for metric, mean, low, high in rows}
