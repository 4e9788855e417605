"""The report of an ablation in the format of the paper's Table 3: each row's relative change from the full model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from trope.evaluate.compare import Comparison
from trope.experiments.ablation import NOTES, ROWS, Row
from trope.experiments.report.baselines import Baselines, Counted
from trope.experiments.report.comparison import (
    READ_COUNTING,
    control_row,
    definitions,
    difference,
    mean_and_deviation,
    relative,
    tone,
    training_section,
)
from trope.experiments.report.controls import counting_facts, mean_controls
from trope.experiments.report.facts import facts, ranked
from trope.experiments.report.page import Cell, Grid, Page, Section
from trope.experiments.report.warnings import comparison_warnings
from trope.experiments.train_many import Trained

METRICS = ("Recall@50", "NDCG@50", "Recall@200", "NDCG@200", "MRR")
TITLES = {"paper": "The paper's rows", "ours": "Ours", "readout": "The readout by time"}


def ablation_page(
    trained: Trained,
    comparison: Comparison,
    rows: Sequence[Row],
    counted: Counted,
    common: Sequence[str],
    resamples: int,
) -> Page:
    """The report of `trope ablate`; the first system is the full model."""
    finished = [row for row in rows if row.variant.name in trained.values]
    full, sections = finished[0], []
    for table, title in TITLES.items():
        shown = [full, *(row for row in finished[1:] if row.table == table)]
        if len(shown) > 1:
            read = (
                "Percent, mean ± standard deviation over seeds; the best is bold. After it stands the relative change "
                "from the full model, with a star where the interval of the difference does not contain 0. "
                f"{READ_COUNTING} "
            )
            sections.append(Section(title, read + NOTES[table], _changes(trained, comparison, shown, counted.metrics)))
            text = (
                "Difference in percentage points with its 95 % interval; a star where the interval does not contain 0."
            )
            sections.append(Section(f"{title}: against {full.label}", text, _intervals(comparison, shown)))
    labels = {row.variant.name: numbered(row) for row in finished}
    shown_variants = [(labels[each.name], each) for each in trained.variants if each.name in labels]
    sections += [definitions(shown_variants, common), training_section(trained)]
    asked = ranked(trained)
    where = f"{trained.data.path.name} ({trained.data.protocol.name})"
    summary = f"{len(finished)} variants of T-RoPE on {where}, {asked.users:,} test users. "
    if asked.hit == "HR":
        summary += "Every user has one positive, so Recall@K is HR@K. "
    if trained.data.protocol.name != "holdout":
        summary += "The paper's own ablation uses a one-day holdout (`trope prepare --protocol holdout`)."
    title = f"{trained.data.path.name}: ablation of T-RoPE"
    warnings = comparison_warnings(trained, comparison, counted, METRICS, labels)
    said = [*facts(trained, common, resamples), *counting_facts(counted, mean_controls(trained.lines))]
    return Page(title, summary.strip(), said, sections, warnings)


def numbered(row: Row) -> str:
    """The label; a row of the paper has its number, by which texts refer to it."""
    return f"{ROWS.index(row) + 1}. {row.label}" if row.table == "paper" else row.label


def _place(comparison: Comparison, row: Row) -> int:
    return [system.name for system in comparison.systems].index(row.variant.name)


def _changes(trained: Trained, comparison: Comparison, rows: Sequence[Row], baselines: Baselines) -> Grid:
    columns = [comparison.metrics.index(metric) for metric in METRICS]
    places = [_place(comparison, row) for row in rows]
    best = comparison.means[places].max(axis=0)
    table = []
    for row, place in zip(rows, places, strict=True):
        apart = comparison.systems[place].difference
        cells = [Cell(numbered(row))]
        for metric, column in zip(METRICS, columns, strict=True):
            text = mean_and_deviation(trained.lines, row.variant.name, metric)
            mean = comparison.means[place, column]
            note = "" if apart is None else relative(mean, comparison.means[0, column])
            mark: Literal["best", ""] = "best" if mean == best[column] else ""
            cells.append(Cell(text, note, mark, "" if apart is None else tone(apart, column)))
        table += [cells, *control_row(trained.lines, row.variant.name, numbered(row), METRICS)]
    for name, values in baselines.items():
        table.append([Cell(name), *(Cell(f"{100 * values[metric]:.2f}") for metric in METRICS)])
    return Grid([Cell("configuration"), *map(Cell, METRICS)], table)


def _intervals(comparison: Comparison, rows: Sequence[Row]) -> Grid:
    columns = [comparison.metrics.index(metric) for metric in METRICS]
    first = np.zeros(len(comparison.metrics), dtype=np.int64)
    table = []
    for row in rows[1:]:
        apart = comparison.apart(_place(comparison, row), first)
        table.append([Cell(numbered(row)), *(difference(apart, column) for column in columns)])
    return Grid([Cell("configuration"), *map(Cell, METRICS)], table)
