"""The report of a comparison in the format of the paper's main table: best bold, second underlined, relative gain.

Shapes: S systems (models), M metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trope.evaluate.compare import Comparison
from trope.evaluate.metrics import CUTOFFS, Floats, Interval
from trope.experiments.pool import Variant
from trope.experiments.report.baselines import Baselines, Counted
from trope.experiments.report.controls import control_name, counting_facts, mean_controls
from trope.experiments.report.facts import facts, ranked
from trope.experiments.report.html import to_html
from trope.experiments.report.markdown import to_markdown
from trope.experiments.report.page import Cell, Grid, Page, Section, Tone
from trope.experiments.report.warnings import comparison_warnings
from trope.experiments.train_many import Trained
from trope.runs import WITH_COUNTING, write_text
from trope.settings import preset

MARKDOWN, HTML = "report.md", "report.html"
READ_COUNTING = (
    '"+ counting" adds decayed counts of all users\' events to the scores of the model above it. The last rows rank by '
    "counting alone. Neither are marked."
)


def write_report(page: Page, out: Path) -> list[Path]:
    """Write report.md and report.html into a folder; returns their paths."""
    texts = {out / MARKDOWN: to_markdown(page), out / HTML: to_html(page)}
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)


def comparison_page(
    trained: Trained, comparison: Comparison, counted: Counted, common: Sequence[str], resamples: int
) -> Page:
    """The report of `trope compare`; the first system is the reference."""
    asked = ranked(trained)
    metrics = [f"{kind}@{k}" for kind in (asked.hit, "NDCG") for k in CUTOFFS] + ["MRR"]
    columns = [comparison.metrics.index(metric) for metric in metrics]
    names = [system.name for system in comparison.systems]
    order = np.argsort(-comparison.means, axis=0, kind="stable")  # [S, M]
    best, second = order[0], order[1]
    sections = [
        Section(
            "Results",
            "Percent, mean ± standard deviation over seeds. The best is bold, the second best underlined. After the "
            "best stands its relative gain over the second, with a star where the interval of the difference does not "
            f"contain 0. {_hit(asked.hit)} {READ_COUNTING}",
            _results(trained, comparison, counted.metrics, metrics, columns),
        ),
        Section(
            f"Against {names[0]}, the reference",
            "Difference in percentage points with its 95 % interval; a star where the interval does not contain 0.",
            _differences(comparison, metrics, columns, np.zeros_like(best)),
        ),
        Section(
            "Against the second best",
            "The same difference from the model that is second in each metric. The header names it.",
            _differences(comparison, metrics, columns, second, name_others=True),
        ),
        definitions([(each.name, each) for each in trained.variants if each.name in trained.values], common),
        training_section(trained),
    ]
    first = columns[metrics.index("NDCG@10")]
    gain = relative(comparison.means[best[first], first], comparison.means[second[first], first])
    summary = (
        f"{len(names)} models on {trained.data.path.name} ({trained.data.protocol.name}), {asked.users:,} test users. "
        f"By NDCG@10 {names[best[first]]} is first and {names[second[first]]} second{gain and f' ({gain})'}."
    )
    warnings = comparison_warnings(trained, comparison, counted, metrics)
    title = f"{trained.data.path.name}: {len(names)} models compared"
    said = [*facts(trained, common, resamples), *counting_facts(counted, mean_controls(trained.lines))]
    return Page(title, summary, said, sections, warnings)


def relative(new: float, old: float) -> str:
    """A relative change in percent; empty where the old value is 0."""
    return f"{100 * (new / old - 1):+.1f} %" if old > 0 else ""


def over_seeds(lines: Sequence[dict[str, Any]], name: str, metric: str, split: str = "test") -> Floats:
    """A metric of each finished seed of a variant, as fractions."""
    return np.array([line[split][metric] for line in lines if line["name"] == name])


def mean_and_deviation(lines: Sequence[dict[str, Any]], name: str, metric: str, split: str = "test") -> str:
    """A metric in percent with its standard deviation over seeds; one seed has none."""
    values = 100 * over_seeds(lines, name, metric, split)
    return f"{values.mean():.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def difference(interval: Interval, column: int) -> Cell:
    """A difference in percentage points and its interval."""
    mean, low, high = (100 * float(bound[column]) for bound in interval)
    return Cell(f"{mean:+.2f}", f"{low:+.2f} .. {high:+.2f}", tone=tone(interval, column))


def tone(interval: Interval, column: int) -> Tone:
    """Better or worse; empty where the interval contains 0."""
    if not interval.significant[column]:
        return ""
    return "better" if interval.mean[column] > 0 else "worse"


def control_row(lines: Sequence[dict[str, Any]], name: str, label: str, metrics: Sequence[str]) -> list[list[Cell]]:
    """The row of a model's control "MODEL + counting", or none; lines: of results.jsonl."""
    if name not in mean_controls(lines):
        return []
    cells = [Cell(mean_and_deviation(lines, name, metric, WITH_COUNTING)) for metric in metrics]
    return [[Cell(control_name(label)), *cells]]


