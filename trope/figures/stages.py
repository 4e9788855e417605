"""Figure 5: the geometry of attention in the four design stages, on blocks of daily to yearly events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trope.figures.numbers import BLOCKS, Floats, block_sequence, block_share, geometry, strength
from trope.figures.run import RunView
from trope.figures.style import GREY, INK, Drawn, diverging, finish, page
from trope.rotary import IndexRoPE, TRoPE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "fig5-stages"
EACH = 8


def stages(view: RunView) -> dict[str, Floats | None]:
    """Scores [L, L] of each stage by its name; None for the run's own where it has no T-RoPE.

    Stages a to c are plain: every coefficient 1, the bank of the run. The last is the run's strongest block.
    """
    times, looking_from = block_sequence(view.data.time_span[1], EACH)
    dim = max(view.model.config.model.head_dim // 2 * 2, 2)
    found: dict[str, Floats | None] = {"a) index RoPE": geometry(IndexRoPE(dim), times, looking_from)}
    for name, shifted in (("b) timestamps", False), ("c) + shifted queries", True)):
        plain = TRoPE(dim, alpha_init="ones", learnable=False, shifted=shifted, conjugate=False, share_alpha=True)
        found[name] = geometry(plain, times, looking_from)
    if not view.ropes:
        return {**found, "d) full T-RoPE": None}
    block = strongest(view.ropes)
    return {**found, f"d) this run, block {block + 1}": geometry(view.ropes[block], times, looking_from)}


def strongest(ropes: list[TRoPE]) -> int:
    """The block whose query coefficients have the largest RMS."""
    return int(np.argmax([strength(rope) for rope in ropes]))


def draw(view: RunView) -> Drawn:
    """Four maps side by side, with how well each tells the blocks apart."""
    found = stages(view)
    figure = page(4.2)
    row = figure.subplots(1, 4)
    shares: dict[str, float] = {}
    chance = 0.0
    image = None
    for axes, (name, scores) in zip(row, found.items(), strict=True):
        if scores is None:
            axes.axis("off")
            axes.set_title(name, fontsize=11)
            axes.text(0, 0.5, "not in this run:\nits model has\nno T-RoPE", transform=axes.transAxes, color=GREY)
            continue
        shares[name], chance = block_share(scores, EACH)
        image = _map(axes, f"{name}\nblocks: {100 * shares[name]:.0f} %", scores)
    row[0].set_ylabel("query, in the block of")
    assert image is not None
    _bar(figure, image, row)
    index, plain, shifted, *ours = (f"{100 * share:.0f} %" for share in shares.values())
    title = f"Beyond position, blocks explain {index} of index RoPE's map, {plain} with timestamps, {shifted} shifted"
    title += f", {ours[0]} in this run (chance {100 * chance:.0f} %)" if ours else f" (chance {100 * chance:.0f} %)"
    caption = (
        f"A constructed sequence: {EACH} events a day apart, then {EACH} each a week, a month and a year apart, ending "
        "with the training data. Each map: the temporal part of the score of every query (down) with every earlier "
        "event (across), the mean over planes of the cosine of their angle, content left out. a to c: coefficients 1. "
        "Percent: how much of a map's variance, after the mean of each distance in positions, the pair of blocks tells."
        + (f" d as trained: {_parts(view.ropes[0])}." if view.ropes else "")
    )
    return finish(NAME, figure, title, caption)


def _parts(rope: TRoPE) -> str:
    """Which of the paper's parts the run's encoding has."""
    has = {
        "learned coefficients": rope.learnable, "multiscale": rope.multiscale, "shifted": rope.shifted,
        "non-stationary key": rope.conjugate and rope.rotate_key, "query only": not rope.rotate_key,
        "calendar bank": rope.bank == "calendar",
    }  # fmt: skip
    return ", ".join(name for name, there in has.items() if there)


def _map(axes: Axes, title: str, scores: Floats) -> object:
    shades = np.ma.masked_where(~np.tri(len(scores), dtype=bool), scores)
    image = axes.imshow(shades, cmap=diverging(), vmin=-1, vmax=1, interpolation="nearest")
    for edge in range(EACH, len(scores), EACH):
        axes.axhline(edge - 0.5, color=INK, lw=1)
        axes.axvline(edge - 0.5, color=INK, lw=1)
    middles = np.arange(len(BLOCKS)) * EACH + (EACH - 1) / 2
    axes.set_xticks(middles, [name for name, _ in BLOCKS], fontsize=9.5, rotation=30)
    axes.set_yticks(middles, [name for name, _ in BLOCKS], fontsize=9.5, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=11)
    return image


def _bar(figure: Figure, image: object, row: object) -> None:
    bar = figure.colorbar(image, ax=row, shrink=0.7, pad=0.01)  # type: ignore[arg-type]
    bar.set_ticks([-1, 0, 1], labels=["opposed", "0", "aligned"])
