"""The demo's figure: how recommendations of seasonal products follow the year, beside what was really bought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import matplotlib.dates as mdates
import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.figure import Figure

from trope.data.printable import printable
from trope.figures.style import BLUE, FORMATS, PALE, VERMILION, content, save

Floats = npt.NDArray[np.float64]
# The baseline, then T-RoPE. Colour-blind readers can tell the colours apart, and line styles work without colour.
STYLES = ((VERMILION, "--", 1.8), (BLUE, "-", 2.4))
NAMED, LONGEST = 3, 17
"""Product types written over a panel, and the most letters of each."""


@dataclass(frozen=True)
class Panel:
    """One season. Shapes: F moments.

    quarter: when it peaks. names: of its product types, most seasonal first. bought: [F] their share of all purchases.
    recommended: [F] their share of all recommendations, by model, the baseline first.
    """

    quarter: str
    names: list[str]
    bought: Floats
    recommended: dict[str, Floats]


def draw(panels: Sequence[Panel], moments: npt.NDArray[np.int64], title: str, path: Path) -> list[Path]:
    """Draw each curve as multiples of its own mean; returns the paths of the PNG and the SVG.

    panels: four. moments: [F] Unix seconds.
    """
    with rc_context({"text.parse_math": False}):  # a name may have dollar signs
        figure = _figure(panels, moments, title)
    return [save(content(figure, ending), path.with_suffix(f".{ending}")) for ending in FORMATS]


def _figure(panels: Sequence[Panel], moments: npt.NDArray[np.int64], title: str) -> Figure:
    days = [datetime.fromtimestamp(moment, UTC) for moment in moments.tolist()]
    # A figure of its own, without pyplot: no display, no global state.
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, panel in zip(axes.flat, panels, strict=True):
        axis.fill_between(days, _relative(panel.bought), color=PALE, lw=0, label="bought")
        for (model, share), (colour, style, width) in zip(panel.recommended.items(), STYLES, strict=True):
            axis.plot(days, _relative(share), style, color=colour, lw=width, label=f"recommended by {printable(model)}")
        names = ", ".join(printable(name.lower())[:LONGEST].strip() for name in panel.names[:NAMED])
        axis.set_title(f"Peak in {panel.quarter}\n{names}, ...", fontsize=9, loc="left")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(mdates.MonthLocator(interval=2))
        axis.xaxis.set_major_formatter(mdates.DateFormatter("%b"))
    for axis in axes[:, 0]:
        axis.set_ylabel("share, 1 = mean over the moments")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(printable(title), fontsize=12, x=0.01, ha="left")
    return figure


def _relative(share: Floats) -> Floats:
    """A curve divided by its mean; a curve that is zero everywhere stays zero."""
    return share / share.mean() if share.any() else share
