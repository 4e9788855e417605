"""Figure 7, beyond the paper: what the model expects of items as time goes by, and what really happened.

Shape letters: B users who come in one part of the time span, L positions, M parts, F frequent items.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.evaluate.evaluation import fitted_pulse
from trope.figures.numbers import Floats
from trope.figures.run import RunView, shown_item
from trope.figures.style import GREY, PALE, RESULT, Drawn, finish, page, unavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ints = npt.NDArray[np.int64]
NAME, SUBJECT = "fig7-items", "Items over time"
USERS, PARTS, FREQUENT, PANELS = 64, 60, 200, 6
"""Users asked about in each part of the time span, parts, items that the title is about, items that are drawn."""


class Events(NamedTuple):
    """The training events: item from 0 on, the part of their span that it lies in, its place in the store; and where
    parts begin and end, Unix seconds [M + 1]."""

    items: Ints
    parts: Ints
    places: Ints
    edges: Floats


def training_events(view: RunView) -> Events:
    """All of them, in the order of the store."""
    data = view.data
    places = data.first_events(data.train_end).numpy()
    times = data.times.numpy()[places].astype(np.int64)
    edges = np.linspace(times.min(), times.max() + 1, PARTS + 1)
    parts = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, PARTS - 1)
    return Events(data.items.numpy()[places].astype(np.int64) - 1, parts, places, edges)


def counted(events: Events, items_F: Ints) -> Floats:
    """How many events of each of these items fall into each part, [M, F]."""
    column = np.full(max(events.items.max(), items_F.max()) + 1, -1)
    column[items_F] = np.arange(len(items_F))
    found = column[events.items]
    cell = (events.parts * len(items_F) + found)[found >= 0]
    return np.bincount(cell, minlength=PARTS * len(items_F)).reshape(PARTS, -1).astype(np.float64)


def expected(view: RunView, events: Events, items_F: Ints) -> Floats:
    """The mean probability of these items for users who come in each part, as of their histories then, [M, F].

    By the network alone, without the pulse. NaN where nobody comes who has been there before.
    """
    model, shares = view.model, np.full((PARTS, len(items_F)), np.nan)
    vectors_VE = model.item_vectors()[1:].detach() / model.config.train.temperature
    for part in range(PARTS):
        places = returns(view, events.places[events.parts == part])
        if len(places):
            batch = before(view, places[np.linspace(0, len(places) - 1, min(USERS, len(places))).astype(np.int64)])
            with torch.no_grad():
                shares[part] = (model.encode_last(*batch) @ vectors_VE.T).softmax(dim=1).mean(dim=0)[items_F].numpy()
    return shares


def returns(view: RunView, places: Ints) -> Ints:
    """Those events before which their user has an earlier one: not the first, and of a basket only the first line."""
    times, starts = view.data.times.numpy(), view.data.offsets.numpy()
    is_first = np.isin(places, starts)
    return places[~is_first & (times[places] > times[np.maximum(places - 1, 0)])]


def before(view: RunView, places: Ints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The histories before these events as the model takes them: items, times [B, L], lengths and t_now [B]."""
    data, ends = view.data, torch.from_numpy(places)
    users = torch.searchsorted(data.offsets, ends, right=True) - 1
    counts = ends - data.offsets[users]
    longest = min(view.model.config.model.max_len, int(counts.max()))
    return *data.histories(users, counts, longest), data.times[ends]


def relative(shares_MF: Floats) -> Floats:
    """Each item's share as a multiple of its mean over time; 0 where it never has one."""
    mean = shares_MF.mean(axis=0)
    return np.divide(shares_MF, mean, out=np.zeros_like(shares_MF), where=mean > 0)


def correlations(first_MF: Floats, second_MF: Floats) -> Floats:
    """Over time, for each item; 0 where one of the two does not change."""
    first, second = (x - x.mean(axis=0) for x in (first_MF, second_MF))
    size = np.sqrt(np.square(first).sum(axis=0) * np.square(second).sum(axis=0))
    return np.divide((first * second).sum(axis=0), size, out=np.zeros(first.shape[1]), where=size > 1e-12)


