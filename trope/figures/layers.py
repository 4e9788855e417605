"""Figure 2: how strongly each block turns by time, and what its attention to one history looks like."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from trope.figures.numbers import Floats, Side, causal_correlation, coefficients, geometry, rms, started_at, strength
from trope.figures.run import RunView, example, unpadded, whose
from trope.figures.style import INK, KEY, QUERY, Drawn, diverging, finish, page, rising, unavailable
from trope.models.attention_maps import attention_maps
from trope.rotary import TRoPE, query_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, SUBJECT = "fig2-layers", "Coefficients and attention by block"
SHOWN = 3  # blocks with maps


def select(strengths: list[float], most: int = SHOWN) -> list[int]:
    """Blocks to show: all, or the weakest, the middle and the strongest, in their order."""
    if len(strengths) <= most:
        return list(range(len(strengths)))
    order = np.argsort(strengths, kind="stable")
    return sorted({int(order[round(place)]) for place in np.linspace(0, len(order) - 1, most)})


def draw(view: RunView) -> Drawn:
    """RMS of the coefficients as bars; under each selected block its temporal component and its attention."""
    if not view.ropes:
        return unavailable(NAME, SUBJECT, view.why_no_ropes)
    batch = unpadded(example(view))
    later = view.model.looks_later
    looking_from = query_times(batch.times, t_now=batch.t_now, check_values=False, later=later)[0]
    strengths = [strength(rope) for rope in view.ropes]
    shown = select(strengths)
    parts = [geometry(view.ropes[block], batch.times[0], looking_from) for block in shown]
    maps = attention_maps(view.model, batch.items, batch.times, batch.t_now)
    whole = [maps[block].numpy() for block in shown] if maps else []

    figure = page(7.4 if len(shown) > 1 else 4.6)
    widths = (1.0, 0.75 + 0.65 * max(len(shown), 2))
    left, right = figure.subfigures(1, 2, width_ratios=widths, squeeze=False)[0]
    _bars(left.subplots(), view.ropes, shown)
    _maps(right, shown, parts, whole)
    caption = (
        f"History: the last {batch.times.shape[1]} events of {whose(view, batch)}. "
        "Temporal component: mean over planes of the cosine of the angle between the query's and the key's rotation, "
        "content left out. Attention: what the block really gives to each event, mean over heads, white the least "
        "and dark the most in that block. Black lines on the bars: where training began."
    )
    return finish(NAME, figure, _title(strengths, parts, whole), caption)


def _title(strengths: list[float], parts: list[Floats], whole: list[Floats]) -> str:
    if len(strengths) == 1:
        agree = (
            f"; its attention has a correlation of {causal_correlation(parts[0], whole[0]):.2f} with time alone"
            if whole
            else ""
        )
        return f"The block's query coefficients have an RMS of {strengths[0]:.2f}{agree}"
    alike = np.mean([causal_correlation(a, b) for a, b in combinations(parts, 2)])
    return (
        f"Query coefficients have an RMS of {min(strengths):.2f} to {max(strengths):.2f} over {len(strengths)} blocks; "
        f"the blocks' temporal maps of one history have a correlation of {alike:.2f}"
    )


def _bars(axes: Axes, ropes: list[TRoPE], shown: list[int]) -> None:
    axes.set_title("a) RMS of coefficients")
    at = np.arange(len(ropes))
    both = any(coefficients(rope, "k").any() for rope in ropes)
    sides: list[tuple[Side, str, str, float]] = [("q", QUERY, "query", -0.2 if both else 0.0), ("k", KEY, "key", 0.2)]
    drawn = sides[: 1 + both]
    starts = {side: [started_at(rope, side) for rope in ropes] for side, *_ in drawn}
    known = [rms(start) for column in starts.values() for start in column if start is not None]
    right = max([strength(rope, side) for rope in ropes for side, *_ in drawn] + known + [1e-6])
    for side, colour, word, offset in drawn:
        values = [strength(rope, side) for rope in ropes]
        axes.barh(at + offset, values, 0.36, color=colour)
        for place, value, start in zip(at + offset, values, starts[side], strict=True):
            if start is not None:
                axes.plot([rms(start)] * 2, [place - 0.2, place + 0.2], color=INK, lw=2)
            axes.annotate(
                f"{word} {value:.2f}", (right, place), (8, 0), textcoords="offset points", va="center", color=colour,
                fontweight="bold",
            )  # fmt: skip
    axes.set_yticks(
        at, [f"block {layer + 1}" + (" *" if len(shown) < len(ropes) and layer in shown else "") for layer in at]
    )
    axes.set_ylim(max(len(ropes), 2) - 0.5, -0.5)
    axes.set_xlim(0, 1.75 * right)
    axes.set_xlabel("RMS of alpha (no unit)" + ("\n* shown on the right" if len(shown) < len(ropes) else ""))


def _maps(figure: Figure, shown: list[int], parts: list[Floats], whole: list[Floats]) -> None:
    rows = ((parts, "b", "temporal component"), (whole, "c", "attention"))[: 2 if whole else 1]
    if len(shown) > 1:
        grid = figure.subplots(len(rows), len(shown), squeeze=False)
    else:  # one block's maps side by side
        grid = figure.subplots(1, len(rows), squeeze=False).T
    reach = max(float(np.abs(part[np.tri(len(part), dtype=bool)]).max()) for part in parts)
    for row, (maps, letter, what) in enumerate(rows):
        for column, (block, scores) in enumerate(zip(shown, maps, strict=True)):
            axes = grid[row, column]
            causal = np.tri(len(scores), dtype=bool)
            shades = np.ma.masked_where(~causal, scores)
            low, high = (-reach, reach) if row == 0 else (scores[causal].min(), scores[causal].max())
            image = axes.imshow(
                shades, cmap=rising() if row else diverging(), vmin=low, vmax=high, interpolation="nearest"
            )
            axes.set_title(f"{letter}) block {block + 1}\n{what}", fontsize=10.5)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel("newest ← query → oldest")
            if row == len(rows) - 1 or len(shown) == 1:
                axes.set_xlabel("oldest ← key → newest")
        bar = figure.colorbar(image, ax=grid[row, :], shrink=0.8 if len(shown) > 1 else 0.6, pad=0.02)
        marks = [f"{-reach:.1f} opposed", "0", f"{reach:.1f} aligned"] if row == 0 else ["least", "", "most"]
        bar.set_ticks([low, (low + high) / 2, high], labels=marks)
