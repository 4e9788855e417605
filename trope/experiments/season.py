"""Seasons for the demo: finds seasonal product types, and counts how often models recommend them over the year.

Shapes: V items, F fortnights of the year.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from trope.data.sequences import Sequences
from trope.models.pulse import LiveCounts
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY

FORTNIGHT = 14 * DAY
FORTNIGHTS = 26
QUARTERS = ("January to March", "April to June", "July to September", "October to December")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Season:
    """The most seasonal product types that peak in one quarter of the year.

    items: dense ids, most seasonal first. names: theirs. bought: [F] their share of all purchases in each fortnight.
    """

    quarter: str
    items: list[int]
    names: list[str]
    bought: Floats


def fortnights(start: int) -> Ints:
    """The middle of each fortnight of the year that begins at `start`, [F]."""
    return start + FORTNIGHT // 2 + FORTNIGHT * np.arange(FORTNIGHTS)


def find_seasons(data: Sequences, start: int, each: int, min_events: int) -> list[Season]:
    """The most seasonal product types of each quarter.

    A type is seasonal if its training events are spread differently over the fortnights than all events; the measure is
    the relative entropy. A single year cannot tell a season from a product that came or went.

    each: types per quarter; a quarter may have fewer. min_events: fewest events of a type; with fewer, a season may be
    chance.
    """
    counts_VF = _count(data, start)
    totals_V, share_F = counts_VF.sum(1), counts_VF.sum(0) / counts_VF.sum()
    profile_VF = counts_VF / np.maximum(totals_V, 1)[:, None]
    lift_VF = profile_VF / share_F
    entropy_V = (profile_VF * np.log(np.maximum(lift_VF, 1e-12))).sum(1)
    quarter_V = lift_VF.argmax(1) * len(QUARTERS) // FORTNIGHTS
    names = data.ids("item_names") or data.ids("item_ids")
    assert names is not None, "every dataset has item_ids"
    found = []
    for number, quarter in enumerate(QUARTERS):
        ours = np.flatnonzero((quarter_V == number) & (totals_V >= max(min_events, 1)))
        chosen = ours[np.argsort(-entropy_V[ours], kind="stable")][:each]
        bought = counts_VF[chosen].sum(0) / counts_VF.sum(0)
        found.append(Season(quarter, chosen.tolist(), [str(names[item - 1]) for item in chosen.tolist()], bought))
    return found


def histories_until(data: Sequences, users: Ints, moment: int) -> Histories:
    """The events of some users before a moment."""
    chosen = torch.from_numpy(users)
    return Histories.of(data, chosen, data.count_before(chosen, moment))


def events_until(data: Sequences, moment: int) -> Ints:
    """How many events each user has before a moment."""
    return data.count_before(torch.arange(data.num_users), moment).numpy()


def as_of(recommender: Recommender, data: Sequences, moments: Ints) -> Iterator[int]:
    """Each of some rising moments, with the recommender's counts as a server would have had them then."""
    pulse, kept = recommender.model.pulse, recommender.live
    stream = None if pulse is None or kept is None else pulse.count(data.items, data.times)
    try:
        for moment in moments.tolist():
            if stream is not None and kept is not None:
                next(iter(stream.at(torch.tensor([moment]))))
                assert stream.seasons is not None
                recommender.live = LiveCounts(stream.counts, stream.seasons, kept.since)
            yield moment
    finally:
        recommender.live = kept


def recommended(
    recommender: Recommender, data: Sequences, histories: Histories, moments: Ints, k: int, label: str
) -> Floats:
    """The share of each item among the `k` recommendations of all histories, at each of F rising moments, [V+1, F].

    data: whose events are counted up to each moment. label: for the progress bar.
    """
    shares = []
    asked = tqdm(as_of(recommender, data, moments), f"ask {label} over the year", len(moments), False, unit="moment")
    for moment in asked:
        ranking = recommender.rank(histories, np.full(len(histories.offsets) - 1, moment), k)
        shares.append(np.bincount(ranking.items, minlength=len(recommender.catalogue) + 1) / len(ranking.items))
    return np.stack(shares, axis=1)


def _count(data: Sequences, start: int) -> Floats:
    """Training events of each item in each fortnight, [V+1, F]; the year's last days count to the last fortnight."""
    events = data.first_events(data.train_end)
    bins = ((data.times[events] - start) // FORTNIGHT).clamp(0, FORTNIGHTS - 1)
    cells = data.items[events].long() * FORTNIGHTS + bins
    counts = torch.bincount(cells, minlength=(data.num_items + 1) * FORTNIGHTS)
    return counts.reshape(-1, FORTNIGHTS).double().numpy()
