"""Who comes when during an experiment: each user at the rate of the log, on the generator's days and hours.

Shapes: N visits in order of time, C categories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trope.data.synthetic.events import draw_days, draw_seconds_of_day, draw_slots
from trope.online.simulation.population import Floats, Ints, Population
from trope.times import DAY, WEEK

TICK = DAY
"""Visits of a tick are answered together: the counts are those of its begin, the histories are up to date."""


class Purchases(NamedTuple):
    """Who bought what when, in order of time."""

    user: Ints
    item: Ints
    time: Ints


@dataclass(frozen=True)
class Traffic:
    """Visits. luck: [N] one number in [0, 1) a visit, so that other arms meet the same visitors with the same luck.

    wanted: [N, C] what each visit is for, see `Chances.categories`
    elsewhere: what the shop's other users buy meanwhile, without slates, as in its log
    """

    user: Ints
    time: Ints
    luck: Floats
    wanted: Floats
    elsewhere: Purchases

    @classmethod
    def of(cls, population: Population, days: int, seed: int) -> Traffic:
        """The visits of `days` days after the log's end."""
        if not 1 <= days <= 366:
            raise ValueError(f"--days must be from 1 to 366, got {days}")
        shop = population.shop
        rng = np.random.default_rng(np.random.SeedSequence(shop.seed, spawn_key=(3, seed)))
        user, time = _visits(population, days, np.arange(population.count), rng)
        if not len(user):
            raise ValueError(f"nobody comes in {days} days; give more --users or --days")
        luck = rng.random(len(user))
        wanted = population.chances.categories(time, population.favourites[user])
        return cls(user, time, luck, wanted, _elsewhere(population, days, rng))

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


def _visits(population: Population, days: int, users: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Users and times of visits in the days after the log's end, in order of time."""
    shop, weeks = population.shop, -(-days * DAY // WEEK)
    user = np.repeat(users, rng.poisson(population.visits[users] * (weeks / shop.weeks)))
    day = draw_days(shop, weeks, len(user), rng)
    time = population.end + day * DAY + draw_seconds_of_day(shop, len(user), rng)
    kept = np.flatnonzero(day < days)
    kept = kept[np.lexsort((user[kept], time[kept]))]
    return user[kept], time[kept]


def _elsewhere(population: Population, days: int, rng: np.random.Generator) -> Purchases:
    """What users outside the experiment buy: one item a visit, drawn as the log is."""
    shop, chances, staples = population.shop, population.chances, population.staples
    user, time = _visits(population, days, np.arange(population.count, shop.users), rng)
    limits = chances.categories(time, population.favourites[user]).cumsum(1)
    category = (rng.random(len(user))[:, None] >= limits).sum(1)
    # What lies above all limits is the staples' share; who has no staple buys nothing then.
    is_staple = category == limits.shape[1]
    slot = draw_slots(chances.catalogue, np.where(is_staple, 0, category), rng)
    clock = rng.integers(shop.span, size=len(user))
    slot, clock = (np.where(is_staple, of[user], drawn) for of, drawn in ((staples.slot, slot), (staples.clock, clock)))
    bought = np.flatnonzero(slot >= 0)
    return Purchases(user[bought], chances.on_sale(slot[bought], clock[bought], time[bought]), time[bought])
