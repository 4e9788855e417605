"""The pulse: counts against sums by hand, scores against the formula, what it may see, its fit, its runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from data_logs import loose, prepared, write_parquet
from torch import Tensor
from training import one_thread, tiny, tiny_data

import trope.train.checkpoint
import trope.train.loop
import trope.train.pulse
from trope.data.sequences import Sequences
from trope.data.views import asked_within
from trope.evaluate.evaluation import encoder, evaluate
from trope.evaluate.live import LiveScorer
from trope.evaluate.some_users import some_users
from trope.models.pulse import (
    HALF_LIVES,
    PERIODS,
    CountStream,
    DecayedCounts,
    LiveCounts,
    Pulse,
    SortedEvents,
    own_items,
)  # fmt: skip
from trope.models.pulse.counts import grain, half_lives_within
from trope.models.pulse.seasons import known_periods
from trope.models.recommender import SequentialRecommender
from trope.runs import PULSE
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY, YEAR
from trope.train.loop import train
from trope.train.pulse import LONGEST_UNIT, age_unit, keep_counts

__all__ = ["one_thread"]  # a fixture for every test in here
START = 1_600_000_000


def some_events(seed: int, events: int = 60, items: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(1, items + 1, (events,), generator=generator)
    return chosen, START + torch.randint(0, 3 * DAY, (events,), generator=generator)


def counted_by_hand(items: Tensor, times: Tensor, moment: int, half_life: float, item: int) -> float:
    return sum(
        2.0 ** (-(moment - t) / half_life)
        for i, t in zip(items.tolist(), times.tolist(), strict=True)
        if i == item and t < moment
    )


def season_by_hand(time: int, moment: int, period: int) -> float:
    """Half for each of 32 bins between an event's bin and the moment, the shorter way around the circle."""
    centre, here = time % period * 32 // period + 0.5, moment % period * 32 / period
    return 2.0 ** -min(abs(centre - here), 32 - abs(centre - here))


def shares_of(counts: list[float]) -> list[float]:
    return [math.log((count + 1) / (sum(counts) + len(counts))) for count in counts]


def test_counts_are_those_of_a_sum_over_events() -> None:
    items, times = some_events(0)
    times[:5] = START + DAY  # events at the very moment do not count at it
    stream = CountStream(SortedEvents(items, times), torch.tensor([3_600.0, DAY]), num_items=5)
    moments = [START, START + DAY, START + DAY + 1, START + 2 * DAY, START + 2 * DAY, START + 9 * DAY]
    for moment, shares_KV in zip(moments, stream.at(torch.tensor(moments)), strict=True):
        for k, half_life in enumerate((3_600.0, DAY)):
            counts = [counted_by_hand(items, times, moment, half_life, item) for item in range(1, 6)]
            assert shares_KV[k, 1:].tolist() == pytest.approx(shares_of(counts), abs=1e-5)


def test_counts_go_on_from_where_they_were_kept() -> None:
    items, times = some_events(1)
    half_lives = torch.tensor([3_600.0, DAY])
    early, middle, late = times < START + DAY, START + DAY, START + 4 * DAY
    whole, kept = DecayedCounts(half_lives, 5), DecayedCounts(half_lives, 5)
    whole.move(late, items, times)
    kept.move(middle, items[early], times[early])
    kept = DecayedCounts.of(half_lives, kept.counts_KV, middle)
    torch.testing.assert_close(kept.log_shares(START), kept.log_shares())  # nobody can go back
    ahead = kept.log_shares(late)
    kept.move(late, items[:0], times[:0])
    torch.testing.assert_close(ahead, kept.log_shares())
    kept.move(late, items[~early], times[~early])
    torch.testing.assert_close(kept.counts_KV, whole.counts_KV)


def test_a_season_needs_one_and_a_half_periods() -> None:
    assert known_periods(DAY) == [] and known_periods(2 * DAY) == [0] and known_periods(11 * DAY) == [0, 1]
    assert known_periods(365 * DAY) == [0, 1] and known_periods(600 * DAY) == [0, 1, 2]


