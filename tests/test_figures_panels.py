"""The panels of figure 7: their dates and their titles."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_logs import START, prepared, random_log, write_parquet
from test_figures import untrained

from trope.figures import items as figure_items
from trope.figures import style as figure_style
from trope.figures.run import open_run
from trope.times import DAY, HOUR, MINUTE, YEAR


@pytest.mark.parametrize("unit", [YEAR, DAY, HOUR, MINUTE])
@pytest.mark.parametrize("times", [1.6, 1.99, 2.5])
def test_dates_of_any_span_have_ticks_that_do_not_touch(unit: int, times: float) -> None:
    at, ones = np.linspace(START, START + times * unit, figure_items.PARTS), np.ones(figure_items.PARTS)
    with figure_style.style(), warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where it finds no interval
        figure = figure_style.page(6.4)
        axes = figure.subplots(1, 3)[0]
        figure_items._panel(axes, at, ones, ones, "item 1", None)
        figure.draw_without_rendering()
    labels = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert 2 <= len(labels) <= 5
    assert all(left.x1 < right.x0 for left, right in pairwise(labels))


def test_panels_are_titled_by_the_names_of_items(tmp_path: Path) -> None:
    """Names are drawn as they are, long ones cut to their panel; an item without a name is shown by its id."""
    names = ["$\\frac{1$", "<b>&[/bold]", "\x1b[31mred", "WHOLE ORGANIC MILK, 2 GALLONS, WITH A HANDLE", ""]
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=400, users=30, items=len(names)))
    rows = pa.table({"item": range(1, len(names) + 1), "name": names})
    pq.write_table(rows, tmp_path / "items.parquet")
    data = prepared(log, tmp_path / "data", items=tmp_path / "items.parquet")
    view = open_run(untrained(data, tmp_path / "run", "hstu-time"))
    with figure_style.style():
        figure = figure_items.draw(view).figure
        figure.draw_without_rendering()
    panels = figure.axes[: len(names)]
    titles = {axes.get_title(loc="left"): axes for axes in panels}
    long = "WHOLE ORGANIC MILK, 2 GAL…"
    assert set(titles) == {"$\\frac{1$", "<b>&[/bold]", "\\x1b[31mred", long, "item 5"}
    axes = titles[long]
    assert axes._left_title.get_window_extent().x1 <= axes.get_tightbbox().x0 + figure.bbox.width / 3
    ElementTree.fromstring(figure_style.content(figure, "svg"))
