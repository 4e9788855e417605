"""Counting against plain dictionaries: the baselines, what validation chooses, the control, and its files."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_parquet
from training import one_thread, tiny, tiny_data, weights

from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.evaluate import counting
from trope.evaluate.baselines import (
    RECENT,
    Again,
    Events,
    MostPopular,
    RecentlyPopular,
    baselines,
    chosen_half_lives,
    decayed_counts,
    half_lives,
)
from trope.evaluate.evaluation import EvalResult, evaluate, rank_users
from trope.evaluate.live import Counting
from trope.evaluate.metrics import Places, average, per_user
from trope.evaluate.some_users import some_users
from trope.models.pulse import HALF_LIVES, CountStream, SortedEvents
from trope.models.recommender import SequentialRecommender
from trope.times import DAY, HOUR, say_short
from trope.train import checkpoint
from trope.train.loop import Trainer, train

__all__ = ["one_thread"]  # a fixture for every test in here
MAX_LEN = 8
PROTOCOLS = {
    "loo-strict": Protocol("loo-strict"),
    "holdout": Protocol("holdout", window=150_000),
    "next-basket": Protocol("next-basket"),
}
REFIT = ("train.refit=true", "train.epochs=2")
Scores = dict[int, float]


@pytest.fixture(scope="module", params=PROTOCOLS)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    path = tmp_path_factory.mktemp("counting")
    log = write_parquet(path / "log.parquet", random_log(rows=500, users=25, items=20))
    return prepared(log, path / "data", loose(protocol=PROTOCOLS[request.param]))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("shop"))


def events(data: Sequences, user: int) -> list[tuple[int, int]]:
    span = slice(int(data.offsets[user]), int(data.offsets[user + 1]))
    return list(zip(data.items[span].tolist(), data.times[span].tolist(), strict=True))


def known(data: Sequences, split: str) -> list[tuple[int, int]]:
    """Everybody's events before a split."""
    ends = data.split_range(split)[0]
    return [event for user in range(data.num_users) for event in events(data, user)[: int(ends[user])]]


def popularity(data: Sequences) -> Scores:
    """Below a millionth of an event, as the baselines break ties."""
    counts = Counter(item for item, _ in known(data, "valid"))
    return {item: 1e-6 * counts[item] / (max(counts.values()) + 1) for item in range(1, data.num_items + 1)}


def millionths(found: Scores) -> Scores:
    return {item: round(1e6 * value) / 1e6 for item, value in found.items()}


def decayed(data: Sequences, split: str, half_life: int) -> Callable[[int, int], Scores]:
    """Everybody's counts at t_now."""
    everything = known(data, split)

    def score(user: int, t_now: int) -> Scores:
        found = dict.fromkeys(range(1, data.num_items + 1), 0.0)
        for item, time in everything:
            if time < t_now:
                found[item] += 0.5 ** ((t_now - time) / half_life)
        return found

    return score


def again(data: Sequences, split: str, half_life: int) -> Callable[[int, int], Scores]:
    """The user's own counts at t_now, and a millionth for each own item."""

    def score(user: int, t_now: int) -> Scores:
        found: Scores = {}
        for item, time in events(data, user)[: int(data.split_range(split)[0][user])]:
            found[item] = found.get(item, 1e-6) + 0.5 ** ((t_now - time) / half_life)
        return found

    return score


def by_hand(
    data: Sequences, split: str, score: Callable[[int, int], Scores], filter_seen: str = "none", ties: bool = True
) -> EvalResult:
    """Places by the definition; score(user, t_now): what items score; ties: popularity decides among equal ones."""
    popular = popularity(data) if ties else {}
    users, better, equal, sizes = [], [], [], []
    starts, ends = data.split_range(split)
    for user in range(data.num_users):
        own, start, end = events(data, user), int(starts[user]), int(ends[user])
        if start == 0 or start == end:
            continue
        positives = sorted({item for item, _ in own[start:end]})
        found = score(user, data.protocol.t_now(split) or own[start][1])
        found = millionths(found) if ties else found
        seen = {item for item, _ in own[:start]} if filter_seen == "history" else set()
        scores = {
            item: found.get(item, 0.0) + popular.get(item, 0.0)
            for item in range(1, data.num_items + 1)
            if item in positives or item not in seen
        }
        users.append(user)
        sizes.append(len(positives))
        for positive in positives:
            apart = [value - scores[positive] for item, value in scores.items() if item != positive]
            better.append(sum(each > 1e-12 for each in apart))
            equal.append(sum(abs(each) <= 1e-12 for each in apart))
    return EvalResult(
        np.array(users), Places(np.array(better), np.array(equal), np.concatenate(([0], np.cumsum(sizes))))
    )


