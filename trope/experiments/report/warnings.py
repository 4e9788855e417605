"""What a reader must know before trusting a comparison, as sentences for the screen, report.md and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trope.evaluate.compare import Comparison
from trope.experiments.report.baselines import Baselines, Counted
from trope.experiments.report.controls import ROUNDING, control_name, mean_controls, run_controls
from trope.experiments.train_many import Trained
from trope.figures.run_files import read_environment, read_metrics
from trope.runs import ENVIRONMENT, METRICS

FIRST_EPOCHS, NEAR_ZERO = 2, 0.01
"""A model is suspected of being undertrained where validation chose one of so many first epochs, or where its HR@10 is
below this. Of the 419 runs in results/ two chose such an epoch, and the least HR@10 is 0.03."""
_SPREAD = "so these numbers do not show how much two trainings of one model differ"
_REMEDY = "it may be undertrained; try more epochs or another rate (train.epochs, train.lr)"


def comparison_warnings(
    trained: Trained,
    comparison: Comparison,
    counted: Counted,
    metrics: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> list[str]:
    """All of a report. metrics: those of its table. labels: of the systems in the table, where they are not names."""
    epochs: dict[str, list[tuple[int, int]]] = {}
    commits: dict[str, list[str]] = {}
    for line in trained.lines:
        epochs.setdefault(line["name"], []).append((line["best_epoch"], line["epochs"]))
        commits.setdefault(line["name"], []).append(line["environment"].get("commit", "unknown"))
    shown = {system.name: (labels or {}).get(system.name, system.name) for system in comparison.systems}
    return [
        *_runs(trained),
        *_undertrained(comparison, epochs, shown),
        *mixed_commits({shown.get(name, name): found for name, found in commits.items()}),
        *_counting_ahead(comparison, counted, metrics, shown),
        *_controls_ahead(comparison, mean_controls(trained.lines), metrics, shown),
        *counted.equal,
    ]


def run_warnings(runs: Sequence[Path], comparison: Comparison, split: str = "test") -> list[str]:
    """Of a comparison of run folders; what the runs do not tell, such as baselines, is left out."""
    names = [system.name for system in comparison.systems]
    found = {name: read_metrics(run) for name, run in zip(names, runs, strict=True) if (run / METRICS).is_file()}
    epochs = {name: [(metrics["best_epoch"], metrics["epochs"])] for name, metrics in found.items()}
    commits = {
        name: [read_environment(run).get("commit", "unknown")]
        for name, run in zip(names, runs, strict=True)
        if (run / ENVIRONMENT).is_file()
    }
    shown = {name: name for name in names}
    controls = run_controls(runs, comparison) if split == "test" else {}
    said = [f"each run is one training, {_SPREAD}"]
    unknown = [name for name in names if name not in found]
    if unknown:
        said.append(f"{', '.join(unknown)} has no {METRICS}: the run has not ended, and may be undertrained")
    return [
        *said,
        *_undertrained(comparison, epochs, shown),
        *mixed_commits(commits),
        *_controls_ahead(comparison, controls, comparison.metrics, shown),
    ]


def mixed_commits(commits: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence that names the commits of each model, where they are not all the same; commits: of the runs."""
    if len({commit for each in commits.values() for commit in each}) < 2:
        return []
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, each in commits.items():
        groups.setdefault(tuple(sorted(set(each))), []).append(name)
    said = "; ".join(f"{', '.join(names)} at {', '.join(each)}" for each, names in groups.items())
    return [f"rows come from several commits: {said}"]


def _runs(trained: Trained) -> list[str]:
    """Failed and missing runs, and a comparison with one seed."""
    said = [f"{name} failed: {reason}" for name, reason in trained.failures]
    asked, first = trained.variants[0].name, next(iter(trained.values))
    if asked != first:
        said.append(f"{asked}, the reference, has no finished run; the reference is {first} instead")
    missing = len(trained.runs) - len(trained.lines)
    if missing:
        said.append(
            f"{missing} of {len(trained.runs)} runs are missing from the means; the same command trains them again"
        )
    if len({run.seed for run in trained.runs}) == 1:
        said.append(f"there is one seed, {_SPREAD}")
    return said


def _undertrained(
    comparison: Comparison, epochs: Mapping[str, Sequence[tuple[int, int]]], shown: Mapping[str, str]
) -> list[str]:
    """Systems that validation stopped early, and systems that find next to nothing.

    epochs: the chosen epoch and the number of epochs of each run, by system.
    """
    early, low = [], []
    for name, label in shown.items():
        chosen = [f"{best} of {last}" for best, last in epochs.get(name, ()) if best <= FIRST_EPOCHS]
        if chosen:
            early.append(f"{label} ({', '.join(chosen)})")
    column = comparison.metrics.index("HR@10")
    for system, mean in zip(comparison.systems, comparison.means[:, column], strict=True):
        if mean < NEAR_ZERO:
            low.append(f"{shown[system.name]} ({100 * mean:.2f} %)")
    said = []
    if early:
        said.append(f"validation chose one of the first {FIRST_EPOCHS} epochs for {', '.join(early)}: {_REMEDY}")
    if low:
        said.append(f"HR@10 is near zero for {', '.join(low)}: {_REMEDY}")
    return said


def _counting_ahead(
    comparison: Comparison, counted: Counted, metrics: Sequence[str], shown: Mapping[str, str]
) -> list[str]:
    """Baselines that are better than a model; the marks of the table do not show that."""
    said = []
    for name, values in counted.metrics.items():
        # Models by the metrics in which counting is ahead of them.
        ahead = {
            label: [metric for metric in metrics if values[metric] > means[comparison.metrics.index(metric)]]
            for label, means in zip(shown.values(), comparison.means, strict=True)
        }
        if better := _say_ahead(ahead, metrics):
            said.append(f"the baseline {name!r} is better {better}")
    return said


def _controls_ahead(
    comparison: Comparison, controls: Baselines, metrics: Sequence[str], shown: Mapping[str, str]
) -> list[str]:
    """Controls that are better than a model which their own model is not ahead of, itself among them."""
    rows = zip(comparison.systems, comparison.means, strict=True)
    means = {system.name: dict(zip(comparison.metrics, row, strict=True)) for system, row in rows}
    said = []
    for name, values in controls.items():
        own = means[name]
        ahead = {
            shown[other]: [metric for metric in metrics if own[metric] <= theirs[metric] < values[metric] - ROUNDING]
            for other, theirs in means.items()
        }
        if better := _say_ahead(ahead, metrics):
            said.append(f"the control {control_name(shown[name])!r} is better {better}")
    return said


def _say_ahead(ahead: Mapping[str, Sequence[str]], metrics: Sequence[str]) -> str:
    """Which models are behind in which metrics; empty if none. What holds for all of them is said once."""
    every = [metric for metric in metrics if all(metric in lost for lost in ahead.values())]
    groups: dict[tuple[str, ...], list[str]] = {tuple(every): ["every model"]} if every else {}
    for label, lost in ahead.items():
        rest = tuple(metric for metric in lost if metric not in every)
        if rest:
            groups.setdefault(rest, []).append(label)
    return "; ".join(f"than {', '.join(labels)} in {', '.join(lost)}" for lost, labels in groups.items())
