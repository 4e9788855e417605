"""The shop's probabilities that can be asked for are those that it draws from; and its rows are what they were."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from trope.data.synthetic import CalendarShop
from trope.data.synthetic.catalogue import build_catalogue
from trope.data.synthetic.categories import CATEGORIES, CATEGORY_COUNT, FIRST_CATEGORY, Motive
from trope.data.synthetic.chances import Chances
from trope.data.synthetic.events import REGULARITY, draw_block, generate_block
from trope.times import DAY

SHOPS = [
    CalendarShop(users=3_000, years=4, sessions=False),
    CalendarShop.only("yearly", users=3_000, years=4),
    CalendarShop.only(users=3_000, years=4, tastes=False),
]


@pytest.mark.parametrize(
    ("shop", "digest"),
    [
        (CalendarShop(users=500), "241c52cb33ab499e804d73aa3528274cb7519b021922d90ff1c1058f69745900"),
        (CalendarShop.only(users=500, seed=3), "249099741dde4d192692793554d9bf1ff5b2d040679d6a19cbeae5787747453e"),
        (
            CalendarShop(users=300, tastes=False, seed=7, years=3),
            "bd4425ecb2d635cb48e1f66039ad588d7c936e082e6bc182c1fc21b5b424e1e9",
        ),
    ],
)
def test_the_rows_are_what_they_were(shop: CalendarShop, digest: str) -> None:
    """Before the generator could be asked for its probabilities; numpy 2."""
    events = generate_block(shop, build_catalogue(shop), 0)
    assert hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in events)).hexdigest() == digest


@pytest.mark.parametrize("shop", SHOPS)
def test_categories_and_items_come_as_often_as_said(shop: CalendarShop) -> None:
    """The sum of the probabilities over all visits, against what was drawn; staples apart."""
    catalogue = build_catalogue(shop)
    block, chances = draw_block(shop, catalogue, 0), Chances(shop, catalogue)
    visits = block.visits
    times = shop.start + visits.time
    said = chances.categories(times, block.favourites[visits.owner])
    staples = slice(FIRST_CATEGORY[Motive.STAPLE], FIRST_CATEGORY[Motive.STAPLE] + CATEGORIES[Motive.STAPLE])
    assert not said[:, staples].any()
    np.testing.assert_allclose(said.sum(1), 1 - shop.staple_share, rtol=1e-9)
    # Staples have times of their own where they replenish, so their visits are left out on both sides.
    others = visits.slot < 0
    expected = said[others].sum(0) / (1 - shop.staple_share)
    drawn = np.bincount(visits.category[others], minlength=CATEGORY_COUNT)
    wanted = expected > 0
    assert stats.chisquare(drawn[wanted], expected[wanted]).pvalue > 1e-3
    # Every item of some visits, by the moment.
    some = np.flatnonzero(others)[:400]
    every = np.tile(np.arange(shop.items), (len(some), 1))
    np.testing.assert_allclose(chances.items(said[some], every, times[some]).sum(1), 1 - shop.staple_share, rtol=1e-9)
    assert not chances.items(said[some], np.full((len(some), 2), -1), times[some]).any()


def test_items_come_as_often_as_said() -> None:
    for shop in (CalendarShop.only("yearly", users=6_000, years=4, staple_share=0.0), SHOPS[0]):
        shop = replace(shop, staple_share=0.0, season_share=0.5)
        catalogue = build_catalogue(shop)
        block, chances = draw_block(shop, catalogue, 0), Chances(shop, catalogue)
        events = block.events
        said = chances.categories(events.timestamp, block.favourites[events.user])
        popular = np.bincount(events.item, minlength=shop.items).argsort()[-60:]
        asked = np.tile(popular, (len(events.item), 1))
        expected = chances.items(said, asked, events.timestamp).sum(0)
        drawn = np.bincount(events.item, minlength=shop.items)[popular]
        z = (drawn - expected) / np.sqrt(expected)
        assert abs(z).max() < 4.5 and abs(z).mean() < 1.2, z


def test_favourites_make_a_difference() -> None:
    shop = SHOPS[1]
    catalogue = build_catalogue(shop)
    block, chances = draw_block(shop, catalogue, 0), Chances(shop, catalogue)
    visits = block.visits
    times = shop.start + visits.time
    taste = visits.category < CATEGORIES[Motive.TASTE]
    own = chances.categories(times[taste], block.favourites[visits.owner[taste]])
    others = chances.categories(times[taste], np.roll(block.favourites, 1, axis=0)[visits.owner[taste]])
    rows, category = np.arange(taste.sum()), visits.category[taste]
    assert np.log(own[rows, category]).mean() > np.log(others[rows, category]).mean() + 1


def test_a_staple_is_used_up_by_the_gamma_distribution() -> None:
    shop = CalendarShop(users=100)
    catalogue = build_catalogue(shop)
    chances = Chances(shop, catalogue)
    since = np.linspace(0, 200, 50) * DAY
    category = FIRST_CATEGORY[Motive.STAPLE] + np.arange(50) % 12
    said = chances.used_up(category, since)
    cycle = catalogue.cycle[np.arange(50) % 12]
    np.testing.assert_allclose(said, stats.gamma.cdf(since, REGULARITY, scale=cycle / REGULARITY), atol=1e-12)
    assert (Chances(replace(shop, replenishment=False), catalogue).used_up(category, since) == 1).all()


@pytest.mark.parametrize("shop", [CalendarShop(users=2_000, sessions=False), CalendarShop.only(users=2_000)])
def test_a_staple_is_the_item_that_was_drawn(shop: CalendarShop) -> None:
    catalogue = build_catalogue(shop)
    block, chances = draw_block(shop, catalogue, 0), Chances(shop, catalogue)
    visits = block.visits
    staple = visits.slot >= 0
    times = shop.start + visits.time
    items = chances.on_sale(visits.slot[staple], visits.clock[staple], times[staple])
    bought = set(zip(block.events.user.tolist(), block.events.item.tolist(), strict=True))
    found = [pair in bought for pair in zip(visits.owner[staple].tolist(), items.tolist(), strict=True)]
    assert np.mean(found) > 0.999  # a visit in the last second of an item's life may end in the next


def test_after_the_log_the_last_item_stays() -> None:
    shop = CalendarShop(users=100)
    catalogue = build_catalogue(shop)
    chances = Chances(shop, catalogue)
    slots = np.arange(len(catalogue.life))
    later = np.full(len(slots), shop.start + 3 * shop.span)
    np.testing.assert_array_equal(chances.on_sale(slots, slots, later), catalogue.first_item[1:] - 1)
