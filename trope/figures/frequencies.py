"""Figure 3: the learned coefficients over the frequency bank, and the planes that come closest to calendar cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trope.figures.layers import select
from trope.figures.numbers import (
    Floats,
    base_periods,
    coefficients,
    nearest_plane,
    periods,
    resonance,
    starting_periods,
    strength,
)  # fmt: skip
from trope.figures.run import RunView
from trope.figures.style import (
    GREY,
    KEY,
    PALE,
    QUERY,
    Drawn,
    finish,
    log_time_axis,
    page,
    shade_bands,
    sides_strip,
    unavailable,
)  # fmt: skip
from trope.rotary import TRoPE
from trope.times import DAY, WEEK, YEAR, say_short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, SUBJECT = "fig3-frequencies", "Learned coefficients over the frequency bank"
CYCLES = (
    ("day", DAY),
    ("week", WEEK),
    ("30 days", 30 * DAY),
    ("90 days", 90 * DAY),
    ("half a year", YEAR / 2),
    ("year", YEAR),
)
CLOSE = 0.05  # how far a plane's period may be off and still be called tuned


def same_sign(ropes: list[TRoPE]) -> tuple[int, int]:
    """In how many planes alpha_q and alpha_k have the same sign, and how many turn on both sides at all."""
    products: Floats = np.concatenate([coefficients(rope, "q") * coefficients(rope, "k") for rope in ropes])
    return int((products > 0).sum()), int((products != 0).sum())


def tuned_cycles(turns: list[Floats], cycles: Sequence[tuple[str, float]]) -> int:
    """How many of these cycles have a plane whose turn, in seconds, is close to theirs."""
    every = np.concatenate(turns)
    return sum(bool((np.abs(every / cycle - 1) <= CLOSE).any()) for _, cycle in cycles)


def told_cycles(view: RunView) -> list[tuple[str, float]]:
    """The calendar cycles that the log's times can tell; plain dates cannot tell the day."""
    return [(name, cycle) for name, cycle in CYCLES if cycle != DAY or view.has_hours]


def _tuning(ropes: list[TRoPE], side: str, cycles: Sequence[tuple[str, float]]) -> str:
    """How many cycles are met, after training and, where the run keeps it, before."""
    now = tuned_cycles([periods(rope, "q" if side == "query" else "k") for rope in ropes], cycles)
    starts = [start for rope in ropes if (start := starting_periods(rope)) is not None]
    before = f" ({tuned_cycles(starts, cycles)} before training)" if starts else ""
    return f"Calendar cycles with a {side} plane within {100 * CLOSE:.0f} %: {now} of {len(cycles)}{before}"


def _signs(ropes: list[TRoPE]) -> str:
    """How query and key coefficients relate."""
    agree, turning = same_sign(ropes)
    if all(rope.shared for rope in ropes):
        return "query and key share their coefficients"
    if turning:
        return f"query and key agree in sign in {agree} of {turning} planes"
    return "only one side turns"


def draw(view: RunView) -> Drawn:
    """Coefficients of up to three blocks on the left, resonance curves of calendar cycles on the right."""
    if not view.ropes:
        return unavailable(NAME, SUBJECT, view.why_no_ropes)
    shown = select([strength(rope) for rope in view.ropes])
    cycles = told_cycles(view)
    figure = page(6.6)
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1.0), squeeze=False)[0]
    for row, (axes, layer) in enumerate(zip(left.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True)):
        _coefficients(axes, view.ropes[layer], layer, row == 0, row == len(shown) - 1)
    left.suptitle("a) coefficients by the period of their plane", x=0.02, ha="left", fontsize=11.5, fontweight="bold")
    for row, (axes, (name, cycle)) in enumerate(zip(right.subplots(len(CYCLES), 1, sharex=True), CYCLES, strict=True)):
        if (name, cycle) not in cycles:
            _untold(axes, name)
            continue
        layer, plane, period = nearest_plane(view.ropes, cycle)
        _curve(axes, name, cycle, period, f"block {layer + 1}, plane {plane + 1}", row == len(CYCLES) - 1)
    side = "query" if any(rope.rotate_query for rope in view.ropes) else "key"
    right.suptitle(f"b) the {side} plane nearest to each cycle", x=0.02, ha="left", fontsize=11.5, fontweight="bold")
    title = f"{_tuning(view.ropes, side, cycles)}; {_signs(view.ropes)}"
    caption = (
        "a) Across: one turn at alpha = 1, which is 2 pi beta. Up: the coefficient that training ended with; the plane "
        "turns alpha times as fast, backwards if negative; at 0 it ignores time. b) The cosine between a query and "
        "itself some cycles earlier: where the curve is at the top on every grey line the plane keeps step (coloured: "
        f"period within {100 * CLOSE:.0f} %); the others drift off. "
        f"With {sum(rope.planes for rope in view.ropes)} planes some come close by chance."
    )
    return finish(NAME, figure, title, caption)


def _coefficients(axes: Axes, rope: TRoPE, layer: int, first: bool, last: bool) -> None:
    at = base_periods(rope)
    low, high = float(at.min()) / 1.6, float(at.max()) * 1.6
    log_time_axis(axes, low, high)
    shade_bands(axes, low, high, named=first)
    axes.axhline(0, color=GREY, lw=1)
    words, reach = [], [0.0]
    for side, colour, marker, nudge, word in (("q", QUERY, "o", 0.965, "● query"), ("k", KEY, "D", 1.035, "◆ key")):
        values = coefficients(rope, side)  # type: ignore[arg-type]
        if not values.any():
            continue
        words.append((word, colour))
        reach += values.tolist()
        axes.vlines(at * nudge, 0, values, color=colour, lw=1.6, alpha=0.6)
        axes.plot(at * nudge, values, marker, color=colour, ms=6)
    sides_strip(axes, words, (min(reach), max(reach)))
    axes.set_ylabel(f"alpha, block {layer + 1}")
    if last:
        axes.set_xlabel("one turn at alpha = 1")


def _untold(axes: Axes, name: str) -> None:
    axes.set_title(f"{name}: cannot tell, the log has plain dates", fontsize=9.5, fontweight="normal", color=GREY)
    axes.tick_params(left=False, bottom=False, labelleft=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _curve(axes: Axes, name: str, cycle: float, period: float, where: str, last: bool) -> None:
    cycles = np.linspace(0, 6, 601)
    close = abs(period / cycle - 1) <= CLOSE
    for line in range(7):
        axes.axvline(line, color=PALE, lw=1, zorder=0)
    axes.plot(cycles, resonance(cycles * cycle, period), color=QUERY if close else GREY, lw=2)
    axes.set_ylim(-1.15, 1.15)
    axes.set_xlim(0, 6)
    axes.set_yticks([-1, 1])
    off = 100 * (period / cycle - 1)
    verdict = "tuned" if close else f"{off:+.0f} %" if abs(off) >= 10 else f"{off:+.1f} %"
    axes.set_title(f"{name}: one turn in {say_short(period)} ({verdict}; {where})", fontsize=9.5, fontweight="normal")
    if last:
        axes.set_xlabel("cycles back in time")
