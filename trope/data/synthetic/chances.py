"""The calendar shop's own probabilities, for those who ask instead of drawing: what a visitor wants at a moment.

A visit's reason and category follow from user and time, an item from its category: P(item) = P(category) * P(item |
category). A staple is different: it is one item of the user's, wanted again when the last one is used up.

Shapes: N visits, F favourites, C categories, K items of a list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trope.data.synthetic.catalogue import Catalogue
from trope.data.synthetic.categories import CATEGORIES, CATEGORY_COUNT, FIRST_CATEGORY, Motive
from trope.data.synthetic.config import CalendarShop
from trope.data.synthetic.events import FAVOURITE_SHARE, REGULARITY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Chances:
    """Probabilities of one shop. Times are Unix seconds; after the log's end the last item of a slot stays on sale."""

    def __init__(self, shop: CalendarShop, catalogue: Catalogue) -> None:
        self.shop, self.catalogue = shop, catalogue
        self.slot = catalogue.slot_of_item
        self.category = catalogue.category_of_slot[self.slot]
        first, end = catalogue.first_slot[self.category], catalogue.first_slot[self.category + 1]
        rank = self.slot - first + 1
        # Zipf's law in closed form, as `draw_slots` draws.
        self._of_slot = np.log((rank + 1) / rank) / np.log1p(end - first)
        generation = np.arange(len(self.slot)) - catalogue.first_item[self.slot]
        birth = generation * catalogue.life[self.slot] - catalogue.shift[self.slot]
        death = birth + catalogue.life[self.slot]
        self._lives = (np.minimum(death, shop.span) - np.maximum(birth, 0)) / shop.span

    def categories(self, times: Ints, favourites: Ints) -> Floats:
        """Return [N, C]: how likely a visit is for each category. Staples' columns are 0.

        favourites: [N, F] as in `Block`
        """
        found = np.zeros((len(times), CATEGORY_COUNT))
        count, share = CATEGORIES[Motive.TASTE], self.shop.taste_share
        taste = found[:, FIRST_CATEGORY[Motive.TASTE] : FIRST_CATEGORY[Motive.TASTE] + count]
        liked = FAVOURITE_SHARE if favourites.shape[1] else 0.0
        taste += share * (1 - liked) / count
        rows = np.arange(len(times))
        for favourite in favourites.T:
            np.add.at(taste, (rows, favourite), share * liked / favourites.shape[1])
        shares = {Motive.SEASON: self.shop.season_share, Motive.WEEKDAY: self.shop.weekday_share}
        for rhythm, on in self.shop.rhythms:
            first, count = FIRST_CATEGORY[rhythm.motive], CATEGORIES[rhythm.motive]
            share = shares.get(rhythm.motive, self.shop.hour_share)
            found[:, first : first + count] = share * (rhythm.share(times) if on else 1 / count)
        return found

    def items(self, categories: Floats, items: Ints, times: Ints) -> Floats:
        """Return [N, K]: how likely a visit is for each of some items. items: [N, K], -1 for none."""
        known = np.maximum(items, 0)
        wanted = np.take_along_axis(categories, self.category[known], axis=1) * self._of_slot[known]
        return np.where(items >= 0, wanted * self._part(known, times), 0.0)

    def on_sale(self, slot: Ints, clock: Ints, times: Ints) -> Ints:
        """Return the item on each slot at each time, or by `clock` where items do not live and die, as in `Visits`."""
        return self._now(slot, times) if self.shop.lifetimes else self.catalogue.on_sale(slot, clock)

    def used_up(self, category: Ints, since: Floats) -> Floats:
        """Return how likely a staple is used up `since` seconds after it was bought; 1 without replenishment.

        category: counted from the first of all categories
        """
        if not self.shop.replenishment:
            return np.ones(len(since))
        cycle = self.catalogue.cycle[category - FIRST_CATEGORY[Motive.STAPLE]]
        x = np.maximum(since, 0.0) / cycle * REGULARITY
        # The gamma distribution of a whole shape: 1 - P(fewer than `REGULARITY` events of a Poisson process by x).
        term = np.exp(-x)
        fewer = term.copy()
        for number in range(1, int(REGULARITY)):
            term = term * x / number
            fewer += term
        return 1.0 - fewer

    def _part(self, items: Ints, times: Ints) -> Floats:
        """Return [N, K]: an item's part of its slot: 1 or 0 where items live and die, else its part of the log."""
        if not self.shop.lifetimes:
            return self._lives[items]
        return (self._now(self.slot[items], times[:, None]) == items).astype(np.float64)

    def _now(self, slot: Ints, times: Ints) -> Ints:
        found = self.catalogue.on_sale(slot, times - self.shop.start)
        return np.minimum(found, self.catalogue.first_item[slot + 1] - 1)