def assert_same(found: EvalResult, expected: EvalResult) -> None:
    assert found.users.tolist() == expected.users.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.ranks.tolist() == expected.ranks.tolist()


# Counting alone.


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("half_life", [900, 16 * HOUR, 100 * DAY])
@pytest.mark.parametrize("filter_seen", ["none", "history"])
def test_decayed_counts_and_again_are_what_a_dictionary_counts(
    data: Sequences, split: str, half_life: int, filter_seen: str
) -> None:
    popular, events = MostPopular(data), SortedEvents(*Events.of(data, split))
    everybody = decayed_counts(popular, events, [900, half_life])[half_life]
    own = Again(popular, data, split, half_life)
    for tile, batch in ((40, 7), (1 << 20, 512)):  # the second time counts begin again
        for scorer, truth in ((everybody, decayed), (own, again)):
            found = rank_users(scorer, data, split, filter_seen, MAX_LEN, tile=tile, batch=batch)
            assert_same(found, by_hand(data, split, truth(data, split, half_life), filter_seen))


def test_a_window_that_moves_back_is_counted_anew(data: Sequences) -> None:
    popular, before = MostPopular(data), Events.of(data, "test")
    scorer = RecentlyPopular(popular, before, 48)
    first, again = (rank_users(scorer, data, "test", "none", MAX_LEN, batch=5) for _ in range(2))
    assert_same(first, again)
    recent = {}
    for hours in RECENT.values():
        found = rank_users(RecentlyPopular(popular, before, hours), data, "test", "none", MAX_LEN, batch=3)
        everything = known(data, "test")

        def score(user: int, t_now: int, hours: int = hours, everything: Any = everything) -> Scores:
            counted = Counter(item for item, time in everything if t_now - HOUR * hours <= time < t_now)
            return {item: float(count) for item, count in counted.items()}

        assert_same(found, by_hand(data, "test", score))
        recent[hours] = found.ranks.tolist()
    assert recent[1] != recent[720]


@pytest.mark.parametrize("criterion", ["HR@10", "NDCG@10"])
def test_validation_chooses_the_half_lives(data: Sequences, criterion: str) -> None:
    config = tiny(f"train.criterion={criterion}")
    scorers = baselines(data, "test", config)
    chosen = chosen_half_lives(scorers)
    lives = half_lives(data)
    assert set(lives) <= set(HALF_LIVES) and len(lives) >= 4
    names = list(chosen)
    assert names == [f"decayed counts, {say_short(chosen[names[0]])}", "again"]
    assert list(scorers) == ["most popular", "popular in 30 d", "popular in 7 d", "popular in 24 h", "popular in 1 h",
                             *names]  # fmt: skip
    for name, truth in zip(names, (decayed, again), strict=True):
        validated = {each: by_hand(data, "valid", truth(data, "valid", each)).metrics[criterion] for each in lives}
        assert validated[chosen[name]] == pytest.approx(max(validated.values()), abs=1e-12)
        found = rank_users(scorers[name], data, "test", "none", MAX_LEN)
        assert_same(found, by_hand(data, "test", truth(data, "test", chosen[name])))


