"""The closed loop: a visitor sees a slate, buys from it or leaves, and the next slate knows what was bought.

The visitor looks at place r with probability 1 / log2(1 + r), and wants each item with the generator's own probability
(taste, season, hour, and a staple that is used up). At most one item is bought a visit.

Shapes: N visits, K places of a slate, U users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trope.online.simulation.answers import Answers
from trope.online.simulation.population import Floats, Ints, Population
from trope.online.simulation.traffic import Traffic
from trope.serve.histories import Histories

PAUSE = 30
"""Seconds between seeing a slate and buying."""


@dataclass(frozen=True)
class Outcome:
    """What happened. slates: [N, K] items, best first, -1 for none. place: [N] that was bought, -1 for none."""

    slates: Ints
    place: Ints

    @property
    def bought(self) -> Ints:
        """[N] the item that was bought, -1 for none."""
        return np.where(self.place >= 0, np.take_along_axis(self.slates, self.place[:, None], axis=1)[:, 0], -1)

    def revenue(self, prices: Floats) -> Floats:
        """[N] what was paid."""
        return np.where(self.place >= 0, prices[self.bought], 0.0)


def simulate(population: Population, traffic: Traffic, answers: Answers, k: int) -> Outcome:
    """Show a slate of `k` items at every visit, and see what is bought."""
    slates, place = np.full((len(traffic), k), -1), np.full(len(traffic), -1)
    past, staple = _Past(population), population.staples.last.copy()
    told = 0
    for tick in traffic.ticks():
        users, times = traffic.user[tick], traffic.time[tick]
        now = int(np.searchsorted(traffic.elsewhere.time, times[0]))
        if now > told:
            answers.observe(*(column[told:now] for column in traffic.elsewhere))
            told = now
        slates[tick] = answers.answer(users, past.of(users), times)
        place[tick] = _choose(population, traffic, tick, slates[tick], staple)
        chosen = np.flatnonzero(place[tick] >= 0)
        if not len(chosen):
            continue
        items = slates[tick][chosen, place[tick][chosen]]
        buyers, moments = users[chosen], times[chosen] + PAUSE
        past.add(buyers, items, moments)
        is_staple = items == _staple_items(population, buyers, moments)
        staple[buyers[is_staple]] = moments[is_staple]
        answers.observe(buyers, items, moments)
    return Outcome(slates, place)


def buying_chances(population: Population, traffic: Traffic, tick: slice, slates: Ints, last: Ints) -> Floats:
    """[N, K]: how likely each place of each slate is bought. last: [U] when each user bought the staple last."""
    users, times = traffic.user[tick], traffic.time[tick]
    wanted = population.chances.items(traffic.wanted[tick], slates, times)
    staples = population.staples
    has = staples.category[users] >= 0
    need = np.zeros(len(users))
    since = (times - last[users]).astype(np.float64)
    need[has] = population.chances.used_up(staples.category[users[has]], since[has])
    is_staple = slates == _staple_items(population, users, times)[:, None]
    wanted += np.where(is_staple, population.shop.staple_share * need[:, None], 0.0)
    return wanted / np.log2(np.arange(slates.shape[1]) + 2)


def _choose(population: Population, traffic: Traffic, tick: slice, slates: Ints, last: Ints) -> Ints:
    """[N] places that are bought, -1 for none."""
    limits = buying_chances(population, traffic, tick, slates, last).cumsum(1)
    is_below = traffic.luck[tick][:, None] < limits
    return np.where(is_below.any(1), is_below.argmax(1), -1)


def _staple_items(population: Population, users: Ints, times: Ints) -> Ints:
    """[N] the item of each user's staple, -2 for a user without one."""
    category, slot, clock, _ = (column[users] for column in population.staples)
    return np.where(category >= 0, population.chances.on_sale(np.maximum(slot, 0), np.maximum(clock, 0), times), -2)


class _Past:
    """Histories that grow."""

    def __init__(self, population: Population) -> None:
        self._log = population
        self._new: dict[int, list[tuple[int, int]]] = {}

    def of(self, users: Ints) -> Histories:
        """The users' histories, one after the other."""
        items, times, lengths = [], [], []
        for user in users.tolist():
            own = slice(self._log.offsets[user], self._log.offsets[user + 1])
            new = np.array(self._new.get(user, ()), np.int64).reshape(-1, 2)
            items += [self._log.items[own], new[:, 0]]
            times += [self._log.times[own], new[:, 1]]
            lengths.append(own.stop - own.start + len(new))
        return Histories(np.concatenate(items), np.concatenate(times), np.concatenate(([0], np.cumsum(lengths))))

    def add(self, users: Ints, items: Ints, times: Ints) -> None:
        """Purchases, each later than what its user bought before."""
        for user, item, time in zip(users.tolist(), items.tolist(), times.tolist(), strict=True):
            self._new.setdefault(user, []).append((item, time))
