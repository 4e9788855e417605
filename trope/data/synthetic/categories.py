"""Why people visit the calendar shop, the categories they then buy from, and the rhythms these follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from trope.times import DAY, MONDAY, WEEK, YEAR


class Motive(IntEnum):
    """The reason for a visit; each owns a range of categories."""

    TASTE = 0
    STAPLE = 1
    SEASON = 2
    WEEKDAY = 3
    HOUR = 4


CATEGORIES = {Motive.TASTE: 40, Motive.STAPLE: 12, Motive.SEASON: 13, Motive.WEEKDAY: 14, Motive.HOUR: 12}
"""Number of categories by reason to buy."""
BREADTH = {Motive.TASTE: 4, Motive.STAPLE: 1, Motive.SEASON: 1, Motive.WEEKDAY: 1, Motive.HOUR: 1}
"""Relative number of items in a category: calendar goods are few and sell well in their days."""
FIRST_CATEGORY = {motive: sum(CATEGORIES[other] for other in Motive if other < motive) for motive in Motive}
CATEGORY_COUNT = sum(CATEGORIES.values())


@dataclass(frozen=True)
class Rhythm:
    """A cycle of the calendar, cut into one arc per category of `motive`, the first one beginning at `origin`.

    At time t the category bought is the arc in which t + N(0, width) falls. All in seconds, UTC.
    """

    motive: Motive
    period: int
    width: float
    origin: int = 0

    def draw(self, times: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return a category, counted from the motive's first, for each Unix time."""
        moved = times - self.origin + self.width * rng.standard_normal(len(times))
        count = CATEGORIES[self.motive]
        # The remainder of a tiny negative number may round up to a whole turn.
        return np.minimum((moved / self.period % 1.0 * count).astype(np.int64), count - 1)

    def share(self, times: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [len(times), categories]: the probability of each category at each Unix time."""
        count = CATEGORIES[self.motive]
        edges = np.arange(count + 1) * (self.period / count)
        # Two turns to either side are enough: every width is far below its period.
        turns = np.arange(-2, 3) * self.period
        distance = edges[:, None] + turns - ((times - self.origin) % self.period)[:, None, None]
        cdf = 0.5 * (1 + np.vectorize(erf, otypes=[float])(distance / (self.width * sqrt(2))))
        return np.diff(cdf, axis=1).sum(axis=-1)


SEASONS = Rhythm(Motive.SEASON, YEAR, 8 * DAY)
WEEKDAYS = Rhythm(Motive.WEEKDAY, WEEK, 0.25 * DAY, MONDAY)
HOURS = Rhythm(Motive.HOUR, DAY, DAY / 24)
