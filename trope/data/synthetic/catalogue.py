"""What the calendar shop sells: categories by reason to buy, shelf slots in a category, items that succeed each other.

An item's life is a turn on a shelf slot: when it dies its successor takes the slot over. A slot is therefore never
empty, and the item on sale at any moment is one integer division away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trope.data.synthetic.categories import BREADTH, CATEGORIES, CATEGORY_COUNT, Motive
from trope.data.synthetic.config import CalendarShop
from trope.times import DAY

GENERATIONS = np.array([1, 2, 3, 5])
"""How many items follow each other on a slot, ..."""
GENERATION_SHARES = np.array([0.5, 0.25, 0.15, 0.1])
"""... and how common that is."""
CYCLE_DAYS = (7.0, 90.0)
"""Shortest and longest replenishment cycle; the categories' cycles are geometric in between."""


@dataclass(frozen=True)
class Catalogue:
    """Lookup tables from category to slots, and from slot and moment to the item on sale.

    first_slot: [categories + 1], first_item: [slots + 1]; ranges are contiguous
    life, shift: [slots] seconds; item g of a slot lives from g * life - shift to (g + 1) * life - shift
    cycle: [staple categories] mean seconds between two purchases
    """

    first_slot: NDArray[np.int64]
    first_item: NDArray[np.int64]
    life: NDArray[np.int64]
    shift: NDArray[np.int64]
    cycle: NDArray[np.float64]

    def on_sale(self, slot: NDArray[np.int64], clock: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the item on each slot `clock` seconds after the start."""
        return self.first_item[slot] + (clock + self.shift[slot]) // self.life[slot]

    @property
    def slot_of_item(self) -> NDArray[np.int64]:
        """Return the slot of each item."""
        slots = np.diff(self.first_item)
        return np.repeat(np.arange(len(slots)), slots)

    @property
    def category_of_slot(self) -> NDArray[np.int64]:
        """Return the category of each slot."""
        return np.repeat(np.arange(CATEGORY_COUNT), np.diff(self.first_slot))


def build_catalogue(shop: CalendarShop) -> Catalogue:
    """Return the tables of a shop; the same for all its users, drawn from its seed."""
    rng = np.random.default_rng(np.random.SeedSequence(shop.seed, spawn_key=(0,)))
    generations = [_generations(count, rng) for count in _items_per_category(shop.items)]
    per_slot = np.concatenate(generations)
    # A slot of G items is replaced G - 1 times, at even distances, from a random moment on.
    life = -(-shop.span // np.maximum(per_slot - 1, 1))
    shift = np.where(per_slot == 1, 0, (rng.random(len(per_slot)) * life).astype(np.int64))
    return Catalogue(
        first_slot=_starts(np.array([len(slots) for slots in generations])),
        first_item=_starts(per_slot),
        life=life,
        shift=shift,
        cycle=np.geomspace(*CYCLE_DAYS, CATEGORIES[Motive.STAPLE]) * DAY,
    )


def ground_truth(shop: CalendarShop) -> dict[str, Any]:
    """Return what a perfect model could know, ready for JSON: categories with their curves, items with their lives."""
    catalogue = build_catalogue(shop)
    slot = catalogue.slot_of_item
    generation = np.arange(shop.items) - catalogue.first_item[slot]
    birth = generation * catalogue.life[slot] - catalogue.shift[slot]
    death = birth + catalogue.life[slot]
    category = catalogue.category_of_slot[slot]
    always = np.full(shop.items, not shop.lifetimes)
    return {
        "categories": [
            _describe(shop, catalogue, motive, rank) for motive in Motive for rank in range(CATEGORIES[motive])
        ],
        "items": {
            "category": category.tolist(),
            "slot": slot.tolist(),
            "birth": _moments(shop, birth, always | (birth <= 0)),
            "death": _moments(shop, death, always | (death >= shop.span)),
        },
    }


def _describe(shop: CalendarShop, catalogue: Catalogue, motive: Motive, rank: int) -> dict[str, Any]:
    """Return one category's entry in the ground truth."""
    entry: dict[str, Any] = {"motive": motive.name.lower()}
    if motive is Motive.STAPLE and shop.replenishment:
        entry["cycle_seconds"] = float(catalogue.cycle[rank])
    for rhythm, on in shop.rhythms:
        if motive is rhythm.motive and on:
            arc = rhythm.period / CATEGORIES[motive]
            entry |= {"period_seconds": rhythm.period, "peak_seconds": rhythm.origin + (rank + 0.5) * arc}
            entry |= {"arc_seconds": arc, "width_seconds": float(rhythm.width)}
    return entry


def _moments(shop: CalendarShop, clock: NDArray[np.int64], open_end: NDArray[np.bool_]) -> list[int | None]:
    """Return Unix seconds, None where an item's life is not cut inside the log."""
    return [None if is_open else shop.start + at for at, is_open in zip(clock.tolist(), open_end.tolist(), strict=True)]


def _generations(items: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return how many items each slot of a category gets, summing to `items`."""
    drawn = GENERATIONS[np.searchsorted(np.cumsum(GENERATION_SHARES)[:-1], rng.random(items), side="right")]
    ends = np.cumsum(drawn)
    slots = int(np.searchsorted(ends, items)) + 1
    drawn = drawn[:slots].copy()
    drawn[-1] -= ends[slots - 1] - items
    return drawn


def _items_per_category(items: int) -> list[int]:
    """Return the size of each category: one item each, the others by breadth."""
    breadth = np.repeat([BREADTH[motive] for motive in Motive], [CATEGORIES[motive] for motive in Motive])
    ends = np.floor(np.cumsum(breadth) / breadth.sum() * (items - CATEGORY_COUNT) + 0.5).astype(np.int64)
    return (np.diff(ends, prepend=0) + 1).tolist()


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each range of the given lengths laid end to end, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)])
