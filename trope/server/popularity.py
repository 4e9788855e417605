"""What is popular now, from the counts of everybody's events.

A model with a pulse brings the counts of its training, and the events stored since are added to them. For a model
without one, counts at one half-life begin with the dataset. Items that the model does not know are counted apart.

Shapes: M moments, V items (column 0 is padding), N events, K half-lives.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate.evaluation import fitted_pulse
from trope.models.pulse import HALF_LIVES, DecayedCounts, LiveCounts, SeasonCounts
from trope.models.pulse.shares import PRIOR
from trope.models.recommender import SequentialRecommender
from trope.server.schema import ItemId

YARDSTICK = 5
"""Place in `HALF_LIVES` of the half-life, 10.7 days, at which items without a pulse and new items are counted."""
_KEPT_SCORES = 1 << 24
T = TypeVar("T")
Floats = npt.NDArray[np.float64]


class Popularity:
    """Scores of all items by everybody's counts.

    Args:
        model: its pulse is used where it is fitted.
        data: events to begin with, for a model without a pulse.
    """

    def __init__(self, model: SequentialRecommender, data: Sequences | Stream | None) -> None:
        self.num_items, self.pulse = model.num_items, fitted_pulse(model)
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self._most_rows = max(2, _KEPT_SCORES // (model.num_items + 1))
        self.device = model.items.weight.device
        if self.pulse is not None:
            self.live, self._yardstick = self.pulse.kept(), YARDSTICK
        else:
            self.live, self._yardstick = _counts_of(data, model.num_items, self.device), 0

    @property
    def counted_until(self) -> int:
        """Events before this moment are counted already, or never will be."""
        return self.live.counts.moment or 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever counted."""
        return not bool(self.live.counts.counts_KV.any())

    def add(self, items: Sequence[int], times: Sequence[int]) -> None:
        """Count events with dense items."""
        if not items:
            return
        items_N, times_N = (torch.tensor(x, dtype=torch.int64, device=self.device) for x in (items, times))
        self.live.add(items_N, times_N)
        self._rows.clear()

    def at(self, moments: Sequence[int]) -> Tensor:
        """Scores [M, V + 1]: the pulse's part for everybody, or log shares without a pulse."""
        return torch.stack([self._at(moment) for moment in moments])

    def yardstick(self, moment: int) -> Tensor:
        """Log shares at one half-life, [V + 1]; column 0 is that of an item without events."""
        return self.live.log_shares(moment)[self._yardstick]

    def _at(self, moment: int) -> Tensor:
        found = self._rows.get(moment)
        if found is None:
            shares_CV = self.live.log_shares(moment)
            if self.pulse is None:
                found = shares_CV[0]
            else:
                found = self.pulse.of_everybody(shares_CV, torch.tensor(moment, device=self.device))
            self._rows[moment] = found
            if len(self._rows) > self._most_rows:
                self._rows.popitem(last=False)
        return found


def _counts_of(data: Sequences | Stream | None, num_items: int, device: torch.device) -> LiveCounts:
    """Counts at one half-life, of a dataset that has the model's items; no seasons."""
    half_lives = torch.tensor([HALF_LIVES[YARDSTICK]], dtype=torch.float64, device=device)
    counts, since = DecayedCounts(half_lives, num_items), 0
    if data is not None and data.num_items == num_items and data.num_events:
        # A stream is read twice: for its last time, and to count.
        ends = list(_over_blocks(data, lambda _, block: (int(block.times.min()), int(block.times.max()))))
        since = min(first for first, _ in ends)
        counts.decay(max(last for _, last in ends) + 1)
        for _ in _over_blocks(data, lambda _, block: counts.add(block.items.to(device), block.times.to(device))):
            pass
    return LiveCounts(counts, SeasonCounts([], num_items, device), since)


def _over_blocks(data: Sequences | Stream, work: Callable[[int, Sequences], T]) -> Iterator[T]:
    """`Stream.over_blocks`, of which a store in memory is one block."""
    return iter([work(0, data)]) if isinstance(data, Sequences) else data.over_blocks(work)


class NewItems:
    """Decayed counts of items that the model does not know."""

    MOST = 100_000
    HALF_LIFE = HALF_LIVES[YARDSTICK]

    def __init__(self) -> None:
        self._counts: OrderedDict[ItemId, tuple[float, int]] = OrderedDict()  # a count, and when it was that
        self._columns: tuple[list[ItemId], Floats, Floats] | None = None  # the same as arrays, until the next event

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, item: ItemId, time: int) -> None:
        """Count one event."""
        count, since = self._counts.get(item, (0.0, time))
        later, self._columns = max(since, time), None
        added = 2 ** -((later - time) / self.HALF_LIFE)
        self._counts[item] = (count * 2 ** -((later - since) / self.HALF_LIFE) + added, later)
        self._counts.move_to_end(item)
        if len(self._counts) > self.MOST:  # the one that was not chosen for the longest time
            self._counts.popitem(last=False)

    def count(self, item: ItemId, moment: int) -> float:
        """The item's count at a moment; 0 for one without events."""
        count, since = self._counts.get(item, (0.0, moment))
        return count * 2 ** -(max(0, moment - since) / self.HALF_LIFE)

    def best(self, moment: int, k: int) -> list[tuple[ItemId, float]]:
        """The items with the largest counts, best first; equal ones in the order of their last event."""
        if not self._counts:
            return []
        if self._columns is None:
            pairs = np.array(list(self._counts.values()), np.float64)
            self._columns = list(self._counts), pairs[:, 0], pairs[:, 1]
        items, counts, since = self._columns
        now = counts * np.exp2(np.minimum(0, since - moment) / self.HALF_LIFE)
        # A body may have many moments, so all 100,000 items are not sorted for each.
        least = np.partition(now, -k)[-k] if k < len(now) else 0.0
        places = np.flatnonzero(now >= least)
        best = places[np.argsort(-now[places], kind="stable")][:k]
        return [(items[place], float(now[place])) for place in best]


def log_share(count: float, of_none: float) -> float:
    """A new item's log share beside `Popularity.yardstick`; of_none: that of an item without events."""
    return math.log((count + PRIOR) / PRIOR) + of_none
