"""The calendar shop's events, one block of users at a time; no Python loop over users or events.

A block is the unit of randomness: its generator is seeded by (seed, block number) alone, so that blocks can be made in
any order, on any number of threads, and always come out the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trope.data.synthetic.catalogue import Catalogue
from trope.data.synthetic.categories import CATEGORIES, FIRST_CATEGORY, Motive
from trope.data.synthetic.config import CalendarShop
from trope.times import DAY

BLOCK_EVENTS = 1 << 19
"""About how many events a block holds: big enough for numpy, small enough that a few fit in the memory of a laptop."""

FAVOURITES = 6
"""Favourite categories of a user."""
FAVOURITE_SHARE = 0.8
"""Share of a user's taste visits that go to a favourite."""
RUN = 6
"""Purchases of one staple in a row, before the user turns to another."""
REGULARITY = 25.0
"""Shape of the gamma-distributed cycle: its relative spread is 1 / sqrt(25) = 20 %."""
SESSION_EVENTS = 2.5
"""Mean number of events of a visit."""
SESSION_GAP = 120.0
"""Mean seconds between two events of a visit."""
WEEKDAY_ACTIVITY = np.array([0.8, 0.8, 0.9, 1.0, 1.3, 1.4, 0.8])
"""Relative number of visits, Monday to Sunday."""
HOUR_ACTIVITY = np.array([1, 1, 1, 1, 1, 2, 4, 7, 10, 12, 12, 12, 12, 11, 10, 10, 12, 15, 18, 20, 18, 12, 6, 2], float)
"""Relative number of visits, by hour UTC."""


class Events(NamedTuple):
    """Columns of a block, sorted by user and time; times are Unix seconds."""

    user: NDArray[np.int64]
    item: NDArray[np.int32]
    timestamp: NDArray[np.int64]
    basket: NDArray[np.int64]


class Visits(NamedTuple):
    """Columns of a block's visits: owner, category, seconds after the start; slot and clock are -1 where left open."""

    owner: NDArray[np.int64]
    category: NDArray[np.int64]
    time: NDArray[np.int64]
    slot: NDArray[np.int64]
    clock: NDArray[np.int64]


class Block(NamedTuple):
    """A block of users: what they did, why, and what they like. Owners of visits count from the block's first user.

    favourites: [users, FAVOURITES] taste categories, counted from the first of them; [users, 0] where tastes are off
    """

    events: Events
    visits: Visits
    favourites: NDArray[np.int64]


def users_per_block(shop: CalendarShop) -> int:
    """Return how many users share a block; part of the definition of the data, hence no argument."""
    return max(1, round(BLOCK_EVENTS / shop.mean_events))


