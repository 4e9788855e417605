"""In the season-only shop the date is worth more than the past: best possible hit rates, from the ground truth.

The best model that knows the calendar is compared with the best one that knows, of time, only the log-spaced buckets of
the gaps to past events (0.301 wide, as in HSTU's time bias), and with one that knows no time at all. All three know the
user's taste and staples as far as the history shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trope.data.synthetic import CalendarShop, ground_truth
from trope.data.synthetic.catalogue import build_catalogue
from trope.data.synthetic.categories import CATEGORIES, CATEGORY_COUNT, FIRST_CATEGORY, SEASONS, Motive
from trope.data.synthetic.events import generate_block
from trope.times import YEAR

GRID = 365
BUCKET = 0.301


@dataclass
class Oracle:
    """The generative model read backwards: item probabilities for one user, given what is believed of the date."""

    shop: CalendarShop

    def __post_init__(self) -> None:
        shop, catalogue = self.shop, build_catalogue(self.shop)
        items = ground_truth(shop)["items"]
        self.category, slot = np.array(items["category"]), np.array(items["slot"])
        count = np.diff(catalogue.first_slot)[self.category]
        rank = slot - catalogue.first_slot[self.category] + 1
        generation = np.arange(shop.items) - catalogue.first_item[slot]
        bounds = np.stack([generation, generation + 1]) * catalogue.life[slot] - catalogue.shift[slot]
        on_shelf = np.diff(np.clip(bounds, 0, shop.span), axis=0)[0] / shop.span
        self.in_category = np.log((rank + 1) / rank) / np.log(count + 1) * on_shelf
        self.seasons = SEASONS.share((np.arange(GRID) + 0.5) * (YEAR / GRID))

    def of(self, motive: Motive) -> slice:
        return slice(FIRST_CATEGORY[motive], FIRST_CATEGORY[motive] + CATEGORIES[motive])

    def scores(self, history: NDArray[np.int32], dates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of each item next; dates: [GRID] belief about the time of the year."""
        shop, past = self.shop, self.category[history]
        share = np.zeros(CATEGORY_COUNT)
        for motive, total in ((Motive.WEEKDAY, shop.weekday_share), (Motive.HOUR, shop.hour_share)):
            share[self.of(motive)] = total / CATEGORIES[motive]
        share[self.of(Motive.SEASON)] = shop.season_share * (dates @ self.seasons)
        taste = np.bincount(past, minlength=CATEGORY_COUNT)[self.of(Motive.TASTE)] + 0.2
        share[self.of(Motive.TASTE)] = shop.taste_share * taste / taste.sum()
        staples = history[(past >= FIRST_CATEGORY[Motive.STAPLE]) & (past < FIRST_CATEGORY[Motive.SEASON])]
        again = 0.8 if len(staples) else 0.0
        share[self.of(Motive.STAPLE)] = shop.staple_share * (1 - again) / CATEGORIES[Motive.STAPLE]
        scores = share[self.category] * self.in_category
        np.add.at(scores, staples, shop.staple_share * again / max(len(staples), 1))
        return scores

    def date_from_gaps(self, history: NDArray[np.int32], gaps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Belief about the date from past seasonal items and the buckets of the time since."""
        rank = self.category[history] - FIRST_CATEGORY[Motive.SEASON]
        belief = np.zeros(GRID)
        for season, gap in zip(rank, gaps, strict=True):
            if not 0 <= season < CATEGORIES[Motive.SEASON]:
                continue
            bucket = int(np.log(max(gap, 1)) / BUCKET)
            possible = np.linspace(np.exp(BUCKET * bucket), np.exp(BUCKET * (bucket + 1)), 50) * (GRID / YEAR)
            then = (np.arange(GRID)[:, None] - np.round(possible).astype(np.int64)) % GRID
            belief += np.log(self.seasons[then, season].mean(axis=1) + 1e-9)
        belief = np.exp(belief - belief.max())
        return belief / belief.sum()


def users(shop: CalendarShop) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    log = generate_block(shop, build_catalogue(shop), 0)
    starts = np.flatnonzero(np.diff(log.user))
    yield from zip(np.split(log.item, starts + 1), np.split(log.timestamp, starts + 1), strict=True)


def test_the_date_is_worth_more_than_the_past() -> None:
    shop = CalendarShop.only("yearly", users=1_500)
    oracle = Oracle(shop)
    hits = {"date": 0, "gaps": 0, "none": 0}
    for items, times in users(shop):
        history, target, now = items[:-1], items[-1], times[-1]
        beliefs = {
            "date": np.eye(GRID)[int(now % YEAR * GRID // YEAR)],
            "gaps": oracle.date_from_gaps(history, now - times[:-1]),
            "none": np.full(GRID, 1 / GRID),
        }
        for name, belief in beliefs.items():
            scores = oracle.scores(history, belief)
            hits[name] += int((scores > scores[target]).sum() < 10)
    rate = {name: count / shop.users for name, count in hits.items()}
    assert rate["date"] > 0.33, rate
    assert rate["date"] > 1.5 * rate["gaps"], rate
    assert rate["date"] > 2.2 * rate["none"], rate
