"""The panels of figure 7: their dates and their titles."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
from data_logs import START

from trope.figures import items as figure_items
from trope.figures import style as figure_style
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