def block_count(shop: CalendarShop) -> int:
    """Return the number of blocks of a shop."""
    return -(-shop.users // users_per_block(shop))


def generate_block(shop: CalendarShop, catalogue: Catalogue, block: int) -> Events:
    """Return the events of one block of users.

    block: from 0 to block_count(shop) - 1
    """
    return draw_block(shop, catalogue, block).events


def draw_block(shop: CalendarShop, catalogue: Catalogue, block: int) -> Block:
    """Return the events of one block of users, and what they come from."""
    rng = np.random.default_rng(np.random.SeedSequence(shop.seed, spawn_key=(1, block)))
    first = block * users_per_block(shop)
    users = min(users_per_block(shop), shop.users - first)

    counts = _event_counts(shop, users, rng)
    owner = np.repeat(np.arange(users), counts)
    opens = _visit_openings(shop, counts, rng)
    visits, favourites = _draw_visits(shop, catalogue, owner[opens], users, rng)

    visit = np.cumsum(opens) - 1
    time = np.minimum(visits.time[visit] + _seconds_into_visit(opens, visit, rng), shop.span - 1)
    slot = draw_slots(catalogue, visits.category[visit], rng)
    clock = time if shop.lifetimes else _uniform(shop.span, len(time), rng)
    # The first event of a replenishing visit is the staple itself; the others only share its category.
    staple = np.flatnonzero(opens)[visits.slot >= 0]
    slot[staple] = visits.slot[visits.slot >= 0]
    if not shop.lifetimes:
        clock[staple] = visits.clock[visits.slot >= 0]

    order = np.argsort(owner * shop.span + time, kind="stable")
    events = Events(
        user=first + owner[order],
        item=catalogue.on_sale(slot[order], clock[order]).astype(np.int32),
        timestamp=shop.start + time[order],
        basket=(block << 32) + visit[order],
    )
    return Block(events, visits, favourites)


def _event_counts(shop: CalendarShop, users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return each user's number of events: `min_events` and a geometric surplus."""
    surplus = shop.mean_events - shop.min_events
    if surplus == 0:
        return np.full(users, shop.min_events)
    draws = np.log1p(-rng.random(users)) / np.log(surplus / (1 + surplus))
    return shop.min_events + draws.astype(np.int64)


def _visit_openings(shop: CalendarShop, counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which events open a visit; a user's first always does."""
    if not shop.sessions:
        return np.ones(counts.sum(), dtype=bool)
    opens = rng.random(counts.sum()) < 1 / SESSION_EVENTS
    opens[np.cumsum(counts) - counts] = True
    return opens


def _draw_visits(
    shop: CalendarShop, catalogue: Catalogue, owner: NDArray[np.int64], users: int, rng: np.random.Generator
) -> tuple[Visits, NDArray[np.int64]]:
    """Return when each visit takes place and what for, and the users' favourites."""
    shares = [shop.taste_share, shop.staple_share, shop.season_share, shop.weekday_share]
    motive = np.searchsorted(np.cumsum(shares), rng.random(len(owner)), side="right")
    visits = Visits(
        owner,
        category=np.empty(len(owner), np.int64),
        time=draw_days(shop, shop.weeks, len(owner), rng) * DAY,
        slot=np.full(len(owner), -1),
        clock=np.full(len(owner), -1),
    )
    _fill_staples(shop, catalogue, visits, np.flatnonzero(motive == Motive.STAPLE), rng)
    visits.time[:] += draw_seconds_of_day(shop, len(owner), rng)

    taste = np.flatnonzero(motive == Motive.TASTE)
    liked, favourites = _draw_tastes(shop, owner[taste], users, rng)
    visits.category[taste] = FIRST_CATEGORY[Motive.TASTE] + liked
    for rhythm, on in shop.rhythms:
        chosen = np.flatnonzero(motive == rhythm.motive)
        # Off, the category is as likely as before, but drawn without a look at the time.
        rank = (
            rhythm.draw(shop.start + visits.time[chosen], rng)
            if on
            else _uniform(CATEGORIES[rhythm.motive], len(chosen), rng)
        )
        visits.category[chosen] = FIRST_CATEGORY[rhythm.motive] + rank
    return visits, favourites


def draw_days(shop: CalendarShop, weeks: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return days after a Monday: any of so many weeks, the weekday by the shop's activity."""
    if not shop.weekly:
        return _uniform(7 * weeks, count, rng)
    bounds = np.cumsum(WEEKDAY_ACTIVITY / WEEKDAY_ACTIVITY.sum())[:-1]
    return _uniform(weeks, count, rng) * 7 + np.searchsorted(bounds, rng.random(count), side="right")


def draw_seconds_of_day(shop: CalendarShop, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return seconds after midnight UTC: the hour by the shop's activity, uniform within the hour."""
    if not shop.daily:
        return _uniform(DAY, count, rng)
    bounds = np.concatenate([[0.0], np.cumsum(HOUR_ACTIVITY / HOUR_ACTIVITY.sum())])
    second = np.interp(rng.random(count), bounds, np.arange(25) * (DAY / 24)).astype(np.int64)
    return np.minimum(second, DAY - 1)


def _draw_tastes(
    shop: CalendarShop, owner: NDArray[np.int64], users: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return taste categories, mostly one of the user's favourites, else any; and the favourites."""
    count = CATEGORIES[Motive.TASTE]
    category = _uniform(count, len(owner), rng)
    favourites = np.empty((users, 0), np.int64)
    if shop.tastes:
        favourites = _uniform(count, users * FAVOURITES, rng).reshape(users, FAVOURITES)
        liked = rng.random(len(owner)) < FAVOURITE_SHARE
        category = np.where(liked, favourites[owner, _uniform(FAVOURITES, len(owner), rng)], category)
    return category, favourites


def _fill_staples(
    shop: CalendarShop, catalogue: Catalogue, visits: Visits, chosen: NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Set category, slot, clock and (if they replenish) the day of the chosen visits, in runs of one staple each."""
    owner = visits.owner[chosen]
    index = np.arange(len(chosen))
    opens_user = np.diff(owner, prepend=-1) != 0
    nth = index - np.maximum.accumulate(np.where(opens_user, index, 0))
    opens_run = nth % RUN == 0
    run = np.cumsum(opens_run) - 1
    runs = int(opens_run.sum())

    rank = _uniform(CATEGORIES[Motive.STAPLE], runs, rng)
    category = FIRST_CATEGORY[Motive.STAPLE] + rank
    visits.category[chosen] = category[run]
    visits.slot[chosen] = draw_slots(catalogue, category, rng)[run]
    visits.clock[chosen] = _uniform(shop.span, runs, rng)[run]
    if not shop.replenishment:
        return
    gap = rng.standard_gamma(REGULARITY, len(chosen)) * (catalogue.cycle[rank] / REGULARITY)[run]
    gap[opens_run] = 0.0
    since = np.cumsum(gap)
    since -= since[opens_run][run]
    lasts = np.zeros(runs)
    np.maximum.at(lasts, run, since)
    begin = rng.random(runs) * np.maximum(shop.span - lasts, 0.0)
    day = ((begin[run] + since) / DAY).astype(np.int64)
    visits.time[chosen] = np.minimum(day, 7 * shop.weeks - 1) * DAY


def _seconds_into_visit(
    opens: NDArray[np.bool_], visit: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the seconds between a visit's first event and each of its events."""
    gap = np.ceil(-SESSION_GAP * np.log1p(-rng.random(len(opens)))).astype(np.int64)
    gap[opens] = 0
    since = np.cumsum(gap)
    return since - since[opens][visit]


def draw_slots(catalogue: Catalogue, category: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return a slot of each category, by Zipf's law in closed form: P(rank r of M) = log((r + 1) / r) / log(M + 1)."""
    first = catalogue.first_slot[category]
    count = catalogue.first_slot[category + 1] - first
    rank = np.exp(rng.random(len(category)) * np.log1p(count)).astype(np.int64)
    return first + np.minimum(rank, count) - 1


def _uniform(bound: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return integers from 0 to bound - 1."""
    return rng.integers(bound, size=count)
