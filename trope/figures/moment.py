"""Figure 4: which moment each query looks from, in training and when serving, and what another `t_now` changes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.evaluate.evaluation import fitted_pulse
from trope.figures.numbers import Floats, periods, resonance
from trope.figures.run import USERS, VISITS, RunView, example, histories, test_users, visits, whose
from trope.figures.style import (
    GREY,
    KEY,
    PALE,
    QUERY,
    RESULT,
    Drawn,
    diverging,
    finish,
    page,
)  # fmt: skip
from trope.serve.histories import Histories
from trope.serve.recommender import Recommender
from trope.times import DAY, HOUR, MINUTE, YEAR, say_label, say_short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = npt.NDArray[np.int64]
NAME = "fig4-moment"
MOMENTS, TOP, SLOTS, COLUMNS = 53, 10, 4, 400


def horizon(view: RunView) -> int:
    """How far ahead to ask: a year, or the training data's time span where that is shorter."""
    first, last = view.data.time_span
    return int(min(YEAR, max(last - first, 1)))


def served(view: RunView, users: Tensor, offsets: Tensor) -> Ints:
    """The top items, as `Recommender` serves them `offsets` seconds after t_now, history unchanged: [B, M, K]."""
    V = view.model.num_items
    # Items are told apart by their dense ids, so the catalogue needs no other.
    recommender = Recommender(view.model, Catalogue(Ids(np.arange(1, V + 1)), None), "cpu")
    whole = Histories.of(view.data, users, view.data.split_range("test")[0][users].long())
    moments_BM = histories(view, users).t_now[:, None] + offsets
    return recommender.rank_moments(whole, moments_BM.numpy(), min(TOP, V)).items_BMK


def overlaps(lists_BMK: Ints) -> Floats:
    """How many of the items of the first moment are still there at each: [B, M]."""
    first_BK = lists_BMK[:, 0]
    return (lists_BMK[..., None] == first_BK[:, None, None, :]).any(-1).sum(-1).astype(np.float64)


def draw(view: RunView) -> Drawn:
    """The shift on a real history; below it query phases and recommendations as t_now moves on."""
    ahead = horizon(view)
    offsets = torch.linspace(0, ahead, MOMENTS, dtype=torch.float64).long()
    users = test_users(view, USERS)
    kept = overlaps(served(view, users, offsets))
    batch = example(view)
    moments = visits(batch.times[0, : int(batch.lengths[0])])[-VISITS:][-SLOTS:]

    figure = page(7.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.0, 1.35), squeeze=False)[:, 0]
    training, serving = top.subplots(1, 2)
    labels = [_label(view, int(moment)) for moment in moments]
    _slots(training, "a) training: query m looks from visit m + 1", labels, [*labels[1:], labels[-1]], "label only")
    now = _label(view, max(int(batch.t_now[0]), int(moments[-1])))
    _slots(serving, "b) serving: the last query looks from now", labels, [*labels[1:], now], "t_now")
    phases, lists = bottom.subplots(1, 2)
    unit, word = _unit(ahead)
    _phases(phases, bottom, view, ahead, unit, word)
    mean = kept.mean(0)
    _overlap(lists, offsets.numpy() / unit, mean, kept, word)
    size = min(TOP, view.model.num_items)
    title = _finding(mean, offsets, size, len(users))
    caption = (
        f"a, b) Dates are the last visits of {whose(view, batch)}. "
        "c) Cosine of how far the query's rotation has turned since the first t_now: vermilion as at first. "
        "d) Recommendations of this run's model to users from all over the test split; only t_now moves. Thin: ten."
    )
    if fitted_pulse(view.model) is not None:
        caption += " They are ranked with the pulse, as when serving; everybody's counts end with the training data."
    return finish(NAME, figure, title, caption)


def _label(view: RunView, moment: int) -> str:
    """The moment in two lines; its day alone where the log has no times of day."""
    return say_label(moment) if view.has_hours else say_label(moment).partition("\n")[0]


def _finding(mean: Floats, offsets: Tensor, size: int, users: int) -> str:
    """What the later moments change; mean: [M] items of the first top `size` that are left, over so many users."""
    most = int(mean.argmin())
    changed = size - mean[most]
    if changed == 0:
        until = say_short(float(offsets[-1]))
        return f"Asking later, up to {until}, changes nothing in the top {size} of any of {users} users"
    amount = f"{changed:.1f}" if changed >= 0.05 else "less than 0.1"
    return (
        f"Asking {say_short(float(offsets[most]))} later changes the most: {amount} of the top {size} "
        f"for the same history (mean of {users} users)"
    )


