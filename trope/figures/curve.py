"""The learning curve of a run, from its log: training loss and validation, epoch by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trope.figures.run_files import read_epochs
from trope.figures.style import GREY, RESULT, Drawn, finish, page, unavailable
from trope.runs import CONFIG
from trope.settings import read_saved_toml

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, SUBJECT = "learning-curve", "Learning curve"


def draw(run: Path) -> Drawn:
    """Loss on the left, validation on the right with the best epoch marked."""
    rows = read_epochs(run)
    if not rows:
        return unavailable(NAME, SUBJECT, "The log has no finished epoch.")
    figure = page(3.2)
    loss, quality = figure.subplots(1, 2)
    _line(loss, [(row["epoch"], row["epoch_loss"]) for row in rows], GREY, "training loss (nats)")
    metric = read_saved_toml(run / CONFIG).train.criterion
    measured = [(row["epoch"], 100 * row[metric]) for row in rows if metric in row]
    _line(quality, measured, RESULT, f"validation {metric} (%)")
    title = f"{len(rows)} epochs in {rows[-1].get('seconds', 0) / 60:.1f} minutes"
    if measured:
        epoch, best = max(measured, key=lambda pair: (pair[1], -pair[0]))
        quality.plot(epoch, best, "o", color=RESULT, ms=9)
        # Towards the middle, so that no label leaves the axes.
        side = "left" if 2 * epoch <= measured[0][0] + measured[-1][0] else "right"
        quality.annotate(f"best {best:.2f} %", (epoch, best), (0, 9), textcoords="offset points", ha=side, color=RESULT)
        quality.margins(y=0.2)
        title = f"Validation {metric} is best after epoch {epoch} of {rows[-1]['epoch']}: {best:.2f} %"
    return finish(NAME, figure, title, "Loss: mean over the epoch's steps, dropout on. Validation: full catalogue.")


def _line(axes: Axes, points: list[tuple[int, float]], colour: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, lw=2, marker=".")
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
