"""The rehearsal: visitors choose by the generator's own probabilities, histories grow, and the truth is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_logs import prepared
from serving import END, HISTORY, make_run
from starlette.testclient import TestClient
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.sources.resolve import Request
from trope.data.synthetic import CalendarShop, write_events
from trope.online.analysis.analyse import analyse
from trope.online.assignment import ArmOption
from trope.online.exposures import read_experiment, schema, write_experiment
from trope.online.simulation.answers import ByArm, InProcess, open_arms
from trope.online.simulation.loop import PAUSE, Outcome, buying_chances, simulate
from trope.online.simulation.over_http import OverHttp
from trope.online.simulation.population import Ints, Population, read_shop
from trope.online.simulation.record import EXPOSURES, OUTCOMES, move_answers, places_of
from trope.online.simulation.rehearsal import make_experiment, rehearse
from trope.online.simulation.traffic import Traffic
from trope.online.simulation.truth import METRICS, true_effects
from trope.serve.histories import Histories
from trope.serve.recommender import Recommender
from trope.server.app import Options, make_app
from trope.server.logs import Log
from trope.server.open_store import open_store
from trope.server.served import Served
from trope.server.start_trial import open_trial
from trope.times import DAY, MONDAY, WEEK, YEAR

SHOP = CalendarShop(users=400, items=200, mean_events=60, years=2, sessions=False)
K = 10


@pytest.fixture(scope="module")
def population() -> Population:
    return Population.of(SHOP, 300)


@pytest.fixture(scope="module")
def traffic(population: Population) -> Traffic:
    return Traffic.of(population, 60, seed=1)


class Listed:
    """The same slate for everybody; remembers what it was asked and told."""

    def __init__(self, items: list[int]) -> None:
        self.items, self.asked, self.told = items, list[tuple[Ints, Histories, Ints]](), list[tuple[Ints, ...]]()

    def answer(self, users: Ints, histories: Histories, moments: Ints) -> Ints:
        self.asked.append((users, histories, moments))
        return np.tile(self.items, (len(users), 1))

    def observe(self, users: Ints, items: Ints, times: Ints) -> None:
        self.told.append((users, items, times))


def popular(population: Population) -> list[int]:
    return np.bincount(population.items, minlength=SHOP.items).argsort()[::-1][:K].tolist()


def test_the_population_is_the_log(population: Population) -> None:
    from trope.data.synthetic.write import generate_events

    events = next(generate_events(SHOP))
    np.testing.assert_array_equal(population.items, events.item)
    np.testing.assert_array_equal(population.times, events.timestamp)
    np.testing.assert_array_equal(population.offsets, np.searchsorted(events.user, np.arange(SHOP.users + 1)))
    assert population.visits.sum() == len(events.item), "without sessions every event is a visit"
    assert population.end == SHOP.start + SHOP.span > population.times.max()


def test_a_staple_is_one_that_the_user_bought(population: Population) -> None:
    has = np.flatnonzero(population.staples.category >= 0)
    assert len(has) > 300
    items = population.chances.on_sale(
        population.staples.slot[has], population.staples.clock[has], population.staples.last[has]
    )
    for user, item, last in zip(has.tolist(), items.tolist(), population.staples.last[has].tolist(), strict=True):
        own = slice(population.offsets[user], population.offsets[user + 1])
        assert (item, last) in zip(population.items[own].tolist(), population.times[own].tolist(), strict=True)


def test_users_come_at_their_own_times(population: Population, traffic: Traffic) -> None:
    assert (np.diff(traffic.time) >= 0).all()
    assert population.end <= traffic.time.min() and traffic.time.max() < population.end + 60 * DAY
    expected = population.visits[:300] * (60 * DAY / SHOP.span)
    total = expected.sum()
    assert abs(len(traffic) - total) < 4 * math.sqrt(total)
    counts = np.bincount(traffic.user, minlength=300)
    assert np.corrcoef(counts, expected)[0, 1] > 0.5
    weekend = np.isin((traffic.time // DAY + 3) % 7, (4, 5)).mean()  # Friday and Saturday
    assert weekend == pytest.approx(2.7 / 7, abs=0.06)
    others = traffic.elsewhere
    assert set(others.user.tolist()) <= set(range(300, 400)) and len(others.user) > 100
    again = Traffic.of(population, 60, seed=1)
    np.testing.assert_array_equal(again.time, traffic.time)
    np.testing.assert_array_equal(again.luck, traffic.luck)
    assert len(Traffic.of(population, 60, seed=2)) != len(traffic)


def test_others_buy_as_in_the_log() -> None:
    """The categories that users outside the experiment buy, against what the chances say of their visits."""
    shop = CalendarShop.only(users=3_000, items=200, mean_events=40, years=2)
    population = Population.of(shop, 1)
    others = Traffic.of(population, 60, seed=0).elsewhere
    share = np.bincount(population.chances.category[others.item], minlength=91) / len(others.item)
    log = np.bincount(population.chances.category[population.items], minlength=91) / len(population.items)
    error = np.sqrt(log * (1 - log) / len(others.item))
    assert np.abs((share - log) / error).max() < 5


def test_ticks_hold_everybody_once(traffic: Traffic) -> None:
    ticks = list(traffic.ticks())
    assert [tick.start for tick in ticks[1:]] == [tick.stop for tick in ticks[:-1]]
    assert ticks[0].start == 0 and ticks[-1].stop == len(traffic)
    for tick in ticks:
        assert len(set(traffic.user[tick].tolist())) == tick.stop - tick.start
        assert len(set((traffic.time[tick] // DAY).tolist())) == 1


def test_visitors_choose_by_the_generators_probabilities(population: Population) -> None:
    """Sold places against the sum of their chances, over several seeds; the chances fall with the place."""
    items, sold, expected = popular(population), np.zeros(K), np.zeros(K)
    for seed in range(4):
        traffic = Traffic.of(population, 60, seed)
        outcome = simulate(population, traffic, Listed(items), K)
        sold += np.bincount(outcome.place[outcome.place >= 0], minlength=K)
        # Staples' need changes with what is bought, so the chances are exact only for a slate without staples.
        expected += buying_chances(population, traffic, slice(None), outcome.slates, population.staples.last).sum(0)
    assert sold.sum() > 50
    assert (np.abs(sold - expected) < 4 * np.sqrt(expected) + 1).all(), (sold, expected)
    traffic = Traffic.of(population, 60, 0)
    same = np.tile([items[0]] * K, (len(traffic), 1))
    chances = buying_chances(population, traffic, slice(None), same, population.staples.last)
    np.testing.assert_allclose(chances, chances[:, :1] / np.log2(np.arange(K) + 2))
    assert not buying_chances(population, traffic, slice(None), np.full_like(same, -1), population.staples.last).any()


def test_a_slate_in_season_sells_better(population: Population, traffic: Traffic) -> None:
    """The truth of the rehearsal depends on the moment."""
    chances = population.chances
    everybody = traffic.wanted.mean(0)
    best = np.argsort(-everybody[chances.category])[:K].tolist()
    worst = np.argsort(everybody[chances.category])[:K].tolist()
    sold = [(simulate(population, traffic, Listed(x), K).place >= 0).sum() for x in (best, worst)]
    assert sold[0] > 3 * sold[1]


def test_histories_grow_by_what_was_bought(population: Population, traffic: Traffic) -> None:
    listed = Listed(popular(population))
    outcome = simulate(population, traffic, listed, K)
    bought = np.flatnonzero(outcome.place >= 0)
    own: dict[int, list[tuple[int, int]]] = {}
    for visit in bought:
        own.setdefault(int(traffic.user[visit]), []).append(
            (int(outcome.bought[visit]), int(traffic.time[visit]) + PAUSE)
        )
    seen = 0
    for users, histories, moments in listed.asked:
        for row, (user, moment) in enumerate(zip(users.tolist(), moments.tolist(), strict=True)):
            part = slice(histories.offsets[row], histories.offsets[row + 1])
            log = slice(population.offsets[user], population.offsets[user + 1])
            new = [pair for pair in own.get(user, []) if pair[1] < moment]
            length = log.stop - log.start
            np.testing.assert_array_equal(histories.items[part][:length], population.items[log])
            assert list(zip(histories.items[part][length:], histories.times[part][length:], strict=True)) == new
            seen += len(new)
    assert seen > 0
    told = [np.concatenate(column) for column in zip(*listed.told, strict=True)]
    mine = told[0] < 300
    assert sorted(zip(*(x[mine].tolist() for x in told), strict=True)) == sorted(
        (int(traffic.user[n]), int(outcome.bought[n]), int(traffic.time[n]) + PAUSE) for n in bought
    )
    assert (~mine).sum() > 0.9 * len(traffic.elsewhere.user), "what others buy is told too"


def test_a_staple_is_not_needed_again_at_once() -> None:
    shop = CalendarShop(users=50, items=200, mean_events=60, years=2, sessions=False)
    population = Population.of(shop)
    traffic = Traffic.of(population, 60, 0)
    staples = population.staples
    users = traffic.user
    items = population.chances.on_sale(np.maximum(staples.slot, 0)[users], staples.clock[users], traffic.time)
    slates = np.where(staples.category[users] >= 0, items, -1)[:, None]
    just, long_ago = (
        buying_chances(population, traffic, slice(None), slates, np.full(50, at)).sum()
        for at in (traffic.time.max(), population.end - 400 * DAY)
    )
    assert just < 0.1 * long_ago
    has = staples.category[users] >= 0
    assert long_ago == pytest.approx(shop.staple_share * has.sum(), rel=0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that learned nothing, of a small shop's log."""
    folder = tmp_path_factory.mktemp("rehearsal")
    # `make_run` counts until END, so the log ends in the week before.
    weeks = round(2 * YEAR / WEEK)
    start = MONDAY + ((END - MONDAY) // WEEK + 1 - weeks) * WEEK
    shop = CalendarShop.only("yearly", users=80, items=120, mean_events=100, years=2, start=start)
    write_events(folder / "shop.parquet", shop, progress=False)
    data = prepared(folder / "shop.parquet", folder / "data")
    runs = {name: make_run(data, folder / name, name, seed) for seed, name in enumerate(("hstu-trope", "trope"))}
    return {"shop": folder / "shop.truth.json", **runs}


@pytest.fixture(scope="module")
def small(run: dict[str, Path]) -> Population:
    return Population.of(read_shop(run["shop"]), 60)


def arms_of(run: dict[str, Path], items: int, daily: bool = True) -> dict[str, InProcess]:
    found = {}
    for arm, name in (("control", "hstu-trope"), ("treatment", "trope")):
        found[arm] = InProcess(Recommender.from_pretrained(run[name], "cpu"), items, K, daily)
    return found


def test_the_same_model_has_no_effect(run: dict[str, Path], small: Population) -> None:
    arm = arms_of(run, small.shop.items)["treatment"]
    for effect in true_effects(small, 14, arm, arm, 2).values():
        assert (effect.lift, effect.error) == (0.0, 0.0) and effect.control == effect.treatment > 0
    with pytest.raises(ValueError, match="at least 2 repetitions"):
        true_effects(small, 14, arm, arm, 1)


def test_a_true_effect_is_the_ratio_of_means(run: dict[str, Path], small: Population) -> None:
    arms = arms_of(run, small.shop.items)
    effects = true_effects(small, 14, arms["control"], arms["treatment"], 3)
    assert list(effects) == list(METRICS)
    for effect in effects.values():
        assert effect.lift == pytest.approx(effect.treatment / effect.control - 1)
        assert effect.error > 0


def test_a_rehearsal_is_the_contracts_files(run: dict[str, Path], small: Population, tmp_path: Path) -> None:
    arms = arms_of(run, small.shop.items)
    played = rehearse(small, 30, arms, 3, tmp_path)
    table = pq.read_table(next((tmp_path / EXPOSURES).glob("exposures-*.parquet")))
    assert table.schema.equals(schema())
    experiment = read_experiment(tmp_path / EXPOSURES)
    assert experiment is not None and experiment.started == small.end
    rows = table.to_pylist()
    assert len(rows) == len(played.traffic)
    assert all(row["arm"] == experiment.arm_of(row["user_id"]) and len(row["items"]) == K for row in rows)
    outcomes = pq.read_table(tmp_path / OUTCOMES).to_pylist()
    assert len(outcomes) == (played.outcome.place >= 0).sum() > 0
    assert all(row["revenue"] > 0 for row in outcomes)
    analysis = analyse(tmp_path / EXPOSURES, Request(str(tmp_path / OUTCOMES)))
    assert sum(analysis.users.values()) == len(set(played.traffic.user.tolist()))
    assert analysis.outcomes.used == len(outcomes)
    orders = analysis.of("orders").reading.estimate
    arm_of = places_of(experiment, small.count)
    bought = played.traffic.user[played.outcome.place >= 0]
    came = np.unique(played.traffic.user)
    means = [(arm_of[bought] == place).sum() / (arm_of[came] == place).sum() for place in (0, 1)]
    assert (orders.control, orders.treatment) == pytest.approx(means)
    again = rehearse(small, 30, arms, 3, tmp_path / "again")
    np.testing.assert_array_equal(again.outcome.place, played.outcome.place)


def test_a_server_shows_what_the_process_shows(
    run: dict[str, Path], small: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same closed loop over HTTP: assignment, slates, live counts and histories."""
    arms = arms_of(run, small.shop.items, daily=False)
    experiment = make_experiment(small, ["control", "treatment"], 4)
    traffic = Traffic.of(small, 20, 4)
    here = simulate(small, traffic, ByArm(list(arms.values()), places_of(experiment, small.count)), K)
    options = {
        arm: ArmOption(arm, str(run[name]), 1.0) for arm, name in zip(arms, ("hstu-trope", "trope"), strict=True)
    }
    store = open_store(tmp_path / "s")
    models = {arm: Served.open(option.run, None, store, HISTORY, "cpu") for arm, option in options.items()}
    write_experiment(tmp_path / "shown", experiment, dict.fromkeys(options, ""))
    trial = open_trial(experiment.name, tmp_path / "shown", options, models, may_override=False, watch=False)
    assert trial.experiment == experiment, "the server goes on with the experiment of the folder"
    server = make_app(models, store, Options(device="cpu"), Log(requests=False), None, trial)
    with TestClient(server, base_url="http://127.0.0.1") as client:

        def post(self: OverHttp, path: str, content: Any) -> Any:
            answer = client.post(path, json=content)
            assert answer.status_code == 200, answer.text
            return answer.json()

        monkeypatch.setattr(OverHttp, "_post", post)
        asked = OverHttp("", K)
        there = simulate(small, traffic, asked, K)
    np.testing.assert_array_equal(there.slates, here.slates)
    np.testing.assert_array_equal(there.place, here.place)
    assert all(arm == experiment.arm_of(str(user)) for user, arm in asked.arms.items())
    rows = [row for file in (tmp_path / "shown").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert [row["moment"] for row in rows] == traffic.time.tolist()
    assert [row["items"] for row in rows] == [[str(item) for item in slate] for slate in here.slates.tolist()]
    # The server's clock is not the shop's: the files of a rehearsal have the shop's time alone.
    assert all(row["answered"] != row["moment"] for row in rows)
    move_answers(tmp_path / "shown")
    moved = [row for file in (tmp_path / "shown").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert moved == [{**row, "answered": float(row["moment"])} for row in rows]
    assert all(pq.read_schema(file).equals(schema()) for file in (tmp_path / "shown").glob("*.parquet"))


def test_daily_counts_change_few_slates(run: dict[str, Path], small: Population) -> None:
    traffic = Traffic.of(small, 20, 5)
    one, other = (
        simulate(small, traffic, arms_of(run, small.shop.items, daily)["treatment"], K) for daily in (True, False)
    )
    shared = [len(set(a) & set(b)) / K for a, b in zip(one.slates.tolist(), other.slates.tolist(), strict=True)]
    assert np.mean(shared) > 0.8


def test_an_outcome_without_purchases() -> None:
    outcome = Outcome(np.zeros((3, 2), np.int64), np.full(3, -1))
    assert outcome.bought.tolist() == [-1] * 3
    assert outcome.revenue(np.ones(5)).tolist() == [0.0] * 3


def test_the_command(run: dict[str, Path], tmp_path: Path) -> None:
    arms = [f"--arm=control={run['hstu-trope']}", f"--arm=trope={run['trope']}"]
    given = [
        "abtest",
        "simulate",
        *arms,
        "--shop",
        str(run["shop"]),
        "--in-process",
        "--days",
        "20",
        "--repetitions",
        "2",
    ]
    done = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "The truth: everybody in one arm, 2 repetitions" in done.output
    told = json.loads((tmp_path / "out" / "truth.json").read_text())
    assert told["effects"].keys() == set(METRICS)


def test_the_first_arm_is_the_control_whatever_its_name(run: dict[str, Path], tmp_path: Path) -> None:
    arms = [f"--arm=new={run['trope']}", f"--arm=control={run['hstu-trope']}"]
    given = ["abtest", "simulate", *arms, "--shop", str(run["shop"]), "--in-process", "--days", "10"]
    done = CliRunner().invoke(app, [*given, "--repetitions", "2", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "no metric of control differs from new" in done.output
    again = analyse(tmp_path / "out" / EXPOSURES, Request(str(tmp_path / "out" / OUTCOMES)))
    assert again.experiment.control == "new", "also for those who analyse the files"


def test_bad_input_is_one_line(run: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    a, b = f"--arm=a={run['trope']}", f"--arm=b={run['hstu-trope']}"
    shop, out = ["--shop", str(run["shop"])], ["--out", str(tmp_path / "new")]
    for given, said in (
        ([a, *shop, *out], "give --arm NAME=RUN twice"),
        ([a, a, *shop, *out], "--arm a is given twice"),
        ([a, b, "--shop", str(tmp_path / "no.json"), *out], "is no ground truth of a calendar shop"),
        ([a, b, "--shop", str(tmp_path / "none"), *out], "does not exist; `trope generate` writes"),
        ([a, b, *shop, "--out", str(tmp_path / "full")], "exists; name a new folder with --out"),
        ([a, b, *shop, *out, "--users", "81"], "--users must be from 1 to the shop's 80, got 81"),
        ([a, b, *shop, *out, "--days", "0"], "--days must be from 1 to 366, got 0"),
        ([a, "--arm=b!=x", *shop, *out], "an arm's name must be"),
    ):
        done = CliRunner().invoke(app, ["abtest", "simulate", "--in-process", *given])
        assert isinstance(done.exception, ValueError | OSError) and said in str(done.exception), (given, done.exception)
    assert not (tmp_path / "new").exists()


def test_a_model_of_another_log_is_refused(run: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="the model's items are not the shop's"):
        open_arms({"a": str(run["trope"])}, 50, K)
