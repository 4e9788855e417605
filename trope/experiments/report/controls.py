"""The control "MODEL + counting" in a report: test metrics, mean over a model's seeds (`trope.evaluate.counting`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trope.evaluate.compare import Comparison
from trope.experiments.report.baselines import Baselines, Counted
from trope.figures.run_files import read_metrics
from trope.runs import METRICS, WITH_COUNTING
from trope.times import say_short

# Metrics of saved ranks and those of metrics.json differ in the order of a sum, if they are of the same ranking.
ROUNDING = 1e-9


def control_name(label: str) -> str:
    """The name of a model's control in tables."""
    return f"{label} + counting"


def mean_controls(lines: Sequence[dict[str, Any]]) -> Baselines:
    """Metrics by model, as fractions, from lines of results.jsonl; a model needs the control in all of its runs."""
    found: Baselines = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        ours = [line for line in lines if line["name"] == name]
        if all(WITH_COUNTING in line for line in ours):
            each = [line[WITH_COUNTING] for line in ours]
            found[name] = {metric: float(np.mean([one[metric] for one in each])) for metric in each[0]}
    return found


def run_controls(runs: Sequence[Path], comparison: Comparison) -> Baselines:
    """Metrics by system of a comparison of run folders on the test, where a run has the control.

    A run whose ranks were made anew since, such as with another eval.filter_seen, has none.
    """
    found: Baselines = {}
    for run, system, means in zip(runs, comparison.systems, comparison.means, strict=True):
        metrics = read_metrics(run) if (run / METRICS).is_file() else {}
        if WITH_COUNTING in metrics:
            ranked = dict(zip(comparison.metrics, means, strict=True))
            if all(abs(ranked[name] - value) < ROUNDING for name, value in metrics["test"].items() if name in ranked):
                found[system.name] = metrics[WITH_COUNTING]
    return found


def counting_facts(counted: Counted, controls: Baselines) -> list[tuple[str, str]]:
    """How baselines and controls count."""
    said = []
    if counted.half_lives:
        chosen = ", ".join(
            f"{say_short(each)} for {name.partition(',')[0]}" for name, each in counted.half_lives.items()
        )
        said.append(("Counting alone", f"only events before each user's moment; validation chose half-lives: {chosen}"))
    if controls:
        text = (
            "a model's cosine plus beta times the log of the item's share of everybody's decayed counts; validation "
            "chose beta and half-life for each run, with the model that had not seen it; beta is 0 where counting does "
            "not help"
        )
        said.append(("+ counting", text))
    return said
