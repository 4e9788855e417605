"""Lists of items to allow and deny, and users of whom the model knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from data_logs import START, prepared, random_log, write_parquet
from test_recommender import NOW, make_run

from trope.data.catalogue import Catalogue
from trope.data.sequences import Sequences
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories, Recommender
from trope.settings import preset
from trope.train.pulse import keep_counts

ITEMS = 15
TINY = ["model.max_len=8", "model.width=16", "model.heads=2", "model.head_dim=8", "model.blocks=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("shop")
    return prepared(write_parquet(folder / "log.parquet", random_log()), folder / "data")


@pytest.fixture(scope="module")
def plain(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    return Recommender.from_pretrained(make_run(data, tmp_path_factory.mktemp("run")), "cpu")


def with_pulse(data: Sequences, catalogue: Catalogue, index: str | None = None) -> Recommender:
    """A model with a random pulse, and the counts of its training."""
    torch.manual_seed(0)
    model = SequentialRecommender(preset("trope", TINY), data.num_items, data.time_span).eval()
    assert model.pulse is not None
    for name in ("network", "everybody", "own"):
        model.pulse.get_buffer(name).normal_()
    keep_counts(model, data)
    return Recommender(model, catalogue, "cpu", index)


@pytest.fixture(scope="module", params=["plain", "pulse"])
def recommender(request: pytest.FixtureRequest, data: Sequences, plain: Recommender) -> Recommender:
    return plain if request.param == "plain" else with_pulse(data, plain.catalogue)


@pytest.fixture(scope="module")
def events() -> pd.DataFrame:
    return pd.DataFrame(random_log(), columns=["user_id", "item_id", "timestamp"])


@pytest.mark.parametrize(
    ("allow", "deny"),
    [
        ([3, 7, 12], None),
        (None, [1, 2, 3]),
        ([3, 7, 12], [7]),
        ([4], None),
        (list(range(1, 16)), []),
        (None, range(1, 16)),
    ],
)
@pytest.mark.parametrize("filter_seen", ["none", "window"])
def test_lists_filter_the_whole_ranking(
    recommender: Recommender, events: Any, allow: Any, deny: Any, filter_seen: str
) -> None:
    """To the last digit, in `recommend` and in `rank`; fewer than k where fewer are left."""
    everything = recommender.recommend(events, NOW, ITEMS, filter_seen)
    kept = everything[everything["item_id"].isin(allow or range(1, 16)) & ~everything["item_id"].isin(list(deny or []))]
    expected = kept.groupby("user_id", sort=False).head(4)
    found = recommender.recommend(events, NOW, 4, filter_seen, allow=allow, deny=deny)
    for column in ("user_id", "item_id", "score"):
        assert found[column].tolist() == expected[column].tolist()
    assert found["rank"].tolist() == (expected.groupby("user_id", sort=False).cumcount() + 1).tolist()


def test_lists_of_every_kind(recommender: Recommender, events: Any) -> None:
    expected = recommender.recommend(events, NOW, allow=[3, 7])
    for allow in ({3, 7}, np.array([7, 3], np.int16), pd.Series([3, 7]), pl.Series([3, 7]), (x for x in (3, 7))):
        pd.testing.assert_frame_equal(recommender.recommend(events, NOW, allow=allow), expected)
    assert set(expected["item_id"]) == {3, 7}


def test_unknown_ids_of_lists_are_ignored_unless_nothing_is_left(plain: Recommender, events: Any) -> None:
    expected = plain.recommend(events, NOW, allow=[3, 7], deny=[7])
    pd.testing.assert_frame_equal(plain.recommend(events, NOW, allow=[3, 7, 99], deny=[7, -1]), expected)
    with pytest.raises(ValueError, match="none of the 2 items of allow is among the model's 15"):
        plain.recommend(events, NOW, allow=[98, 99])


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ({"allow": "37"}, "allow must be a list of item ids, got the text '37'"),
        ({"deny": ["3"]}, "deny must hold integers, as the item ids of the training data, got '3'"),
        ({"allow": [3.0]}, "allow must hold integers.* got 3.0"),
        ({"allow": [True]}, "allow must hold integers.* got True"),
    ],
)
def test_ids_of_another_type_are_refused(plain: Recommender, events: Any, lists: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain.recommend(events, NOW, **lists)


@pytest.mark.parametrize("items", [[0], [16], [-1, 3], [1.5], [[1]], ["3"]])
def test_dense_ids_outside_the_catalogue_are_refused(plain: Recommender, items: Any) -> None:
    histories = Histories(np.array([1, 2]), START + np.arange(2), np.array([0, 2]))
    for name in ("allow", "deny"):
        with pytest.raises(ValueError, match=f"{name} must"):
            plain.rank(histories, np.array([NOW]), **{name: items})


def strangers(events: Any, *users: str) -> Any:
    """The events, in between users with unknown items only."""
    new = pd.DataFrame({"user_id": users, "item_id": 99, "timestamp": START + 5})
    return pd.concat([new.head(1), events, new.iloc[1:]]).astype({"user_id": str})


def test_users_without_a_known_item_are_answered_from_counts(recommender: Recommender, events: Any) -> None:
    table = strangers(events, "x", "y", "z")
    with pytest.raises(ValueError, match=r"user 'x' has no event with a known item.*on_unknown='counts'"):
        recommender.recommend(table, NOW, unknown_items="drop")
    found = recommender.recommend(table, NOW, 4, on_unknown="counts")
    assert list(found.columns) == ["user_id", "item_id", "score", "rank", "source"]
    assert found["user_id"].unique().tolist() == table["user_id"].unique().tolist()
    is_new = found["user_id"].isin(["x", "y", "z"])
    assert set(found[is_new]["source"]) == {"counts"} and set(found[~is_new]["source"]) == {"model"}
    known = recommender.recommend(events.astype({"user_id": str}), NOW, 4)
    pd.testing.assert_frame_equal(found[~is_new].drop(columns="source").reset_index(drop=True), known)
    lists = found[is_new].groupby("user_id")["item_id"].apply(list)
    assert lists["x"] == lists["y"] == lists["z"] and len(lists["x"]) == 4
    only = recommender.recommend(table[table["user_id"].isin(["x", "z"])], NOW, 4, on_unknown="counts")
    assert only["item_id"].tolist() == lists["x"] * 2 and set(only["source"]) == {"counts"}


def test_counts_are_those_of_training(plain: Recommender, data: Sequences, events: Any) -> None:
    """Without a pulse: the items chosen most often, equal ones in order of id; lists hold here too."""
    counts = np.bincount(data.items[data.first_events(data.train_end)].numpy(), minlength=ITEMS + 1)[1:]
    assert plain.catalogue.item_counts is not None and plain.catalogue.item_counts.tolist() == counts.tolist()
    ids = plain.catalogue.item_ids.to_list()
    expected = [ids[place] for place in np.argsort(-counts, kind="stable").tolist()]
    table = strangers(events, "x")
    found = plain.recommend(table, NOW, ITEMS, on_unknown="counts")
    assert found[found["user_id"] == "x"]["item_id"].tolist() == expected
    found = plain.recommend(table, NOW, 2, on_unknown="counts", deny=expected[:3])
    assert found[found["user_id"] == "x"]["item_id"].tolist() == expected[3:5]


def test_counts_of_a_pulse_are_live(data: Sequences, plain: Recommender, events: Any) -> None:
    served = with_pulse(data, plain.catalogue)
    assert served.model.pulse is not None
    served.model.pulse.get_buffer("everybody")[0].fill_(1.0)
    table = strangers(events, "x").query("user_id == 'x'")
    last = served.recommend(table, NOW, ITEMS, on_unknown="counts")["item_id"].tolist()[-1]
    served.observe(pd.DataFrame({"user_id": range(500), "item_id": last, "timestamp": NOW - 60}))
    assert served.recommend(table, NOW, 1, on_unknown="counts")["item_id"].tolist() == [last]


def test_a_run_without_counts_says_so(plain: Recommender, events: Any, tmp_path: Path) -> None:
    older = Recommender(plain.model, Catalogue(plain.catalogue.item_ids, None), "cpu")
    with pytest.raises(ValueError, match="this model keeps no counts"):
        older.recommend(strangers(events, "x"), NOW, on_unknown="counts")
    older.recommend(events, NOW, on_unknown="counts")  # nobody needs them
