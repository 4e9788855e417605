"""Metrics by their definitions over every order of equal scores, and against ranx; the bootstrap's coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from bootstrap import bootstrap, paired_bootstrap
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.evaluate.metrics import Places, average, per_user
from trope.evaluate.ranking import Cells, count_places

CUTOFFS = (1, 2, 3, 10)
Case = tuple[list[int], set[int]]  # scores of items 1, 2, .. and the positives


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few items and fewer scores, so that ties are everywhere."""
    scores = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    positives = draw(st.sets(st.integers(1, len(scores)), min_size=1))
    return scores, positives


def places_of(cases: list[Case]) -> Places:
    """By the definition, a loop for each user."""
    better, ties, sizes = [], [], []
    for scores, positives in cases:
        for item in sorted(positives):
            mine = scores[item - 1]
            better.append(sum(score > mine for score in scores))
            ties.append(sum(score == mine for score in scores) - 1)
        sizes.append(len(positives))
    return Places(np.array(better), np.array(ties), np.cumsum([0, *sizes]))


def orders(scores: list[int]) -> list[tuple[int, ...]]:
    """Every ranking of items 1, 2, .. that the scores allow."""
    groups = [
        [item for item, score in enumerate(scores, 1) if score == level] for level in sorted(set(scores), reverse=True)
    ]
    return [tuple(itertools.chain(*choice)) for choice in itertools.product(*map(itertools.permutations, groups))]


def by_definition(order: tuple[int, ...], positives: set[int]) -> dict[str, float]:
    ranks = [rank for rank, item in enumerate(order, 1) if item in positives]
    result = {"MRR": 1 / ranks[0]}
    for k in CUTOFFS:
        top = [rank for rank in ranks if rank <= k]
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, len(ranks)) + 1))
        result[f"HR@{k}"] = float(bool(top))
        result[f"Recall@{k}"] = len(top) / len(ranks)
        result[f"NDCG@{k}"] = sum(1 / math.log2(rank + 1) for rank in top) / ideal
    return result


@settings(max_examples=150)
@given(st.lists(cases(), min_size=1, max_size=4))
def test_every_metric_is_the_mean_over_all_orders_of_equal_scores(users: list[Case]) -> None:
    found = per_user(places_of(users), CUTOFFS)
    for row, (scores, positives) in enumerate(users):
        each = [by_definition(order, positives) for order in orders(scores)]
        assert found.keys() == each[0].keys()
        for name in found:
            assert found[name][row] == pytest.approx(np.mean([one[name] for one in each]), abs=1e-12)


@settings(max_examples=50)
@given(cases())
def test_the_rank_is_the_mean_rank_over_all_orders(case: Case) -> None:
    scores, positives = case
    every = orders(scores)
    expected = [np.mean([order.index(item) + 1 for order in every]) for item in sorted(positives)]
    np.testing.assert_allclose(places_of([case]).ranks, expected, rtol=1e-12)


def ranx_metrics(rankings: list[tuple[tuple[int, ...], set[int]]]) -> dict[str, np.ndarray]:
    """What ranx says of full rankings, one value for each."""
    import ranx  # here: its import compiles for seconds, and only this test needs it

    names = {f"HR@{k}": f"hit_rate@{k}" for k in CUTOFFS} | {f"Recall@{k}": f"recall@{k}" for k in CUTOFFS}
    names |= {f"NDCG@{k}": f"ndcg@{k}" for k in CUTOFFS} | {"MRR": "mrr"}
    qrels = {f"q{n:06}": {f"i{item}": 1 for item in positives} for n, (_, positives) in enumerate(rankings)}
    run = {
        f"q{n:06}": {f"i{item}": float(len(order) - rank) for rank, item in enumerate(order)}
        for n, (order, _) in enumerate(rankings)
    }
    found = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), list(names.values()), return_mean=False)
    return {ours: np.asarray(found[theirs]) for ours, theirs in names.items()}


@pytest.mark.filterwarnings("ignore:unsafe cast")  # numba, about ranx's own types
def test_agrees_with_ranx_on_random_scores_with_and_without_ties() -> None:
    random = np.random.default_rng(0)
    cases, rankings, owner = [], [], []
    for case in range(120):
        size = 40 if case < 60 else 6
        # The first cases have no two equal scores; the others few levels, and ranx sees every order they allow.
        scores = random.permutation(size).tolist() if case < 60 else random.integers(0, 3, size).tolist()
        positives = set((1 + random.choice(size, random.integers(1, 5), replace=False)).tolist())
        cases.append((scores, positives))
        for order in orders(scores):
            rankings.append((order, positives))
            owner.append(case)
    ours, theirs = per_user(places_of(cases), CUTOFFS), ranx_metrics(rankings)
    shares = np.bincount(owner)
    assert shares[60:].min() > 1  # ties there are
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], np.bincount(owner, values) / shares, rtol=0, atol=1e-9, err_msg=name)


