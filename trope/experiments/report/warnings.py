"""What a reader must know before trusting a comparison, as sentences for the screen, report.md and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trope.evaluate.compare import Comparison
from trope.experiments.report.baselines import Counted
from trope.experiments.train_many import Trained
from trope.figures.run_files import read_metrics
from trope.runs import METRICS

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
    for line in trained.lines:
        epochs.setdefault(line["name"], []).append((line["best_epoch"], line["epochs"]))
    shown = {system.name: (labels or {}).get(system.name, system.name) for system in comparison.systems}
    return [
        *_runs(trained),
        *_undertrained(comparison, epochs, shown),
        *_counting_ahead(comparison, counted, metrics, shown),
        *counted.equal,
    ]


def run_warnings(runs: Sequence[Path], comparison: Comparison) -> list[str]:
    """Of a comparison of run folders; what the runs do not tell, such as baselines, is left out."""
    names = [system.name for system in comparison.systems]
    found = {name: read_metrics(run) for name, run in zip(names, runs, strict=True) if (run / METRICS).is_file()}
    epochs = {name: [(metrics["best_epoch"], metrics["epochs"])] for name, metrics in found.items()}
    said = [f"each run is one training, {_SPREAD}"]
    unknown = [name for name in names if name not in found]
    if unknown:
        said.append(f"{', '.join(unknown)} has no {METRICS}: the run has not ended, and may be undertrained")
    return [*said, *_undertrained(comparison, epochs, {name: name for name in names})]


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
        # Models by the metrics in which counting is ahead of them; what holds for all of them is said once.
        ahead = {
            label: [metric for metric in metrics if values[metric] > means[comparison.metrics.index(metric)]]
            for label, means in zip(shown.values(), comparison.means, strict=True)
        }
        every = [metric for metric in metrics if all(metric in lost for lost in ahead.values())]
        groups: dict[tuple[str, ...], list[str]] = {tuple(every): ["every model"]} if every else {}
        for label, lost in ahead.items():
            rest = tuple(metric for metric in lost if metric not in every)
            if rest:
                groups.setdefault(rest, []).append(label)
        parts = [f"than {', '.join(labels)} in {', '.join(lost)}" for lost, labels in groups.items()]
        if parts:
            said.append(f"the baseline {name!r} is better {'; '.join(parts)}")
    return said
