"""Figure 6, beyond the paper: how far training moved each frequency from where it began (`conditioning="span"`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from trope.figures.layers import select
from trope.figures.numbers import Floats, Side, base_periods, movement, strength
from trope.figures.run import RunView
from trope.figures.style import (
    GREY,
    KEY,
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
from trope.times import say_short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, SUBJECT = "fig6-movement", "How far frequencies moved"


def summary(moves: Floats) -> tuple[float, int]:
    """The median size of the moves in radians, and how many are of half a turn or more."""
    return float(np.median(np.abs(moves))), int((np.abs(moves) >= math.pi).sum())


def draw(view: RunView) -> Drawn:
    """One panel a block: radians gained over the time span, by the period of the plane at its start."""
    if not view.ropes:
        return unavailable(NAME, SUBJECT, view.why_no_ropes)
    if all(movement(rope, "q") is None for rope in view.ropes):
        rope = view.ropes[0]
        why = "its frequencies are frozen" if not rope.learnable else 'conditioning="paper" does not keep the start'
        return unavailable(NAME, SUBJECT, f"There is nothing to compare with: {why}.")
    shown = select([strength(rope) for rope in view.ropes])
    figure = page(1.6 + 2.2 * len(shown))
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for row, (axes, layer) in enumerate(zip(panels, shown, strict=True)):
        _panel(axes, view.ropes[layer], layer, row == 0, row == len(shown) - 1)
    moves = np.concatenate([move for rope in view.ropes for move in _moves(rope).values()])
    median, far = summary(moves)
    first, last = view.model.time_span
    title = (
        f"Training turned the median frequency by {median:.2f} rad over the {say_short(last - first)} of the data; "
        f"{far} of {len(moves)} moved half a turn or more"
    )
    caption = (
        "Phase that a frequency has gained on its start from the first to the last training event (8 delta). "
        "A full turn (6.28) shifts a plane by one cycle over the data; less than that is fine tuning, not another "
        "period. Dotted: half a turn."
    )
    return finish(NAME, figure, title, caption)


def _moves(rope: TRoPE) -> dict[Side, Floats]:
    """The moves of each side that has its own and turns."""
    sides: list[tuple[Side, bool]] = [
        ("q", rope.rotate_query or rope.shared),
        ("k", rope.rotate_key and not rope.shared),
    ]
    found = {side: movement(rope, side) for side, there in sides if there}
    return {side: move for side, move in found.items() if move is not None}


def _panel(axes: Axes, rope: TRoPE, layer: int, first: bool, last: bool) -> None:
    at = base_periods(rope)[: rope.learned]
    low, high = float(at.min()) / 1.6, float(at.max()) * 1.6
    log_time_axis(axes, low, high)
    shade_bands(axes, low, high, named=first)
    axes.axhline(0, color=GREY, lw=1)
    moves = _moves(rope)
    words = []
    for side, move in moves.items():
        colour, marker, nudge = (QUERY, "o", 0.965) if side == "q" else (KEY, "D", 1.035)
        word = "● both" if rope.shared else "● query" if side == "q" else "◆ key"
        axes.vlines(at * nudge, 0, move, color=colour, lw=1.6, alpha=0.6)
        axes.plot(at * nudge, move, marker, color=colour, ms=6)
        words.append((word, colour))
    reach = max((float(np.abs(move).max()) for move in moves.values()), default=1.0)
    if reach > 2:
        for edge in (-math.pi, math.pi):
            axes.axhline(edge, color=GREY, lw=1, ls=":")
    reach = max(reach, 0.1)  # rounding is no movement
    sides_strip(axes, words, (-reach, reach))
    axes.set_ylabel(f"block {layer + 1}\nradians over the data")
    if last:
        axes.set_xlabel("one turn at alpha = 1")