def definitions(variants: Sequence[tuple[str, Variant]], common: Sequence[str]) -> Section:
    """The definition of each row; variants: label and variant, whose settings begin with the common ones."""
    rows = []
    for label, variant in variants:
        own = " ".join(variant.settings[len(common) :]) or "none"
        rows.append([Cell(label), Cell(f"{variant.name}-seed*"), Cell(variant.model), Cell(own)])
    header = [Cell(text) for text in ("row", "run folders", "preset", "own settings")]
    return Section(
        "What each row is", "Each row is a preset with settings of its own.", Grid(header, rows, numbers=False)
    )


def seconds_per_epoch(line: dict[str, Any]) -> float:
    """From a line of results.jsonl. A refit trains as many epochs more as validation chose."""
    return float(line["seconds"] / (line["epochs"] + (line["best_epoch"] if line.get("refit") else 0)))


def training_section(trained: Trained) -> Section:
    """Epochs, validation and time of each variant."""
    rows = []
    for variant in trained.variants:
        lines = [line for line in trained.lines if line["name"] == variant.name]
        if lines:
            pace = np.mean([seconds_per_epoch(line) for line in lines])
            shown = (", ".join(str(line[key]) for line in lines) for key in ("best_epoch", "epochs"))
            criterion = preset(variant.model, variant.settings).train.criterion
            valid = np.mean([100 * line["valid"][criterion] for line in lines])
            rows.append([Cell(text) for text in (variant.name, *shown, criterion, f"{valid:.2f}", f"{pace:.2f}")])
    header = ["model", "best epoch, by seed", "epochs trained", "criterion", "validation, %", "seconds per epoch"]
    text = "Seconds include validation. Runs that were trained at the same time shared the machine."
    return Section("Training", text, Grid([Cell(text) for text in header], rows))


def _results(
    trained: Trained, comparison: Comparison, baselines: Baselines, metrics: list[str], columns: list[int]
) -> Grid:
    order = np.argsort(-comparison.means, axis=0, kind="stable")
    rows = []
    for row, system in enumerate(comparison.systems):
        apart = comparison.apart(row, order[1])
        cells = [Cell(system.name)]
        for metric, column in zip(metrics, columns, strict=True):
            text = mean_and_deviation(trained.lines, system.name, metric)
            if row == order[0, column]:
                gain = relative(comparison.means[row, column], comparison.means[order[1, column], column])
                cells.append(Cell(text, gain, "best", tone(apart, column)))
            else:
                cells.append(Cell(text, mark="second" if row == order[1, column] else ""))
        rows += [cells, *control_row(trained.lines, system.name, system.name, metrics)]
    for name, values in baselines.items():
        rows.append([Cell(name), *(Cell(f"{100 * values[metric]:.2f}") for metric in metrics)])
    return Grid([Cell("model"), *map(Cell, metrics)], rows)


def _differences(
    comparison: Comparison,
    metrics: list[str],
    columns: list[int],
    others: NDArray[np.int64],
    name_others: bool = False,
) -> Grid:
    names = [system.name for system in comparison.systems]
    header = [Cell(m, names[others[c]] if name_others else "") for m, c in zip(metrics, columns, strict=True)]
    rows = []
    for row, name in enumerate(names):
        apart = comparison.apart(row, others)
        cells = [Cell("") if row == others[column] else difference(apart, column) for column in columns]
        if any(cell.text for cell in cells):
            rows.append([Cell(name), *cells])
    return Grid([Cell("model"), *header], rows)


def _hit(hit: str) -> str:
    if hit == "HR":
        return "HR@K: share of users whose positive is among the first K."
    return "Recall@K: share of a user's positives among the first K."