def test_what_sold_a_year_ago_in_the_coming_weeks_counts() -> None:
    """An item of December, asked about on the last of November, a year later."""
    december = START // DAY * DAY + torch.arange(30) * DAY
    items, times = torch.tensor([1] * 30 + [2] * 60), torch.cat((december, december - 150 * DAY, december - 90 * DAY))
    stream = CountStream(
        SortedEvents(items, times), torch.tensor([DAY * 30.0]), num_items=3, periods=known_periods(600 * DAY)
    )
    (shares,) = stream.at(torch.tensor([int(december[0]) + 364 * DAY]))
    year = shares[1 + PERIODS.index(max(PERIODS))]
    assert shares.shape == (1 + len(PERIODS), 4) and year[1] > year[2] + 1 and year[1] > year[3] + 1


@pytest.mark.parametrize(("unit", "span", "first", "last"), [
    (1, 10 * DAY, 900, 900 * 4**4), (60, 10 * DAY, 900, 900 * 4**4), (DAY, 400 * DAY, 900 * 4**4, 900 * 4**7),
])  # fmt: skip
def test_half_lives_are_those_that_a_log_can_tell(unit: int, span: int, first: int, last: int) -> None:
    times = torch.arange(0, span, unit * 7) // unit * unit
    found = [HALF_LIVES[place] for place in half_lives_within(grain(times), span)]
    assert (found[0], found[-1]) == (first, last)


def test_own_items_by_hand() -> None:
    items, times = torch.tensor([3, 1, 3, 2]), torch.tensor([100, 200, 300, 50])
    own = own_items(items, times, torch.tensor([0, 3, 4]), torch.tensor([400, 150]), torch.tensor([100.0]), 9)
    assert (own.rows_C.tolist(), own.items_C.tolist()) == ([0, 0, 1], [1, 3, 2])
    expected = [[1, 0, math.log(1 / 3), 0.25], [1, math.log(2), math.log(2 / 3), 0.5], [1, 0, 0, 0.5]]
    torch.testing.assert_close(own.features_CF, torch.tensor(expected))


def with_random_pulse(data: Sequences, seed: int = 0) -> SequentialRecommender:
    torch.manual_seed(seed)
    model = SequentialRecommender(tiny(model="trope"), data.num_items, data.time_span).eval()
    assert model.pulse is not None and model.pulse.periods  # the log is long enough for days and weeks
    for name in ("network", "everybody", "own"):
        model.pulse.get_buffer(name).normal_()
    model.pulse.get_buffer("age_unit").fill_(DAY)
    return model


