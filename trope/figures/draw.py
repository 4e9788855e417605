"""Draws the paper's five figures from a run, two more, its learning curve, and a page that holds them all.

Each figure is a module of this package: functions for its numbers, and `draw`. A run may have nothing for a figure (a
model without T-RoPE, for example); the figure is then one line that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trope.figures import curve, frequencies, geometry, items, layers, moment, movement, stages
from trope.figures.page import write_report
from trope.figures.run import open_run
from trope.figures.style import FORMATS, Drawn, content, require_matplotlib, save, style

DRAWN = (geometry, layers, frequencies, moment, stages, movement, items)
REPORT = "report.html"


def draw_all(run: Path, data: Path | None = None) -> Iterator[Drawn]:
    """Every figure of a run in turn, the learning curve last."""
    require_matplotlib()
    view = open_run(run, data)
    for module in DRAWN:
        with style():
            drawn = module.draw(view)
        yield drawn
    with style():
        drawn = curve.draw(run)
    yield drawn


def write_figures(run: Path, out: Path, formats: Sequence[str] = FORMATS, data: Path | None = None) -> Iterator[Path]:
    """Draw every figure into `out`, then write the page; yields each path when its file is whole."""
    check_formats(formats)
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a folder; choose another --out")
    pictures = []
    for drawn in draw_all(run, data):
        svg = content(drawn.figure, "svg")
        pictures.append((drawn, svg))
        for ending in formats:
            yield save(svg if ending == "svg" else content(drawn.figure, ending), out / f"{drawn.name}.{ending}")
    yield write_report(run, pictures, out / REPORT)


def check_formats(formats: Sequence[str]) -> None:
    """Refuse a format that figures cannot have."""
    unknown = [ending for ending in formats if ending not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"--format is a list of {', '.join(FORMATS)}, got {', '.join(formats) or 'nothing'}")
