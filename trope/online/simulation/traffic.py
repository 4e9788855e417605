"""Who comes when during an experiment: each user at the rate of the log, on the generator's days and hours.

Shapes: N visits in order of time, C categories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trope.data.synthetic.events import draw_days, draw_seconds_of_day
from trope.online.simulation.population import Floats, Ints, Population
from trope.times import DAY, WEEK

TICK = DAY
"""Visits of a tick are answered together: the counts are those of its begin, the histories are up to date."""


@dataclass(frozen=True)
class Traffic:
    """Visits. luck: [N] one number in [0, 1) a visit, so that other arms meet the same visitors with the same luck.

    wanted: [N, C] what each visit is for, see `Chances.categories`
    """

    user: Ints
    time: Ints
    luck: Floats
    wanted: Floats

    @classmethod
    def of(cls, population: Population, days: int, seed: int) -> Traffic:
        """The visits of `days` days after the log's end."""
        if not 1 <= days <= 366:
            raise ValueError(f"--days must be from 1 to 366, got {days}")
        shop = population.shop
        rng = np.random.default_rng(np.random.SeedSequence(shop.seed, spawn_key=(3, seed)))
        weeks = -(-days * DAY // WEEK)
        count = rng.poisson(population.visits * (weeks / shop.weeks))
        user = np.repeat(np.arange(len(population)), count)
        day = draw_days(shop, weeks, len(user), rng)
        time = population.end + day * DAY + draw_seconds_of_day(shop, len(user), rng)
        luck = rng.random(len(user))
        kept = np.flatnonzero(day < days)
        kept = kept[np.lexsort((user[kept], time[kept]))]
        user, time = user[kept], time[kept]
        if not len(user):
            raise ValueError(f"nobody comes in {days} days; give more --users or --days")
        wanted = population.chances.categories(time, population.favourites[user])
        return cls(user, time, luck[kept], wanted)

    def __len__(self) -> int:
        return len(self.user)

    def ticks(self) -> Iterator[slice]:
        """Runs of visits within one tick, in which nobody comes twice."""
        begin, seen = 0, set[int]()
        ticks = (self.time // TICK).tolist()
        for place, user in enumerate(self.user.tolist()):
            if user in seen or ticks[place] != ticks[begin]:
                yield slice(begin, place)
                begin, seen = place, set()
            seen.add(user)
        yield slice(begin, len(self))
