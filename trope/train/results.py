"""What a training has measured, in words, and which run measured it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trope.runs import read_lineage
from trope.train.pulse import read_pulse


def say_result(summary: Mapping[str, Any], criterion: str, run: Path) -> str:
    """What a training into `run` ended with, in a line; summary: what metrics.json holds."""
    epochs = f"best epoch {summary['best_epoch']} of {summary['epochs']}"
    pulse = read_pulse(run, summary["best_epoch"])
    return f"{epochs}: {say_measured(criterion, summary['valid'], summary['test'], pulse)}"


def say_measured(
    criterion: str, valid: Mapping[str, float], test: Mapping[str, float], pulse: Mapping[str, Any] | None
) -> str:
    """Validation and test in a phrase, and which of them had the pulse; pulse: what pulse.json holds."""
    on_valid, on_test = f"validation {criterion} {valid[criterion]:.4f}", f"test {criterion} {test[criterion]:.4f}"
    if pulse is None or pulse["exponent"] is None:  # None: no weights were better than none
        return f"{on_valid}, {on_test}"
    # The pulse is judged on a draw of the validation users, at several moments of a holdout, and on what it was fitted
    # on: its numbers are no continuation of the validation's.
    return (
        f"{on_valid} (network alone), {on_test} (with the pulse, which raised {pulse['criterion']} from "
        f"{pulse['cosine']:.4f} to {pulse['pulse']:.4f} on the {pulse['users']:,} validation requests it was fitted to)"
    )


def measured_in(run: Path) -> Path:
    """The run of `trope train` whose validation and test `run` goes by: itself, or what `fit` or `update` followed."""
    lineage = read_lineage(run)
    return run if lineage is None else Path([lineage["parent"], *lineage["ancestors"]][-1]["path"])