def all_scores(model: SequentialRecommender, data: Sequences, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Users in the order of their moments, their scores [U, V], and the network's vectors."""
    assert model.pulse is not None
    users = data.eval_users(split)
    users = users[torch.argsort(data.eval_batch(split, users, 1).t_now, stable=True)]
    with torch.no_grad():
        vectors = model.item_vectors()
        scorer = LiveScorer(model.pulse, encoder(model, vectors.device, "fp32"), vectors, data, split)
        batch = data.eval_batch(split, users, 8)
        out = model.encode_last(batch.items, batch.times, batch.lengths, batch.t_now)
        tiles = scorer(batch)
        return users, torch.cat((tiles(1, 4), tiles(4, data.num_items + 1)), dim=1), out


@pytest.mark.parametrize("protocol", ["loo-strict", "holdout"])
def test_scores_are_those_of_the_formula(tmp_path: Path, protocol: str) -> None:
    data = tiny_data(tmp_path, protocol)
    model = with_random_pulse(data)
    pulse, items = model.pulse, model.item_vectors().detach()
    assert pulse is not None
    users, scores, out = all_scores(model, data, "test")
    history = data.first_events(data.test_start)
    turning = pulse.turning
    network, everybody, own = (pulse.get_buffer(name) for name in ("network", "everybody", "own"))
    for row in (0, len(users) // 2, len(users) - 1):
        user = int(users[row])
        begin, length = int(data.offsets[user]), int(data.test_start[user])
        own_items_, own_times = data.items[begin : begin + length], data.times[begin : begin + length]
        moment = int(data.eval_batch("test", users[row : row + 1], 1).t_now)
        units = (moment - data.time_span[1]) / DAY
        age = min(max(units, 0), 1)
        horizon = min((data.protocol.window or 0) / DAY, 1)
        about = torch.tensor([1.0, math.log(length) - 2.5, age, horizon])
        standing, turns = (max(scale, 0.0) for scale in (about @ network).tolist())
        turns *= 2.0 ** -max(units - 1, 0)  # what stands still was measured for one unit
        log_shares = []
        for half_life in HALF_LIVES:
            known = (data.items[history], data.times[history], moment, half_life)
            counts = [counted_by_hand(*known, item) for item in range(1, data.num_items + 1)]
            log_shares.append(shares_of(counts))
        for place, period in enumerate(PERIODS):
            counts = [0.0] * data.num_items
            for item, time in zip(data.items[history].tolist(), data.times[history].tolist(), strict=True):
                counts[item - 1] += season_by_hand(time, moment, period) if time < moment else 0.0
            log_shares.append(shares_of(counts) if place in pulse.periods else [0.0] * data.num_items)
        for item in range(1, data.num_items + 1):
            expected = standing * float(out[row, turning:] @ items[item, turning:])
            expected += turns * float(out[row, :turning] @ items[item, :turning])
            for k, shares in enumerate(log_shares):
                weight = everybody[0, k] + age * everybody[1, k] + horizon * everybody[2, k]
                expected += float(weight) * shares[item - 1]
            mine = own_times[own_items_ == item]
            if len(mine):
                recent = [2.0 ** (-(moment - int(mine.max())) / half_life) for half_life in HALF_LIVES]
                features = torch.tensor([1.0, math.log(len(mine)), math.log(len(mine) / length), *recent])
                expected += float(features @ own)
            assert float(scores[row, item - 1]) == pytest.approx(expected, abs=1e-3)


def test_nothing_of_the_target_or_the_future_is_seen(tmp_path: Path) -> None:
    data = tiny_data(tmp_path, "holdout")
    model = with_random_pulse(data)
    _, before, _ = all_scores(model, data, "test")
    events = torch.arange(data.num_events)
    later = ~torch.isin(events, data.first_events(data.test_start))
    assert later.any()
    changed = data.items.clone()
    changed[later] = 1
    other = Sequences(data.path, data.meta, {**data._tensors, "items": changed})
    torch.testing.assert_close(all_scores(model, other, "test")[1], before, rtol=0, atol=0)


def test_a_silent_pulse_is_the_cosine(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    torch.manual_seed(0)
    model = SequentialRecommender(tiny(model="trope"), data.num_items, data.time_span)
    assert model.pulse is not None and not model.pulse.is_fitted
    plain = evaluate(model, data, "test", "none", 8, live=False)
    assert evaluate(model, data, "test", "none", 8).metrics == plain.metrics
    model.pulse.get_buffer("everybody")[0, 0] = 1e-12  # fitted, and nothing but the cosine left
    assert evaluate(model, data, "test", "none", 8).metrics == pytest.approx(plain.metrics)


@pytest.mark.parametrize("protocol", ["loo-strict", "holdout"])
@pytest.mark.parametrize("unit", [30 * DAY, 3_600])  # young all the time; older than one unit, as after an update
def test_the_fit_scores_as_evaluation_does(tmp_path: Path, protocol: str, unit: int) -> None:
    data, config = tiny_data(tmp_path, protocol), tiny(model="trope")
    model = with_random_pulse(data)
    pulse, vectors = model.pulse, model.item_vectors().detach()
    assert pulse is not None and not pulse.knows_year
    pulse.get_buffer("age_unit").fill_(unit)
    asked = iter(list(trope.train.pulse._ask(model, data, config, seed=0)))
    weights_W = torch.randn(len(trope.train.pulse._start(pulse)))
    weights_W[:8] = weights_W[:8].abs()  # of the network: a scale below zero would hide a part of it
    trope.train.pulse._fill(pulse, weights_W, config.train.temperature)
    views: list[tuple[Sequences, int | None]] = [(data, None)]
    if protocol == "holdout":
        views = [(asked_within(data, *window), window[1]) for window in trope.train.pulse._windows(data.protocol)]
    generator, compared, oldest = torch.Generator().manual_seed(0), 0, 0.0
    for view, until in views:
        users = some_users(view, "valid", 1_000, generator)
        if not len(users):
            continue
        batch = view.eval_batch("valid", users, 8)
        scorer = LiveScorer(pulse, encoder(model, vectors.device, "fp32"), vectors, view, "valid", until)
        with torch.no_grad():
            live_BV = scorer(batch)(1, data.num_items + 1)
        fitted_BV = trope.train.pulse._scores(next(asked), weights_W)
        torch.testing.assert_close(fitted_BV, live_BV, rtol=1e-4, atol=1e-4)
        compared, oldest = compared + len(users), max(oldest, float(pulse._units(batch.t_now, pulse.age_from).max()))
    assert compared >= 10 and (oldest > 1.5) == (unit == 3_600)
    assert next(asked, None) is None


def days_of_fashion(path: Path, fashion: bool) -> Sequences:
    """Everybody picks the day's own item half of the time; without fashion any item. Times are seconds."""
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    users, days = np.repeat(np.arange(200), 12), np.sort(random.integers(0, 40, (200, 12))).ravel()
    of_day = random.integers(0, 60, 40)
    items = random.integers(0, 60, len(users))
    if fashion:
        follows = random.random(len(users)) < 0.5
        items[follows] = of_day[days[follows]]
    times = START // DAY * DAY + days * DAY + random.integers(0, DAY, len(users))
    rows = list(zip(users.tolist(), items.tolist(), times.tolist(), strict=True))
    return prepared(write_parquet(path / "log.parquet", rows), path / "data", loose())


@pytest.mark.parametrize("fashion", [True, False])
def test_the_fit_finds_a_fashion_and_costs_nothing_where_there_is_none(tmp_path: Path, fashion: bool) -> None:
    data = days_of_fashion(tmp_path, fashion)
    config = tiny("train.epochs=1", model="trope")
    run = tmp_path / "run"
    found = train(data, config, run, "cpu", progress=False)
    pulse = json.loads((run / PULSE).read_text())
    assert pulse["pulse"] >= pulse["cosine"]
    model = SequentialRecommender.from_pretrained(run / "best")
    plain = evaluate(model, data, "test", "none", 8, live=False).metrics["HR@10"]
    if fashion:
        assert found["test"]["HR@10"] > plain + 0.15
    else:
        assert found["test"]["HR@10"] > plain - 0.05  # chance has 10 of 60


def test_a_pulse_is_never_fitted_on_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """loo-paper validates on the test event: with a pulse, the event before it is taken out of training instead."""
    data = tiny_data(tmp_path, "loo-paper")
    fitted_on: list[Sequences] = []

    def note(model: Any, data: Sequences, *rest: Any) -> dict[str, Any]:
        fitted_on.append(data)
        return {"weights": model.pulse.weights()}

    monkeypatch.setattr(trope.train.loop, "fit_pulse", note)
    train(data, tiny("train.refit=true", model="trope"), tmp_path / "run", "cpu", progress=False)
    (seen,) = fitted_on
    torch.testing.assert_close(seen.valid_end, data.test_start)
    torch.testing.assert_close(seen.train_end, data.test_start - 1)
    torch.testing.assert_close(seen.with_validation().train_end, data.train_end)  # the refit has what others have


@pytest.fixture(scope="module")
def holdout(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("pulse"), "holdout")


@pytest.fixture(scope="module")
def run(holdout: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(holdout, tiny(*REFIT, model="trope"), folder, "cpu", progress=False)
    return folder


REFIT = ("train.refit=true", "train.epochs=2")


def contents(folder: Path) -> dict[str, Any]:
    names = (PULSE, "metrics.json", "best/model.safetensors", "best/config.json")
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in names}
    metrics = json.loads(found["metrics.json"])
    return {**found, "metrics.json": {k: v for k, v in metrics.items() if k not in ("seconds", "sha256")}}


def test_a_finished_run_that_is_resumed_stays_as_it_is(holdout: Sequences, run: Path) -> None:
    before = contents(run)
    train(holdout, tiny(*REFIT, model="trope"), run, "cpu", resume=True, progress=False)
    assert contents(run) == before


def test_the_parts_without_a_bar_are_named(
    holdout: Sequences, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(holdout, tiny("train.epochs=1", "train.refit=true", model="trope"), tmp_path / "run", "cpu")
    parts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert parts == ["pulse", "refit", "test", "best epoch 1 of 1"]


@pytest.mark.parametrize("refit", ["true", "false"])
def test_a_run_killed_before_or_after_the_fit_ends_the_same(
    holdout: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refit: str
) -> None:
    config = tiny(f"train.refit={refit}", "train.epochs=2", model="trope")
    train(holdout, config, tmp_path / "whole", "cpu", progress=False)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("fit_pulse", "score_test"):
        killed = tmp_path / place

        with monkeypatch.context() as patch:
            patch.setattr(trope.train.loop, place, stop)
            with pytest.raises(KeyboardInterrupt):
                train(holdout, config, killed, "cpu", progress=False)
        train(holdout, config, killed, "cpu", resume=True, progress=False)
        assert contents(killed) == contents(tmp_path / "whole")


@pytest.mark.parametrize("place", ["publish", "write_json"])
def test_a_run_killed_while_the_fit_is_written_ends_the_same(
    holdout: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The best epoch is not the last, so that nothing but the fit publishes it again."""
    config = tiny("train.epochs=4", model="trope")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    found = train(holdout, config, whole, "cpu", progress=False)
    assert found["best_epoch"] < found["epochs"]
    fit, owner = trope.train.loop.fit_pulse, trope.train.checkpoint if place == "publish" else trope.train.loop

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:

        def fit_and_be_killed(*arguments: Any) -> dict[str, Any]:
            found = fit(*arguments)
            patch.setattr(owner, place, stop)
            return found

        patch.setattr(trope.train.loop, "fit_pulse", fit_and_be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(holdout, config, killed, "cpu", progress=False)
    train(holdout, config, killed, "cpu", resume=True, progress=False)
    assert contents(killed) == contents(whole)


def test_a_prolonged_run_keeps_no_weights_of_an_earlier_epoch(
    holdout: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted after one epoch; a later one is better, and there the bare cosine is."""
    run, settings = tmp_path / "run", ("train.lr=0.01", "train.seed=0")
    train(holdout, tiny(*settings, "train.epochs=1", model="trope"), run, "cpu", progress=False)
    before = SequentialRecommender.from_pretrained(run / "best").pulse
    assert before is not None and before.is_fitted
    monkeypatch.setattr(trope.train.pulse, "EXPONENTS", ())
    found = train(holdout, tiny(*settings, "train.epochs=4", model="trope"), run, "cpu", resume=True, progress=False)
    after = SequentialRecommender.from_pretrained(run / "best").pulse
    assert found["best_epoch"] > 1 and json.loads((run / PULSE).read_text())["exponent"] is None
    assert after is not None and not after.is_fitted


def test_a_changed_pulse_file_is_refused(holdout: Sequences, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / PULSE
    path.write_text(path.read_text().replace('"best_epoch"', '"best_epochs"'))
    with pytest.raises(ValueError, match=r"pulse\.json"):
        train(holdout, tiny(*REFIT, model="trope"), copy, "cpu", resume=True, progress=False)


def test_a_pulse_is_not_fitted_on_what_a_refit_has_seen(holdout: Sequences, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / PULSE).unlink()
    with pytest.raises(ValueError, match="has seen the validation events"):
        train(holdout, tiny(*REFIT, model="trope"), copy, "cpu", resume=True, progress=False)


def test_serving_scores_as_evaluation_does(holdout: Sequences, tmp_path: Path) -> None:
    """After a refit training ends where the test begins: the counts that the model kept are those of the test."""
    data = holdout.with_validation()
    model = with_random_pulse(data)
    keep_counts(model, data)
    holdout.write_catalogue(tmp_path / "catalogue")
    model.save_pretrained(tmp_path / "best")
    served = Recommender.from_pretrained(tmp_path, "cpu")
    users, scores, _ = all_scores(model, data, "test")
    moments = data.eval_batch("test", users, 1).t_now
    histories, window = Histories.of(data, users, data.test_start[users].long()), data.protocol.window
    assert window is not None
    ranking = served.rank(histories, moments.numpy(), k=5, within=window)
    best = torch.topk(scores, 5)
    np.testing.assert_array_equal(ranking.items.reshape(-1, 5), best.indices.numpy() + 1)
    np.testing.assert_allclose(ranking.scores.reshape(-1, 5), best.values.numpy(), atol=1e-3)


def test_counts_are_kept_until_now_where_a_clock_was_ahead(holdout: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who serves the model counts live events from there on."""
    model = with_random_pulse(holdout)
    first, last = holdout.time_span
    for now, until in ((last + DAY, last + 1), (last - DAY, last - DAY), (first - DAY, last + 1)):
        monkeypatch.setattr("trope.train.pulse.time.time", lambda now=now: float(now))
        keep_counts(model, holdout)
        assert model.pulse is not None and int(model.pulse.get_buffer("counted_until")) == until


def test_observed_events_make_an_item_popular(holdout: Sequences, tmp_path: Path) -> None:
    model = with_random_pulse(holdout)
    assert isinstance(model.pulse, Pulse)
    for name in ("network", "own"):
        model.pulse.get_buffer(name).zero_()
    model.pulse.get_buffer("everybody").fill_(1.0)
    keep_counts(model, holdout)
    holdout.write_catalogue(tmp_path / "catalogue")
    model.save_pretrained(tmp_path / "best")
    served = Recommender.from_pretrained(tmp_path, "cpu")
    now = holdout.time_span[1] + DAY
    target = served.catalogue.originals(np.array([holdout.num_items]))[0]
    history = pd.DataFrame({"user_id": ["u"], "item_id": [target], "timestamp": [now - 2 * DAY]})
    many = pd.DataFrame({"user_id": range(500), "item_id": [target] * 500, "timestamp": [now - 60] * 500})
    assert served.recommend(history, now, k=1)["item_id"].tolist() != [target]
    assert served.observe(many) == 500
    assert served.observe(many.head(0)) == 0 and served.observe(many.head(0).astype(float)) == 0
    assert served.recommend(history, now, k=1)["item_id"].tolist() == [target]


def test_weights_of_another_shape_are_refused() -> None:
    pulse = Pulse(5, 2, (0, START))
    with pytest.raises(ValueError, match="own must be of shape"):
        pulse.take_weights({**pulse.weights(), "own": [1.0]})


def test_what_nobody_has_told_is_expected_from_the_year() -> None:
    """Item 1 sells in the first half of a year, item 2 in the second; told for three years, asked in the fourth."""

    def sold(until: int) -> tuple[Tensor, Tensor]:
        times = torch.arange(0, until, 3_600)
        return torch.where(times % YEAR < YEAR // 2, 1, 2), times

    half_lives, end = torch.tensor(HALF_LIVES, dtype=torch.float64), 3 * YEAR
    told = CountStream(SortedEvents(*sold(end)), half_lives, 2, [PERIODS.index(YEAR)])
    next(told.at(torch.tensor([end])))
    assert told.seasons is not None
    live = LiveCounts(told.counts, told.seasons, since=0)
    for part in (0.2, 0.45, 0.6, 0.9, 1.3):
        moment = end + int(part * YEAR)
        truth = CountStream(SortedEvents(*sold(moment)), half_lives, 2, [PERIODS.index(YEAR)])
        expected = next(truth.at(torch.tensor([moment])))
        # Half-lives from four hours on; a shorter one counts less than one event.
        torch.testing.assert_close(live.log_shares(moment)[2:].exp(), expected[2:].exp(), atol=0.06, rtol=0)


def test_without_a_year_counts_stand_still() -> None:
    items, times = torch.tensor([1, 2, 2]), torch.tensor([0, 10 * DAY, 20 * DAY])
    told = CountStream(
        SortedEvents(items, times), torch.tensor(HALF_LIVES, dtype=torch.float64), 2, known_periods(20 * DAY)
    )
    next(told.at(torch.tensor([21 * DAY])))
    assert told.seasons is not None
    live = LiveCounts(told.counts, told.seasons, since=0)
    later = 21 * DAY + YEAR
    torch.testing.assert_close(live.log_shares(later)[: len(HALF_LIVES)], told.counts.log_shares(later))


def test_readout_is_asked_for_the_last_known_year() -> None:
    pulse = Pulse(2, 2, (0, 3 * YEAR))
    pulse.get_buffer("age_unit").fill_(DAY)
    times = torch.tensor([YEAR, 3 * YEAR, 3 * YEAR + DAY, 3 * YEAR + DAY + 1, 4 * YEAR, 4 * YEAR + 5, 6 * YEAR - 7])
    expected = [YEAR, 3 * YEAR, 3 * YEAR + DAY, 2 * YEAR + DAY + 1, 3 * YEAR, 2 * YEAR + 5, 3 * YEAR - 7]
    assert pulse.known_times(times).tolist() == expected
    short = Pulse(2, 2, (0, YEAR))
    short.get_buffer("age_unit").fill_(DAY)
    assert short.known_times(times).tolist() == times.tolist()


def test_a_model_grows_old_without_a_window_too(tmp_path: Path) -> None:
    """A holdout's window is the unit of age; under leave-one-out it is a fiftieth of the span, within bounds."""
    data = tiny_data(tmp_path, "loo-strict")
    span = data.time_span[1] - data.time_span[0]
    assert age_unit(data) == min(max(span // 50, DAY), 30 * DAY)
    year, decade = (SimpleNamespace(protocol=data.protocol, time_span=(0, n * YEAR)) for n in (1, 10))
    assert age_unit(year) == YEAR // 50 and age_unit(decade) == LONGEST_UNIT == 30 * DAY
    held = tiny_data(tmp_path / "held", "holdout")
    assert age_unit(held) == held.protocol.window


def test_an_updated_model_is_as_old_as_its_training_and_its_readout_as_young_as_its_update() -> None:
    pulse = Pulse(2, 1, (0, 10 * DAY), age_from=9 * DAY)
    pulse.get_buffer("age_unit").fill_(2 * DAY)
    moments = torch.tensor([9, 10, 11, 12, 14]) * DAY
    assert pulse.age(moments).tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert pulse.fade(moments).tolist() == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_a_part_of_the_network_is_never_turned_round() -> None:
    """A scale that would fall below zero with age is zero."""
    pulse = Pulse(2, 1, (0, DAY))
    pulse.get_buffer("age_unit").fill_(DAY)
    pulse.get_buffer("network")[2] = torch.tensor([-0.5, -3.0])
    moments = torch.tensor([DAY, 2 * DAY])
    scaled = pulse.scale(torch.ones(2, 2), torch.tensor([12, 12]), moments)
    assert scaled[0].tolist() == [1.0, 1.0]
    assert scaled[1].tolist() == [0.0, 0.5]