def test_equal_scores_earn_what_guessing_earns() -> None:
    items = 1000
    flat = places_of([([0] * items, {user + 1}) for user in range(20)])
    metrics = average(per_user(flat))
    assert metrics["HR@10"] == pytest.approx(10 / items)
    assert metrics["MRR"] == pytest.approx(sum(1 / rank for rank in range(1, items + 1)) / items)
    assert set(flat.ranks) == {(items + 1) / 2}


def test_one_positive_without_ties_by_hand() -> None:
    values = per_user(Places(np.array([0, 2, 10]), np.zeros(3, int), np.arange(4)), (10,))
    assert values["HR@10"].tolist() == values["Recall@10"].tolist() == [1, 1, 0]
    np.testing.assert_allclose(values["NDCG@10"], [1, 0.5, 0])
    np.testing.assert_allclose(values["MRR"], [1, 1 / 3, 1 / 11])


def test_a_user_without_positives_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one positive"):
        per_user(Places(np.array([0]), np.array([0]), np.array([0, 1, 1])))


@settings(max_examples=60)
@given(users=st.lists(cases(), min_size=1, max_size=5), tile=st.integers(1, 40))
def test_counting_in_tiles_equals_a_loop(users: list[Case], tile: int) -> None:
    items = max(len(scores) for scores, _ in users)
    # Items that only other users have are left out of a user's ranking, and would win it otherwise.
    table = torch.full((len(users), items + 1), 9.0)
    for row, (scores, _) in enumerate(users):
        table[row, 1 : len(scores) + 1] = torch.tensor(scores)
    missing = [(row, item) for row, (scores, _) in enumerate(users) for item in range(len(scores) + 1, items + 1)]
    positives = [(row, item) for row, (_, chosen) in enumerate(users) for item in sorted(chosen)]
    cells, left_out = (Cells(*torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T) for pairs in (positives, missing))
    better, ties = count_places(
        lambda first, last: table[:, first:last].clone(), items, cells, left_out, len(users), tile
    )
    expected = places_of(users)
    np.testing.assert_array_equal(better, expected.better)
    np.testing.assert_array_equal(ties, expected.ties)


def test_cells_are_distinct_and_subtracted() -> None:
    items, offsets = torch.tensor([3, 1, 3, 2]), torch.tensor([0, 3, 3, 4])
    cells = Cells.distinct(items, offsets, num_items=3)
    assert cells.rows.tolist() == [0, 0, 2]
    assert cells.items.tolist() == [1, 3, 2]
    left = cells.without(Cells(torch.tensor([0, 2]), torch.tensor([3, 3])), num_items=3)
    assert list(zip(left.rows.tolist(), left.items.tolist(), strict=True)) == [(0, 1), (2, 2)]


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    trials = random.normal(0.3, 1.0, (200, 400))  # users, independent trials as if they were metrics
    interval = bootstrap(trials, resamples=2000, seed=3)
    covered = np.mean((interval.low <= 0.3) & (interval.high >= 0.3))
    assert 0.91 <= covered <= 0.98
    width = np.mean(interval.high - interval.low)
    assert width == pytest.approx(2 * 1.96 / math.sqrt(200), rel=0.05)


def test_pairing_sees_a_small_difference_that_separate_intervals_hide() -> None:
    random = np.random.default_rng(2)
    theirs = random.random(500)
    ours = theirs + 0.01 + random.normal(0, 0.02, 500)
    paired = paired_bootstrap(ours, theirs)
    assert paired.significant
    assert paired.mean == pytest.approx((ours - theirs).mean())
    assert bootstrap(ours).low < bootstrap(theirs).high
    assert not paired_bootstrap(ours, ours).significant


def test_bootstrap_is_seeded_and_the_same_for_one_metric_or_many() -> None:
    values = np.random.default_rng(3).random((50, 2))
    both, again, other = bootstrap(values, 500, seed=1), bootstrap(values, 500, seed=1), bootstrap(values, 500, seed=2)
    np.testing.assert_array_equal(both.low, again.low)
    assert (both.low != other.low).any()
    assert bootstrap(values[:, 0], 500, seed=1).low == pytest.approx(both.low[0], rel=1e-12)


def test_bootstrap_needs_resamples() -> None:
    with pytest.raises(ValueError, match="resamples"):
        bootstrap(np.ones(3), resamples=0)
