"""Figure 1: where events stand on the circle of one rotation plane, by index, by time, and with shifted queries."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from trope.figures.numbers import Floats, base_periods, nearest_plane
from trope.figures.run import VISITS, RunView, example, visits, whose
from trope.figures.style import GREY, KEY, PALE, QUERY, Drawn, finish, page, unavailable
from trope.rotary import TRoPE
from trope.times import say_short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig1-geometry"
INNER = 0.3  # radius of the first event; later ones lie further out, so that none covers another


def index_angles(count: int) -> Floats:
    """Turns of `count` events by index: even steps over the same 0.8 of a turn that the history takes by time."""
    return np.arange(count) / max(count - 1, 1) * 0.8


def longest_share(moments: Floats) -> float:
    """The longest gap's share of the whole time."""
    gaps = np.diff(moments)
    return float(gaps.max() / gaps.sum())


def choose_plane(view: RunView, span: float) -> tuple[float, str]:
    """The period of a plane on whose circle `span` seconds fill a good part of one turn, and where it is from.

    A trained plane of the run if one fits; else of its bank at alpha = 1, where planes lie close together.
    """
    if view.ropes:
        layer, plane, period = nearest_plane(view.ropes, 1.25 * span)
        if 0.3 <= span / period <= 0.97:
            return period, f"plane {plane + 1} of block {layer + 1} of this run, as trained"
        bank, words = base_periods(view.ropes[0]), "of this run's bank at alpha = 1"
    else:
        planes = view.model.config.model.head_dim // 2
        bank, words = base_periods(TRoPE(2 * max(planes, 1))), "of the paper's bank, as this model has no T-RoPE"
    wide = np.sort(bank[bank >= span / 0.97])
    plane = int(np.argmin(np.abs(bank - (wide[0] if len(wide) else bank.max()))))
    return float(bank[plane]), f"plane {plane + 1} {words}"


def draw(view: RunView) -> Drawn:
    """Circles for one user's last visits, turning as fast as one of the run's planes."""
    batch = example(view)
    moments = visits(batch.times[0, : int(batch.lengths[0])])[-VISITS:].double().numpy()
    if len(moments) < 2:
        return unavailable(NAME, "Rotation geometry", "Nobody has events at two moments, so there is no pause to show.")
    t_now = max(float(batch.t_now[0]), moments[-1])
    span = t_now - moments[0]
    period, which = choose_plane(view, span)
    by_time = (moments - moments[0]) / period
    looking_from = (np.append(moments[1:], t_now) - moments[0]) / period

    figure = page(6.0)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.0, 3.2))
    _timeline(figure.add_subplot(grid[0, :]), moments, t_now)
    circles = [figure.add_subplot(grid[1, column]) for column in range(3)]
    _circle(circles[0], "a) by index: even steps", index_angles(len(moments)))
    _circle(circles[1], f"b) by time: one turn = {say_short(period)}", by_time)
    _circle(circles[2], "c) queries look from the next visit", by_time, looking_from)
    share, steps = longest_share(moments), len(moments) - 1
    title = (
        f"By time, the longest pause takes {100 * share:.0f} % of the way round from first to last visit; "
        f"by index it is one step of {steps} ({100 / steps:.0f} %)"
    )
    caption = (
        f"Last {len(moments)} visits of {whose(view, batch)}, numbered; "
        "clockwise from the top, later visits further out. a: even steps over 0.8 of a turn. Angles in b and c: "
        f"{which}. In c the query of each visit (diamond) is turned to the moment of the next one, the last to that of "
        "the recommendation (now)."
    )
    return finish(NAME, figure, title, caption)


def _timeline(axes: Axes, moments: Floats, t_now: float) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    days = [float(date2num(datetime.fromtimestamp(moment, UTC))) for moment in (*moments, t_now)]
    axes.axhline(0, color=PALE, lw=2, zorder=0)
    # Visits close together are told apart by height, as they are by radius below.
    for number, day in enumerate(days[:-1]):
        height = 0.5 + 0.85 * (number % 3)
        axes.plot([day, day], [0, height], color=PALE, lw=1, zorder=0)
        axes.plot(day, height, "o", color=KEY, ms=15)
        axes.text(day, height, str(number + 1), color="white", ha="center", va="center", fontweight="bold", fontsize=10)
    axes.plot(days[-1], 0, "D", color=QUERY, ms=9, mfc="white", mew=2)
    axes.annotate("now", (days[-1], 0), (8, 0), textcoords="offset points", va="center", color=QUERY)
    axes.set_ylim(-0.4, 2.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    locator = AutoDateLocator(minticks=3)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_xlabel("date (UTC)")


def _circle(axes: Axes, title: str, turns: Floats, queries: Floats | None = None) -> None:
    """Events at clockwise turns from the top, numbered; with queries, each joined to its own by an arc."""
    from matplotlib.patches import Circle

    axes.set_title(title, fontsize=11)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_xlim(-1.18, 1.18)
    axes.set_ylim(-1.18, 1.18)
    axes.add_patch(Circle((0, 0), 1.1, fill=False, color=PALE, lw=1.5))
    axes.plot([0, 0], [1.04, 1.16], color=GREY, lw=1.5)
    radii = np.linspace(INNER, 1.0, len(turns))
    for number, (turn, radius) in enumerate(zip(turns, radii, strict=True)):
        if queries is not None:
            arc = np.linspace(turn, queries[number], 60)
            axes.plot(*_place(arc, radius), color=QUERY, lw=1.6, alpha=0.7, zorder=1)
            axes.plot(*_place(arc[-1:], radius), "D", color=QUERY, ms=8, mfc="white", mew=2, zorder=2)
        x, y = _place(np.array([turn]), radius)
        # A spoke shows the angle, whatever the radius.
        axes.plot(*_place(np.array([turn, turn]), np.array([0.0, 1.1])), color="#E4E4E4", lw=1, zorder=0)
        axes.plot(x, y, "o", color=KEY, ms=13, zorder=3)
        axes.text(x[0], y[0], str(number + 1), color="white", ha="center", va="center", fontsize=9.5, fontweight="bold")
    if queries is not None:
        axes.text(-1.18, -1.18, "● key", color=KEY, fontweight="bold")
        axes.text(1.18, -1.18, "◇ its query", color=QUERY, ha="right", fontweight="bold")


def _place(turns: Floats, radius: float | Floats) -> tuple[Floats, Floats]:
    """x and y of clockwise turns from the top."""
    return radius * np.sin(2 * math.pi * turns), radius * np.cos(2 * math.pi * turns)
