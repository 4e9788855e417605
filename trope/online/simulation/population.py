"""The calendar shop's users at the end of its log: what they bought, what they like, and their staples.

Shapes: U users, T events of all of them, F favourites, V items.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trope.data.synthetic.catalogue import build_catalogue
from trope.data.synthetic.chances import Chances
from trope.data.synthetic.config import CalendarShop
from trope.data.synthetic.events import Block, block_count, draw_block

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PRICE_MEDIAN, _PRICE_SPREAD = 10.0, 0.5


class Staples(NamedTuple):
    """Users' staples: category and slot, -1 for none; clock as in `Visits`; Unix second of the last purchase."""

    category: Ints
    slot: Ints
    clock: Ints
    last: Ints


@dataclass(frozen=True)
class Population:
    """Users of a shop, numbered from 0 as in its log. The first `count` take part in an experiment.

    items, times, offsets: histories with the shop's own item numbers, in order of time, [T], [T], [U + 1]
    visits: [U] visits that each user made during the log
    prices: [V] of each item: log-normal, so that revenue has a longer tail than conversions have
    """

    shop: CalendarShop
    count: int
    chances: Chances
    items: Ints
    times: Ints
    offsets: Ints
    visits: Ints
    favourites: Ints
    staples: Staples
    prices: Floats

    @classmethod
    def of(cls, shop: CalendarShop, users: int | None = None) -> Population:
        """A shop of whose users the first `users` take part, by default all."""
        count = shop.users if users is None else users
        if not 1 <= count <= shop.users:
            raise ValueError(f"--users must be from 1 to the shop's {shop.users:,}, got {count:,}")
        catalogue = build_catalogue(shop)
        blocks = [draw_block(shop, catalogue, number) for number in range(block_count(shop))]
        user, items, times = (
            np.concatenate([block.events[column] for block in blocks]).astype(np.int64) for column in range(3)
        )
        lengths = np.bincount(user, minlength=shop.users)
        visits = np.concatenate([np.bincount(block.visits.owner, minlength=len(block.favourites)) for block in blocks])
        rng = np.random.default_rng(np.random.SeedSequence(shop.seed, spawn_key=(2,)))
        return cls(
            shop, count, Chances(shop, catalogue), items, times, np.concatenate(([0], np.cumsum(lengths))),
            visits, np.concatenate([block.favourites for block in blocks]), _staples(shop, blocks, rng),
            _PRICE_MEDIAN * np.exp(_PRICE_SPREAD * rng.standard_normal(shop.items)),
        )  # fmt: skip

    @property
    def end(self) -> int:
        """Unix second at which the log ends and an experiment may begin: a Monday 00:00 UTC."""
        return self.shop.start + self.shop.span


def read_shop(path: Path) -> CalendarShop:
    """The shop of a ground truth that `trope generate` wrote beside its log."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["config"]
        known = {field.name for field in fields(CalendarShop)}
        return CalendarShop(**{name: value for name, value in told.items() if name in known})
    except IsADirectoryError:
        raise ValueError(f"--shop {path} is a folder; name the ground truth, NAME.truth.json") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"--shop {path} does not exist; `trope generate` writes NAME.truth.json") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--shop {path} is no ground truth of a calendar shop ({type(error).__name__}); `trope generate` writes "
            "one beside its log, NAME.truth.json"
        ) from None


def _staples(shop: CalendarShop, blocks: list[Block], rng: np.random.Generator) -> Staples:
    """Each user's staple: the last one bought, or any one bought where the shop ties staples to no time."""
    parts = []
    for block in blocks:
        visits, users = block.visits, len(block.favourites)
        bought = np.flatnonzero(visits.slot >= 0)
        # Off, a user's visits are exchangeable: the last one in time would be a tie to time.
        key = visits.time[bought] if shop.replenishment else rng.random(len(bought))
        bought = bought[np.lexsort((key, visits.owner[bought]))]
        last = np.full(users, -1)
        last[visits.owner[bought]] = bought  # of equal owners the last one stays
        has = last >= 0
        category, slot, clock, time = (
            np.where(has, x[last], -1) for x in (visits.category, visits.slot, visits.clock, visits.time)
        )
        parts.append(Staples(category, slot, clock, np.where(has, shop.start + time, 0)))
    return Staples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
