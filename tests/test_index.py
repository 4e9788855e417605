"""The approximate index: what it finds is scored as the exact ranking scores it, and what it loses is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.evaluate.ranking import top_k, top_k_among
from trope.models.recommender import SequentialRecommender
from trope.serve import index as indexing
from trope.serve.index import ItemIndex, recall, tune
from trope.serve.recommender import Histories, Recommender
from trope.settings import preset
from trope.times import DAY

pytest.importorskip("faiss", reason="the extra ann is not installed")

ITEMS, USERS, EVENTS, START = 4_000, 40, 6, 1_600_000_000
NOW = START + 30 * DAY
TINY = ["model.max_len=8", "model.width=16", "model.heads=2", "model.head_dim=8", "model.blocks=1"]


def served(model: str, index: str | None) -> Recommender:
    torch.manual_seed(0)
    net = SequentialRecommender(preset(model, TINY), ITEMS, (START, START + 20 * DAY)).eval()
    if net.pulse is not None:
        for name in ("network", "everybody", "own"):
            net.pulse.get_buffer(name).uniform_(0.2, 1)
        # Popularity as in a shop: a few items have most events.
        net.pulse.get_buffer("counts")[:, 1:] = 1e5 / torch.arange(1, ITEMS + 1)[torch.randperm(ITEMS)] ** 1.2
        net.pulse.get_buffer("counted_until").fill_(START + 20 * DAY)
    return Recommender(net, Catalogue(Ids(np.arange(ITEMS)), None), "cpu", index)


@pytest.fixture(scope="module")
def histories() -> Histories:
    random = np.random.default_rng(0)
    items = random.integers(1, ITEMS + 1, USERS * EVENTS)
    return Histories(items, START + np.tile(np.arange(EVENTS) * DAY, USERS), EVENTS * np.arange(USERS + 1))


@pytest.mark.parametrize("model", ["hstu-trope", "trope"])
@pytest.mark.parametrize("moments", ["one", "each"])
@pytest.mark.parametrize("filter_seen", ["none", "history"])
def test_with_all_lists_searched_it_is_the_exact_ranking(
    model: str, moments: str, filter_seen: str, histories: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few items are popular; scores may differ in the last digit."""
    monkeypatch.setattr(indexing, "POPULAR", 300)
    monkeypatch.setattr(indexing, "CANDIDATES", 3_000)
    exact, quick = served(model, None), served(model, "faiss")
    assert quick.index is not None
    quick.index.searched = quick.index.lists
    t_now = np.full(USERS, NOW) if moments == "one" else NOW + DAY * (np.arange(USERS) % 7)
    ours, theirs = (x.rank(histories, t_now, 10, filter_seen) for x in (exact, quick))
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-5)
    assert (ours.items == theirs.items).mean() > 0.99
    assert recall(quick, histories, t_now, 10, filter_seen) >= 0.99


@pytest.mark.parametrize("model", ["hstu-trope", "trope"])
def test_few_candidates_of_each_kind_suffice(model: str, histories: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 % of the items by the network, 5 % by their counts: what both together prefer is found."""
    monkeypatch.setattr(indexing, "POPULAR", 200)
    monkeypatch.setattr(indexing, "CANDIDATES", 200)
    quick, t_now = served(model, "faiss"), np.full(USERS, NOW)
    assert quick.index is not None
    reached = tune(quick, histories, t_now)
    assert reached >= 0.99 or quick.index.searched == quick.index.lists
    assert recall(quick, histories, t_now) == reached >= 0.95


def test_recall_falls_where_little_is_searched_and_tuning_mends_it(
    histories: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, t_now = served("hstu-trope", "faiss"), np.full(USERS, NOW)
    assert quick.index is not None
    quick.index.searched = 1
    low = recall(quick, histories, t_now)
    assert low < 0.9
    assert tune(quick, histories, t_now) >= 0.99 and 1 < quick.index.searched <= quick.index.lists


def test_seen_items_never_leave_a_user_with_less(histories: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "CANDIDATES", 1)
    quick = served("hstu-trope", "faiss")
    ranking = quick.rank(histories, np.full(USERS, NOW), 3, "history")
    assert np.bincount(ranking.rows).tolist() == [3] * USERS
    seen = set(zip(np.repeat(np.arange(USERS), EVENTS).tolist(), histories.items.tolist(), strict=True))
    assert not seen & set(zip(ranking.rows.tolist(), ranking.items.tolist(), strict=True))


def test_lists_are_answered_from_every_item(histories: Histories) -> None:
    exact, quick = served("trope", None), served("trope", "faiss")
    allow = np.arange(1, 60)
    ours, theirs = (x.rank(histories, np.full(USERS, NOW), 5, allow=allow) for x in (exact, quick))
    np.testing.assert_array_equal(ours.items, theirs.items)
    np.testing.assert_array_equal(ours.scores, theirs.scores)


def test_observed_events_reach_the_index(histories: Histories) -> None:
    import pandas as pd

    quick, t_now = served("trope", "faiss"), np.full(USERS, NOW)
    before = quick.rank(histories, t_now)
    rare = 1 + int(np.setdiff1d(np.arange(ITEMS), before.items)[0])
    item = quick.catalogue.originals(np.array([rare]))[0]
    quick.observe(pd.DataFrame({"user_id": range(5_000), "item_id": item, "timestamp": NOW - 60}))
    assert rare in quick.rank(histories, t_now).items and recall(quick, histories, t_now) > 0.95


def test_small_catalogues_work(tmp_path: Path) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(4, 8), dim=1)
    found = ItemIndex(vectors).top_k(vectors[1:], 5, indexing.Cells(*(torch.zeros(0, dtype=torch.int64),) * 2))
    assert found.items_BK[:, 0].tolist() == [1, 2, 3] and (found.items_BK[:, 3:] == 0).all()


def test_the_best_of_candidates_are_sorted_as_the_exact_ones() -> None:
    """Ties by item, -inf left out, empty places at the end."""
    scores = torch.tensor([[0.5, 0.7, 0.5, -torch.inf], [-torch.inf, -0.0, 0.0, -2.0]])
    items = torch.tensor([[9, 4, 2, 1], [3, 8, 7, 1]])
    found = top_k_among(scores, items, 5)
    assert found.items_BK.tolist() == [[4, 2, 9, 0, 0], [7, 8, 1, 0, 0]]
    torch.manual_seed(0)
    users, vectors = (torch.randn(n, 6) for n in (5, 31))
    exact = top_k(users, vectors, 7)
    order = torch.randperm(30) + 1
    among = top_k_among((users @ vectors.T)[:, order], order.expand(5, -1), 7)
    torch.testing.assert_close(among.scores_BK, exact.scores_BK)
    assert torch.equal(among.items_BK, exact.items_BK)


def test_without_faiss_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def absent(name: str, *arguments: Any, **settings: Any) -> Any:
        if name == "faiss":
            raise ModuleNotFoundError(name=name)
        return real(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ValueError, match=r"install trope\[ann\]"):
        served("hstu-trope", "faiss")
    with pytest.raises(ValueError, match="index must be one of 'faiss', got 'annoy'"):
        served("hstu-trope", "annoy")
