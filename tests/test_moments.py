"""`Recommender.rank_moments`: the lists of `rank`, moment by moment, from one encode of each history."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training import one_thread, tiny, tiny_data

from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.data.sequences import Sequences
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY
from trope.train.pulse import keep_counts

__all__ = ["one_thread"]  # a fixture for every test in here

USERS, MOMENTS = 5, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("shop"))


def recommender_of(data: Sequences, name: str, *settings: str) -> Recommender:
    torch.manual_seed(0)
    model = SequentialRecommender(tiny(*settings, model=name), data.num_items, data.time_span)
    if model.pulse is not None:
        for part in ("network", "everybody", "own"):
            model.pulse.get_buffer(part).normal_()
        model.pulse.get_buffer("age_unit").fill_(DAY)
        keep_counts(model, data)
    return Recommender(model, Catalogue(Ids(np.arange(data.num_items)), None), "cpu")


def histories_of(data: Sequences) -> tuple[Histories, np.ndarray]:
    users = torch.arange(USERS)
    histories = Histories.of(data, users, data.offsets.diff()[users])
    last = histories.times[histories.offsets[1:] - 1]
    return histories, last[:, None] + DAY * np.array([-1, 0, 3, 200])


@pytest.mark.parametrize("at_a_time", [512, 3, 1])
@pytest.mark.parametrize("filter_seen", ["none", "window", "history"])
@pytest.mark.parametrize(("name", "settings"), [
    ("hstu-trope", ()), ("hstu-trope", ("model.predicts=next-moment",)), ("trope", ()), ("tisasrec", ()),
])  # fmt: skip
def test_it_is_rank_at_every_moment(
    data: Sequences, name: str, settings: tuple[str, ...], filter_seen: str, at_a_time: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("trope.serve.recommender.USERS_AT_A_TIME", at_a_time)
    recommender = recommender_of(data, name, *settings)
    histories, moments = histories_of(data)
    within = DAY if name == "trope" else 0
    kept = recommender.remember(histories) if recommender.model.can_remember else None
    for memory in (None, kept):
        found = recommender.rank_moments(histories, moments, 6, filter_seen, within, memory)
        assert found.items_BMK.shape == (USERS, MOMENTS, 6)
        for place, t_now in enumerate(moments.T):
            wanted = recommender.rank(histories, np.ascontiguousarray(t_now), 6, filter_seen, within)
            cells = wanted.rows, place, wanted.ranks - 1
            np.testing.assert_allclose(found.scores_BMK[cells], wanted.scores, rtol=0, atol=2e-6)
            np.testing.assert_array_equal(found.items_BMK[cells], wanted.items)
            assert (found.items_BMK[:, place] > 0).sum() == len(wanted.items)


@pytest.mark.parametrize("name", ["hstu-trope", "tisasrec"])
def test_long_histories_are_encoded_a_few_at_a_time(
    data: Sequences, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are ranked together, as on a GPU: the network's memory grows with the length."""
    recommender, (histories, moments) = recommender_of(data, name), histories_of(data)

    def ranked() -> tuple[np.ndarray, np.ndarray]:
        one_moment = recommender.rank(histories, np.ascontiguousarray(moments[:, 0]), 6)
        return one_moment.items, recommender.rank_moments(histories, moments[:, :1], 6).items_BMK

    wanted, seen = ranked(), []
    encode, remember = SequentialRecommender.encode, SequentialRecommender.remember
    monkeypatch.setattr("trope.serve.moments.USERS_AT_A_TIME", 1)
    monkeypatch.setattr("trope.serve.moments.POSITIONS", 2 * recommender.model.config.model.max_len)
    monkeypatch.setattr(SequentialRecommender, "encode", lambda *args: (seen.append(args[1]), encode(*args))[1])
    monkeypatch.setattr(SequentialRecommender, "remember", lambda *args: (seen.append(args[1]), remember(*args))[1])
    for found, same in zip(ranked(), wanted, strict=True):
        np.testing.assert_array_equal(found, same)
    assert [len(items_BL) for items_BL in seen] == [2, 2, 1] * 2


def test_one_encode_serves_all_moments(data: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    recommender, (histories, moments) = recommender_of(data, "hstu-trope"), histories_of(data)
    calls = []
    remember = SequentialRecommender.remember
    monkeypatch.setattr(SequentialRecommender, "remember", lambda *args: (calls.append(1), remember(*args))[1])
    monkeypatch.setattr(SequentialRecommender, "encode", None)
    recommender.rank_moments(histories, moments)
    assert len(calls) == 1


def test_a_kept_memory_is_continued(data: Sequences) -> None:
    recommender, (histories, moments) = recommender_of(data, "trope"), histories_of(data)
    one = Histories(*(x[: histories.offsets[1]] for x in histories[:2]), histories.offsets[:2])
    shorter = Histories(one.items[:-1], one.times[:-1], one.offsets - [0, 1])
    memory = recommender.remember(shorter)
    with pytest.raises(ValueError, match="the memory is of other histories"):
        recommender.rank_moments(one, moments[:1], memory=memory)
    memory.append(torch.tensor(one.items[-1:]), torch.tensor(one.times[-1:]))
    found = recommender.rank_moments(one, moments[:1], 5, memory=memory)
    wanted = recommender.rank_moments(one, moments[:1], 5)
    np.testing.assert_array_equal(found.items_BMK, wanted.items_BMK)
    np.testing.assert_allclose(found.scores_BMK, wanted.scores_BMK, rtol=0, atol=2e-6)


def test_bad_moments_are_refused(data: Sequences) -> None:
    recommender, (histories, moments) = recommender_of(data, "hstu-trope"), histories_of(data)
    for bad in (moments[0], moments[:2], moments[:, :0]):
        with pytest.raises(ValueError, match=r"moments must be \[B, M\]"):
            recommender.rank_moments(histories, bad)
    with pytest.raises(ValueError, match="milliseconds"):
        recommender.rank_moments(histories, moments * 1000)
    with pytest.raises(ValueError, match="k must be"):
        recommender.rank_moments(histories, moments, 0)
    with pytest.raises(ValueError, match="an event in each"):
        recommender.remember(Histories(histories.items[:0], histories.times[:0], np.array([0, 0])))