def fashion(path: Path, hours: int) -> Sequences:
    """Each item is everybody's choice for so many hours; five users, an event an hour each."""
    rows = [(u, 1 + t // hours % 40, START + HOUR * t + 60 * u) for u in range(5) for t in range(20 * hours)]
    return prepared(write_parquet(path / f"{hours}.parquet", rows), path / f"data{hours}")


def test_fast_fashions_get_short_half_lives(tmp_path: Path) -> None:
    config = tiny("train.criterion=NDCG@10")
    metrics = {}
    for hours in (2, 48):
        log = fashion(tmp_path, hours)
        scorers = baselines(log, "test", config)
        (name,) = [name for name in scorers if name.startswith("decayed counts")]
        assert chosen_half_lives(scorers)[name] <= HOUR * hours
        metrics[hours] = {each: rank_users(scorers[each], log, "test", "none", 8).metrics["MRR"]
                          for each in (name, "most popular")}  # fmt: skip
    assert all(each[name] > 3 * each["most popular"] for each in metrics.values() for name in list(each)[:1])


def test_counts_need_no_sorted_events() -> None:
    times, items = torch.tensor([5, 900, 40, 40, 7]), torch.tensor([1, 2, 3, 1, 2])
    order = torch.argsort(times, stable=True)
    lives, moments = torch.tensor([900.0]), torch.tensor([8, 41, 2_000])
    for shares in zip(
        CountStream(SortedEvents(items, times), lives, 3).at(moments),
        CountStream(SortedEvents(items[order], times[order]), lives, 3).at(moments),
        strict=True,
    ):
        assert torch.equal(*shares)


def test_some_users_are_a_part_of_the_split(data: Sequences) -> None:
    some = some_users(data, "valid", 5, torch.Generator().manual_seed(1))
    t_now = data.eval_batch("valid", some, 1).t_now
    assert len(set(some.tolist())) == 5 and set(some.tolist()) <= set(data.eval_users("valid").tolist())
    assert (t_now.diff() >= 0).all()
    scorer = decayed_counts(MostPopular(data), SortedEvents(*Events.of(data, "valid")), [DAY])[DAY]
    part = rank_users(scorer, data, "valid", "none", MAX_LEN, users=some)
    whole = rank_users(scorer, data, "valid", "none", MAX_LEN)
    assert part.users.tolist() == sorted(some.tolist())
    for user, first, last in zip(part.users, part.offsets[:-1], part.offsets[1:], strict=True):
        place = whole.users.tolist().index(user)
        theirs = whole.ranks[whole.offsets[place] : whole.offsets[place + 1]]
        assert part.ranks[first:last].tolist() == theirs.tolist()


# A model and counting.


class ByHand:
    """cosine + beta * log share, by the definition; cosines and counts are kept."""

    def __init__(self, model: SequentialRecommender, data: Sequences, split: str) -> None:
        self.data, self.split = data, split
        was_training = model.training
        model.train(False)
        with torch.no_grad():
            batch = data.eval_batch(split, data.eval_users(split), MAX_LEN)
            out = model.encode_last(batch.items, batch.times, batch.lengths, batch.t_now)
            rows = (out.double() @ model.item_vectors().double().T).tolist()
        model.train(was_training)
        self.cosines = dict(zip(batch.users.tolist(), rows, strict=True))
        self.counts = functools.cache(lambda user, t_now, half_life: decayed(data, split, half_life)(user, t_now))

    def __call__(self, beta: float, half_life: int) -> EvalResult:
        def score(user: int, t_now: int) -> Scores:
            counts = self.counts(user, t_now, half_life)
            total = sum(counts.values()) + self.data.num_items  # one for each item before it has any
            return {
                item: self.cosines[user][item] + beta * math.log((count + 1) / total) for item, count in counts.items()
            }

        return by_hand(self.data, self.split, score, ties=False)


def settled(run: Path) -> dict[str, Any]:
    return json.loads((run / "counting.json").read_text())


def test_a_model_plus_counting_is_what_a_dictionary_counts(data: Sequences) -> None:
    torch.manual_seed(0)
    model = SequentialRecommender(tiny(), data.num_items, data.time_span)
    for split in ("valid", "test"):
        alone, truth = evaluate(model, data, split, "none", MAX_LEN), ByHand(model, data, split)
        for choice in (Counting(0.05, 900), Counting(0.2, 64 * HOUR)):
            found = evaluate(model, data, split, "none", MAX_LEN, counting=choice)
            assert_same(found, truth(*choice))
        assert found.ranks.tolist() != alone.ranks.tolist()


@pytest.mark.parametrize("criterion", ["HR@10", "NDCG@10"])
def test_validation_chooses_beta_and_half_life(data: Sequences, criterion: str) -> None:
    torch.manual_seed(0)
    config = tiny(f"train.criterion={criterion}")
    model = SequentialRecommender(config, data.num_items, data.time_span)
    found = counting.choose_counting(model, data, config, seed=3)
    assert model.training and found["users"] == len(data.eval_users("valid"))
    grid = [Counting(0.0, 900), *(Counting(beta, each) for beta in counting.BETAS for each in half_lives(data))]
    truth = ByHand(model, data, "valid")
    scores = {each: truth(*each).metrics for each in grid}
    chosen = scores[Counting(found["beta"], found["half_life"])]
    assert chosen[criterion] == pytest.approx(max(each[criterion] for each in scores.values()), abs=1e-12)
    assert found["with"] == pytest.approx(chosen, abs=1e-12)
    assert found["without"] == pytest.approx(scores[grid[0]], abs=1e-12)
    assert found["beta"] > 0 or found["with"] == found["without"]


def test_large_sets_are_validated_by_some_users(data: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MOST_USERS", 6)
    model = SequentialRecommender(tiny(), data.num_items, data.time_span)
    monkeypatch.setattr("trope.evaluate.live.MOST_SCORES", 2 * len(half_lives(data)) * (data.num_items + 1))
    found = counting.choose_counting(model, data, tiny(), seed=3)
    users = some_users(data, "valid", 6, torch.Generator().manual_seed(3)).sort().values
    whole = ByHand(model, data, "valid")(found["beta"], found["half_life"])
    rows = np.isin(whole.users, users.numpy())
    expected = {name: float(values[rows].mean()) for name, values in per_user(whole.places).items()}
    assert found["users"] == 6 and found["with"] == pytest.approx(expected, abs=1e-12)
    assert average(per_user(whole.places)) != expected


def test_counting_that_does_not_help_is_left_out(tmp_path: Path) -> None:
    """A model that knows each user's next item: beta is 0, and the control is the model."""
    shop = tiny_data(tmp_path)

    class Knows(torch.nn.Module):
        def item_vectors(self) -> torch.Tensor:
            return torch.eye(shop.num_items + 1)

        def encode_last(self, items: Any, times: Any, lengths: Any, t_now: torch.Tensor) -> torch.Tensor:
            answers = {int(t): int(i) for i, t in zip(shop.items, shop.times, strict=True)}
            return 9 * self.item_vectors()[[answers[int(t)] for t in t_now]]

    found = counting.choose_counting(Knows(), shop, tiny(), seed=0)
    assert found["beta"] == 0 and found["with"] == found["without"] and found["with"]["HR@10"] == 1
    alone = evaluate(Knows(), shop, "test", "none", MAX_LEN)
    choice = Counting(found["beta"], found["half_life"])
    assert counting.score_counting(Knows(), shop, tiny(), choice, alone) == {"test_with_counting": alone.metrics}
    assert counting.score_counting(Knows(), shop, tiny(), None, alone) == {}


# Runs.


@pytest.fixture(scope="module")
def refitted(shop: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "refitted"
    train(shop, tiny(*REFIT), run, "cpu", progress=False)
    return run


def outcome(run: Path) -> dict[str, Any]:
    metrics = json.loads((run / "metrics.json").read_text())
    return {name: value for name, value in metrics.items() if name not in ("seconds", "sha256")}


def test_a_run_chooses_with_the_model_that_has_not_seen_validation_and_tests_the_last(
    shop: Sequences, refitted: Path
) -> None:
    found, metrics = settled(refitted), outcome(refitted)
    assert found["best_epoch"] == metrics["best_epoch"] and found["users"] == len(shop.eval_users("valid"))
    # Not what the refitted model, which is in best/, has on validation.
    assert found["without"] == pytest.approx(metrics["valid"], abs=1e-12)
    model = SequentialRecommender.from_pretrained(refitted / "best")
    assert evaluate(model, shop, "valid", "none", MAX_LEN).metrics != found["without"]
    choice = counting.read_counting(refitted, found["best_epoch"])
    assert choice == Counting(found["beta"], found["half_life"])
    expected = ByHand(model, shop, "test")(*choice).metrics
    assert metrics["test_with_counting"] == pytest.approx(expected, abs=1e-12)
    assert counting.read_counting(refitted, found["best_epoch"] + 1) is None


class Killed(BaseException):
    """No handler of ours may catch it."""


@pytest.mark.parametrize("where", ["choose_counting", "score_test", "Trainer.publish"])
def test_a_killed_run_resumes_to_the_same_bytes(
    shop: Sequences, refitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def killed(*arguments: Any) -> None:
        raise Killed

    run, config = tmp_path / "run", tiny(*REFIT)
    with monkeypatch.context() as patch:
        patch.setattr(f"trope.train.loop.{where}", killed)
        with pytest.raises(Killed):
            train(shop, config, run, "cpu", progress=False)
    assert (run / "counting.json").is_file() == (where != "choose_counting")
    train(shop, config, run, "cpu", resume=True, progress=False)
    assert (run / "counting.json").read_bytes() == (refitted / "counting.json").read_bytes()
    assert outcome(run) == outcome(refitted) and weights(run) == weights(refitted)


def test_a_longer_run_chooses_again_for_a_better_epoch(
    shop: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right before the better model was published beside a refit: best/ was still the refitted one."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    first, longer = (tiny("train.refit=true", "train.seed=1", f"train.epochs={epochs}") for epochs in (1, 3))
    train(shop, longer, whole, "cpu", progress=False)
    assert settled(whole)["best_epoch"] == 3
    train(shop, first, run, "cpu", progress=False)
    assert settled(run)["best_epoch"] == 1
    publish = checkpoint.publish

    def killed(model: SequentialRecommender, folder: Path) -> None:
        if list(run.glob("checkpoints/epoch0003*")):
            raise Killed
        publish(model, folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "publish", killed)
        with pytest.raises(Killed):
            train(shop, longer, run, "cpu", resume=True, progress=False)
    train(shop, longer, run, "cpu", resume=True, progress=False)
    assert settled(run) == settled(whole)
    assert settled(run)["without"] == pytest.approx(outcome(run)["valid"], abs=1e-12)


def test_a_refitted_run_of_an_older_version_has_no_control(shop: Sequences, refitted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(refitted, tmp_path / "run")
    (run / "counting.json").unlink()
    found = train(shop, tiny(*REFIT), run, "cpu", resume=True, progress=False)
    assert "test_with_counting" not in found and not (run / "counting.json").exists()
    assert found["test"] == outcome(refitted)["test"] and weights(run) == weights(refitted)


def test_a_model_with_a_fitted_pulse_needs_no_control(
    shop: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.epochs=1", model="trope")
    found = train(shop, config, tmp_path / "pulse", "cpu", progress=False)
    model = SequentialRecommender.from_pretrained(tmp_path / "pulse" / "best")
    assert model.pulse is not None and model.pulse.is_fitted
    assert "test_with_counting" not in found and not (tmp_path / "pulse" / "counting.json").exists()
    # Where validation chose the bare cosine, the control is there.
    monkeypatch.setattr(Trainer, "fit_pulse", lambda *_: None)
    found = train(shop, config, tmp_path / "bare", "cpu", progress=False)
    assert "test_with_counting" in found and (tmp_path / "bare" / "counting.json").is_file()


def test_a_changed_choice_is_refused(shop: Sequences, refitted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(refitted, tmp_path / "run")
    content = settled(run)
    for change in ({"beta": 1.1}, {"half_life": 0}):
        for is_sealed in (True, False):
            new = {**content, **change}
            (run / "counting.json").write_text(json.dumps(new if is_sealed else dict(list(new.items())[:-1])))
            with pytest.raises(ValueError, match=r"counting\.json is damaged or foreign: .*; remove it and resume"):
                train(shop, tiny(*REFIT), run, "cpu", resume=True, progress=False)
