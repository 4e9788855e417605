"""The calendar shop: same settings, same bytes; and every effect is there when on and gone when off."""

from __future__ import annotations

import errno
import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.synthetic import CalendarShop, events, ground_truth, write, write_events
from trope.data.synthetic.catalogue import Catalogue, build_catalogue
from trope.data.synthetic.categories import CATEGORIES, FIRST_CATEGORY, HOURS, SEASONS, WEEKDAYS, Motive, Rhythm
from trope.data.synthetic.events import Events
from trope.times import DAY, WEEK, YEAR

DAY_BINS, WEEK_BINS, YEAR_BINS = (DAY, 24), (WEEK, 7), (YEAR, 12)


def generate(shop: CalendarShop) -> Events:
    """All events of a shop in one piece."""
    return Events(*(np.concatenate(column) for column in zip(*write.generate_events(shop), strict=True)))


def categories(shop: CalendarShop, item: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.array(ground_truth(shop)["items"]["category"])[item]


def of(motive: Motive, category: NDArray[np.int64]) -> NDArray[np.bool_]:
    first = FIRST_CATEGORY[motive]
    return (first <= category) & (category < first + CATEGORIES[motive])


def phase(shop: CalendarShop, times: NDArray[np.int64], period: int, bins: int) -> NDArray[np.int64]:
    origin = shop.start if period == WEEK else 0
    return (times - origin) % period * bins // period


def surprise(observed: NDArray, expected: NDArray) -> float:
    """Chi-square in standard deviations above its mean, cells expecting less than 5 left out."""
    cells = expected >= 5
    freedom = cells.sum() - 1
    statistic = ((observed[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def dependence(x: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """Chi-square of independence in standard deviations above its mean."""
    x, y = np.unique(x, return_inverse=True)[1], np.unique(y, return_inverse=True)[1]
    rows, columns = x.max() + 1, y.max() + 1
    table = np.bincount(x * columns + y, minlength=rows * columns).reshape(rows, columns)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    freedom = (rows - 1) * (columns - 1)
    return float((((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BLOCK_EVENTS", 1 << 13)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("small_blocks")
def test_same_settings_same_bytes(tmp_path: Path) -> None:
    shop = CalendarShop(users=5_000)
    assert events.block_count(shop) > 4
    files = [write_events(tmp_path / f"{n}.parquet", shop, workers=n, progress=False) for n in (1, 3)]
    assert sha256(files[0]) == sha256(files[1])
    assert sha256(files[0].with_suffix(".truth.json")) == sha256(files[1].with_suffix(".truth.json"))
    folder = write_events(tmp_path / "parts", shop, rows_per_file=20_000, progress=False)
    assert len(list(folder.glob("part-*.parquet"))) > 2
    assert pq.read_table(folder).equals(pq.read_table(files[0]))
    other = write_events(tmp_path / "other.parquet", CalendarShop(users=5_000, seed=1), progress=False)
    assert sha256(other) != sha256(files[0])


@pytest.mark.usefixtures("small_blocks")
def test_a_block_depends_on_its_number_only() -> None:
    shop = CalendarShop(users=3_000)
    whole = generate(shop)
    catalogue = build_catalogue(shop)
    last = events.generate_block(shop, catalogue, events.block_count(shop) - 1)
    for column, part in zip(whole, last, strict=True):
        np.testing.assert_array_equal(column[-len(part) :], part)


def test_rows_are_well_formed(tmp_path: Path) -> None:
    shop = CalendarShop(users=4_000, mean_events=17.8)
    table = pq.read_table(write_events(tmp_path / "shop.parquet", shop, progress=False))
    assert table.column_names == ["user", "item", "timestamp", "basket"]
    user, item, time, basket = (column.to_numpy() for column in table.columns)
    np.testing.assert_array_equal(np.unique(user), np.arange(shop.users))
    assert item.min() >= 0
    assert item.max() < shop.items
    assert len(np.unique(item)) > 0.9 * shop.items
    assert shop.start <= time.min()
    assert time.max() < shop.start + shop.span
    assert np.all((np.diff(user) > 0) | (np.diff(user) == 0) & (np.diff(time) >= 0))
    counts = np.bincount(user)
    assert counts.min() == shop.min_events
    assert counts.mean() == pytest.approx(shop.mean_events, rel=0.03)
    assert len(np.unique(basket)) == len(np.unique(np.stack([user, basket]), axis=1).T)


def test_more_rows_take_no_more_memory(tmp_path: Path, small_blocks: None) -> None:
    def peak(users: int) -> int:
        # numpy reports its arrays to tracemalloc, so this sees every block.
        tracemalloc.start()
        shop = CalendarShop(users=users, items=200)
        write_events(tmp_path / "shop", shop, overwrite=True, workers=1, progress=False)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(4_000)
    assert peak(64_000) < 4 * peak(4_000)  # 16 times the rows; one or two blocks are alive, as the threads run


def test_a_failure_leaves_nothing(tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write.generate_block

    def fails_at_two(shop: CalendarShop, catalogue: Catalogue, block: int) -> Events:
        if block == 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(shop, catalogue, block)

    monkeypatch.setattr(write, "generate_block", fails_at_two)
    for name in ("shop.parquet", "shop"):
        with pytest.raises(ValueError, match="no space left"):
            write_events(tmp_path / name, CalendarShop(users=5_000), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_replaced_unasked(tmp_path: Path) -> None:
    shop = CalendarShop(users=100)
    for path in (tmp_path / "shop.parquet", tmp_path / "shop"):
        write_events(path, shop, progress=False)
        with pytest.raises(FileExistsError, match="exists"):
            write_events(path, shop, progress=False)
        write_events(path, shop, overwrite=True, progress=False)
    foreign = tmp_path / "precious"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not a generated log"):
        write_events(foreign, shop, overwrite=True, progress=False)
    assert (foreign / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"users": 0}, "users must be at least 1"),
        ({"items": 50}, "items must be at least 91"),
        ({"mean_events": 3.0}, "mean_events"),
        ({"years": 1.0}, "years"),
        ({"start": 1_420_416_001}, "Monday"),
        ({"seed": -1}, "seed"),
        ({"season_share": 0.9}, "shares"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalendarShop(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"users": 1, "mean_events": 1.0, "min_events": 1},
        {"users": 7, "mean_events": 5.0},
        {"users": 50, "staple_share": 0.0, "season_share": 0.0, "weekday_share": 0.0, "hour_share": 0.0},
        {"users": 50, "staple_share": 0.1, "season_share": 0.2, "weekday_share": 0.3, "hour_share": 0.4},
        {"users": 50, "items": 91, "years": 2.0, "staple_share": 0.6, "season_share": 0.1},
    ],
)
def test_extreme_settings(settings: dict[str, float]) -> None:
    shop = CalendarShop(**settings)  # type: ignore[arg-type]
    log = generate(shop)
    assert len(np.unique(log.user)) == shop.users
    assert log.item.max() < shop.items
    assert log.timestamp.max() < shop.start + shop.span


def test_unknown_effect() -> None:
    with pytest.raises(ValueError, match="unknown effects"):
        CalendarShop.only("monthly")


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "shop.parquet"
    result = CliRunner().invoke(app, ["generate", "--out", str(out), "--users", "50", "--no-weekly", "--seed", "3"])
    assert result.exit_code == 0, result.output
    truth = json.loads(out.with_suffix(".truth.json").read_text())
    assert truth["config"]["weekly"] is False
    assert truth["config"]["yearly"] is True
    assert truth["config"]["seed"] == 3
    assert pq.read_table(out).num_rows >= 250


@pytest.mark.parametrize(
    ("effect", "rhythm", "bins"),
    [("yearly", SEASONS, YEAR_BINS), ("weekly", WEEKDAYS, WEEK_BINS), ("daily", HOURS, DAY_BINS)],
)
def test_a_rhythm_follows_its_curve_and_can_be_switched_off(effect: str, rhythm: Rhythm, bins: tuple[int, int]) -> None:
    for effects in ((effect,), ()):
        shop = CalendarShop.only(*effects, users=30_000)
        log = generate(shop)
        category = categories(shop, log.item)
        chosen = of(rhythm.motive, category)
        rank, time = category[chosen] - FIRST_CATEGORY[rhythm.motive], log.timestamp[chosen]
        bin_of = phase(shop, time, *bins)
        tied = dependence(rank, bin_of)
        if not effects:
            assert abs(tied) < 5
            continue
        assert tied > 100
        # The curve gives each event a probability for every category; their sums are the counts to expect in each bin.
        rank, time, bin_of = rank[::8], time[::8], bin_of[::8]
        expected = rhythm.share(time)
        observed = np.zeros((bins[1], CATEGORIES[rhythm.motive]))
        np.add.at(observed, (bin_of, rank), 1)
        sums = np.stack([expected[bin_of == b].sum(axis=0) for b in range(bins[1])])
        assert abs(surprise(observed, sums)) < 5


def test_visits_follow_weekday_and_hour() -> None:
    for effect, bins, activity in (
        ("weekly", WEEK_BINS, events.WEEKDAY_ACTIVITY),
        ("daily", DAY_BINS, events.HOUR_ACTIVITY),
    ):
        expected = activity / activity.sum()
        on, off = CalendarShop.only(effect, users=10_000), CalendarShop.only(users=10_000)
        counts = np.bincount(phase(on, generate(on).timestamp, *bins), minlength=bins[1])
        assert abs(surprise(counts, counts.sum() * expected)) < 5
        counts = np.bincount(phase(off, generate(off).timestamp, *bins), minlength=bins[1])
        assert abs(surprise(counts, np.full(bins[1], counts.sum() / bins[1]))) < 5


def test_staples_come_back_after_their_cycle() -> None:
    spread = {}
    for effects in (("replenishment",), ()):
        shop = CalendarShop.only(*effects, users=10_000, mean_events=30, staple_share=0.3)
        log = generate(shop)
        category = categories(shop, log.item)
        staple = np.flatnonzero(of(Motive.STAPLE, category))
        user, item, time, category = log.user[staple], log.item[staple], log.timestamp[staple], category[staple]
        order = np.lexsort((time, item, user))
        again = (np.diff(user[order]) == 0) & (np.diff(item[order]) == 0)
        cycle = build_catalogue(shop).cycle[category[order][1:][again] - FIRST_CATEGORY[Motive.STAPLE]]
        spread[effects] = np.quantile(np.diff(time[order])[again] / cycle, (0.25, 0.5, 0.75))
    # A gamma distribution with a spread of 20 %, widened by the time of day; runs of the same item meet now and then.
    np.testing.assert_allclose(spread["replenishment",], (0.86, 1.0, 1.15), atol=0.04)
    assert spread[()][1] > 3


def test_no_item_is_sold_outside_its_life() -> None:
    shop = CalendarShop(users=20_000)
    log, lives = generate(shop), ground_truth(shop)["items"]
    birth, death = (np.array([np.nan if at is None else at for at in lives[end]]) for end in ("birth", "death"))
    assert np.isfinite(birth).mean() > 0.3
    assert not np.any(log.timestamp < birth[log.item])
    assert not np.any(log.timestamp >= death[log.item])
    # Lives are used to the full: someone buys close to the first and the last day.
    first = np.full(shop.items, np.inf)
    np.minimum.at(first, log.item, log.timestamp)
    assert np.nanmedian(first - birth) < 120 * DAY


def test_without_lifetimes_items_are_sold_all_the_time() -> None:
    shop = CalendarShop.only(users=20_000)
    log, lives = generate(shop), ground_truth(shop)["items"]
    assert set(lives["birth"]) | set(lives["death"]) == {None}
    year = (log.timestamp - shop.start) * 10 // shop.span
    assert abs(dependence(log.item.astype(np.int64), year)) < 5


def test_sessions_are_minutes_long_and_of_one_category() -> None:
    shop = CalendarShop.only("sessions", users=10_000)
    log = generate(shop)
    order = np.lexsort((log.timestamp, log.basket))
    same = np.diff(log.basket[order]) == 0
    assert np.all(np.diff(categories(shop, log.item)[order])[same] == 0)
    assert np.diff(log.timestamp[order])[same].mean() == pytest.approx(events.SESSION_GAP, rel=0.05)
    # A user's last visit is cut short, hence a little below the mean.
    assert 2.0 < len(log.user) / len(np.unique(log.basket)) < events.SESSION_EVENTS
    alone = generate(CalendarShop.only(users=1_000))
    assert len(np.unique(alone.basket)) == len(alone.basket)


def test_tastes_are_personal() -> None:
    share = {}
    for tastes in (True, False):
        shop = CalendarShop.only(users=2_000, mean_events=60, tastes=tastes)
        log = generate(shop)
        category = categories(shop, log.item)
        chosen = of(Motive.TASTE, category)
        table = np.zeros((shop.users, CATEGORIES[Motive.TASTE]))
        np.add.at(table, (log.user[chosen], category[chosen]), 1)
        top = np.sort(table, axis=1)[:, -events.FAVOURITES :].sum() / table.sum()
        share[tastes] = top
    assert share[True] > 0.8
    assert share[False] < 0.7


def test_with_all_temporal_effects_off_time_tells_nothing() -> None:
    shop = CalendarShop.only(users=30_000)
    log = generate(shop)
    category = categories(shop, log.item)
    for bins in (DAY_BINS, WEEK_BINS, YEAR_BINS):
        assert abs(dependence(category, phase(shop, log.timestamp, *bins))) < 5
    # Nor do gaps: whether the next event is of the same category does not depend on how soon it comes.
    same_user = np.diff(log.user) == 0
    repeat = (np.diff(category) == 0)[same_user]
    gap = np.diff(log.timestamp)[same_user]
    # A user with many events has short gaps and, by chance of nothing else, the same tastes: compare within a length.
    length = np.bincount(log.user)[log.user[1:][same_user]]
    for events_of_user in range(6, 14):
        of_length = length == events_of_user
        quarter = np.argsort(np.argsort(gap[of_length])) * 4 // of_length.sum()
        assert abs(dependence(repeat[of_length].astype(np.int64), quarter)) < 5


def test_switching_the_season_off_keeps_what_is_sold() -> None:
    counts = []
    for seed, effects in enumerate((("yearly",), ())):
        shop = CalendarShop.only(*effects, users=20_000, seed=seed)
        counts.append(np.bincount(categories(shop, generate(shop).item)))
    assert abs(dependence(*_as_labels(counts))) < 5


def _as_labels(counts: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    which = np.repeat(np.arange(len(counts)), [count.sum() for count in counts])
    return which, np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts])