def standouts(counts_MF: Floats) -> list[int]:
    """Columns: for each of some stretches of time the item that gathers there the most above its mean, each once."""
    excess_MF = counts_MF - counts_MF.mean(axis=0)
    found: list[int] = []
    for stretch in np.array_split(excess_MF, PANELS):
        order = np.argsort(-stretch.sum(axis=0), kind="stable")
        found += [int(item) for item in order if item not in found][:1]
    return found


def draw(view: RunView) -> Drawn:
    """A panel an item: its share of the events over time, and what the model expects."""
    events = training_events(view)
    frequencies = np.bincount(events.items, minlength=view.data.num_items)
    frequent = np.argsort(-frequencies, kind="stable")[: min(FREQUENT, np.count_nonzero(frequencies))]
    totals = np.bincount(events.parts, minlength=PARTS).astype(np.float64)
    model = expected(view, events, frequent)
    # A part of the span in which next to nothing happened has no shares worth speaking of.
    busy = (totals >= 0.05 * totals.mean()) & ~np.isnan(model).any(axis=1)
    if busy.sum() < 3:
        return unavailable(NAME, SUBJECT, "Too few users come back at different times.")
    middles = ((events.edges[:-1] + events.edges[1:]) / 2)[busy]
    counts, model = counted(events, frequent)[busy], model[busy]
    shares = counts / totals[busy, None]
    agree = float(np.median(correlations(shares, model)))
    real, line = relative(shares), relative(model)

    # Counts of everybody follow an item's share by construction; what was learned is in the network.
    has_pulse = fitted_pulse(view.model) is not None
    word, who = ("network", "the network alone, without counts,") if has_pulse else ("model", "the model")
    figure = page(6.4)
    panels = figure.subplots(2, 3, sharex=True).flat
    shown = standouts(counts)
    for number, (axes, column) in enumerate(zip(panels, shown, strict=False)):
        name = shown_item(view, int(frequent[column]))
        _panel(axes, middles, real[:, column], line[:, column], name, word if number == 0 else None)
    for axes in list(figure.axes)[len(shown) :]:
        axes.axis("off")
    title = (
        f"Over time, what {who} expects of an item follows its real share with a median correlation of "
        f"{agree:.2f} ({len(frequent)} most frequent items)"
    )
    caption = (
        f"Grey: the item's share of the training events of {view.data.path.name}. Line: its mean probability for up to "
        f"{USERS} users who came at that time, from their histories until then. Both are multiples of their mean over "
        "time. Each item stands for a sixth of the time span: of the most frequent ones, the one that gathers there "
        "the most. These are data that the model was trained on: what was learned, not what is foreseen."
    )
    if has_pulse:
        caption += " The line is the network's part of the score, without the pulse, which is added when serving."
    return finish(NAME, figure, title, caption)


def _panel(axes: Axes, moments: Floats, real: Floats, model: Floats, title: str, word: str | None) -> None:
    """One item; word: what to call the line, in the panel that names the curves."""
    import matplotlib.dates

    at = matplotlib.dates.date2num([datetime.fromtimestamp(int(moment), UTC) for moment in moments])
    axes.set_title(title, fontsize=10)
    axes.fill_between(at, real, color=PALE, lw=0)
    axes.plot(at, model, color=RESULT, lw=2)
    # The words stand above the curves: an item of the first panel has its peak on the left, where they are.
    axes.set_ylim(0, (1.4 if word else 1.05) * max(float(real.max()), float(model.max()), 1.0))
    axes.set_xlim(at[0], at[-1])
    # The longest steps below years, days and hours are half of one: a span of nearly two needs room for five ticks.
    locator = matplotlib.dates.AutoDateLocator(minticks=2, maxticks=5)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(matplotlib.dates.ConciseDateFormatter(locator))
    if word:
        axes.set_ylabel("times its mean")
        for height, name, colour in ((0.99, word, RESULT), (0.87, "events", GREY)):
            axes.text(0.03, height, name, color=colour, transform=axes.transAxes, va="top", fontweight="bold")