def _unit(ahead: float) -> tuple[float, str]:
    """The unit of an axis that reaches so far, in seconds and by name."""
    units = ((DAY, "days"), (HOUR, "hours"), (MINUTE, "minutes"))
    return next(((size, word) for size, word in units if ahead >= 3 * size), (1, "seconds"))


def _slots(axes: Axes, title: str, keys: list[str], queries: list[str], last: str) -> None:
    """Two rows of boxes, keys over queries; an arrow shows whose moment a query takes."""
    axes.set_title(title)
    axes.axis("off")
    axes.set_xlim(-0.95, len(keys) - 0.45)
    axes.set_ylim(-0.62, 1.3)
    serving = last == "t_now"
    for row, texts, word, colour in ((1, keys, "keys", KEY), (0, queries, "queries", QUERY)):
        axes.text(-0.92, row, word, color=colour, va="center", fontweight="bold", fontsize=10)
        for place, text in enumerate(texts):
            special = row == 0 and place == len(texts) - 1
            fill = colour if special and serving else "white"
            box = {
                "boxstyle": "round,pad=0.3",
                "fc": fill,
                "ec": GREY if special and not serving else colour,
                "lw": 1.6,
            }
            ink = "white" if fill == colour else GREY if special else "#222222"
            axes.text(place, row, text, ha="center", va="center", fontsize=9, bbox=box, color=ink)
    for place in range(len(keys) - 1):
        axes.annotate(
            "", (place + 0.12, 0.32), (place + 0.88, 0.68), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1.5}
        )
    axes.text(len(keys) - 1, -0.36, last, ha="center", va="top", fontsize=10, color=QUERY if serving else GREY)


def _phases(axes: Axes, figure: Figure, view: RunView, ahead: float, unit: float, word: str) -> None:
    axes.set_title("c) the query's rotation as t_now moves on")
    axes.set_xlabel(f"{word} after the first t_now")
    turns = np.concatenate([periods(rope, "q") for rope in view.ropes]) if view.ropes else np.array([])
    # A plane that turns within a few columns could only be drawn as noise.
    slow = np.sort(turns[np.isfinite(turns) & (turns >= 8 * ahead / COLUMNS)])
    if len(slow) == 0:
        why = "No query turns slowly enough to be drawn." if view.ropes else view.why_no_ropes
        middle = axes.transAxes
        axes.text(0.5, 0.5, textwrap.fill(why, 30), color=GREY, transform=middle, ha="center", va="center")
        axes.set_yticks([])
        axes.set_xlim(0, ahead / unit)
        return
    seconds = np.linspace(0, ahead, COLUMNS)
    image = axes.imshow(
        resonance(seconds[None, :], slow[:, None]), cmap=diverging(), vmin=-1, vmax=1, aspect="auto",
        extent=(0, ahead / unit, len(slow) - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    marks = np.unique(np.linspace(0, len(slow) - 1, min(5, len(slow))).round().astype(int))
    axes.set_yticks(marks, [say_short(slow[mark]) for mark in marks])
    axes.set_ylabel("plane, by the time of one turn")
    if len(slow) < len(turns):
        axes.text(1.0, 1.01, f"{len(turns) - len(slow)} faster planes left out", transform=axes.transAxes, ha="right",
                  va="bottom", fontsize=8.5, color=GREY)  # fmt: skip
        axes.set_title("c) the query's rotation\nas t_now moves on")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_ticks([-1, 1], labels=["half turn", "as at first"], rotation=90, va="center")


def _overlap(axes: Axes, at: Floats, mean: Floats, kept: Floats, word: str) -> None:
    axes.set_title("d) what is left of the first top 10")
    for row in kept[:: max(1, len(kept) // 10)][:10]:
        axes.plot(at, row, color=PALE, lw=1, zorder=1)
    axes.plot(at, mean, color=RESULT, lw=3, zorder=2)
    least = int(mean.argmin())
    above = 14 if mean[least] < 2.5 else -24
    side = "center" if 0.2 < least / len(at) < 0.8 else "left" if least < len(at) / 2 else "right"
    axes.annotate(
        f"mean, least {mean[least]:.1f}", (at[least], mean[least]), (6 if least == 0 else 0, above),
        textcoords="offset points", color=RESULT, ha=side, fontweight="bold",
        bbox={"fc": "white", "ec": "none", "pad": 1.5, "alpha": 0.9},
    )  # fmt: skip
    axes.plot(at[least], mean[least], "o", color=RESULT, ms=8)
    axes.set_ylim(-0.2, TOP + 0.4)
    axes.set_xlim(at[0], at[-1])
    axes.set_xlabel(f"{word} after the first t_now")
    axes.set_ylabel("items in both lists")
