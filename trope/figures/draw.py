"""The paper's five figures from a run, two of our own, its learning curve, and a page that holds them all.

Each figure has a module `figure_*.py` with its numbers as functions and one `draw`. A figure that a run has nothing for
(no T-RoPE, say) is a line that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trope.figures import curve as figure_curve  # fmt: skip
from trope.figures import frequencies as figure_frequencies  # fmt: skip
from trope.figures import geometry as figure_geometry  # fmt: skip
from trope.figures import items as figure_items  # fmt: skip
from trope.figures import layers as figure_layers  # fmt: skip
from trope.figures import moment as figure_moment  # fmt: skip
from trope.figures import movement as figure_movement  # fmt: skip
from trope.figures import stages as figure_stages  # fmt: skip
from trope.figures.page import write_report
from trope.figures.run import open_run
from trope.figures.style import FORMATS, Drawn, content, require_matplotlib, save, style

DRAWN = (
    figure_geometry, figure_layers, figure_frequencies, figure_moment, figure_stages, figure_movement, figure_items,
)  # fmt: skip
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
        drawn = figure_curve.draw(run)
    yield drawn


def write_figures(run: Path, out: Path, formats: Sequence[str] = FORMATS, data: Path | None = None) -> Iterator[Path]:
    """Draw everything into `out`, each file whole or absent, and the page last; yields what has been written."""
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
    """Only what the figures are made for."""
    unknown = [ending for ending in formats if ending not in FORMATS]
    if unknown or not formats:
        raise ValueError(f"--format is a list of {', '.join(FORMATS)}, got {', '.join(formats) or 'nothing'}")
