"""Serving: the same recommendations from every kind of table, for every way to write a moment, and clear refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_parquet
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.data.printable import printable
from trope.data.sequences import Sequences
from trope.models.recommender import SequentialRecommender
from trope.runs import open_run
from trope.serve.long_after import long_after
from trope.serve.recommender import Histories, Recommender
from trope.settings import preset
from trope.times import DAY, say_minute

NOW = START + 2_000_000
MAX_LEN = 8
TINY = [f"model.max_len={MAX_LEN}", "model.width=16", "model.heads=2", "model.head_dim=8", "model.blocks=1"]


def make_run(data: Sequences, run: Path) -> Path:
    """A run folder as training leaves it, with a model that has learned nothing."""
    torch.manual_seed(0)
    config = preset("hstu-trope", TINY)
    open_run(run, data, config, resume=False)
    SequentialRecommender(config, data.num_items, data.time_span).save_pretrained(run / "best")
    return run


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches for the few users here."""
    monkeypatch.setattr("trope.serve.recommender.USERS_AT_A_TIME", 3)


@pytest.fixture(scope="module")
def log() -> list[tuple[str, str, int]]:
    return [(f"u{user:02}", f"item {item}", time) for user, item, time in random_log()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, log: list[Any]) -> Sequences:
    folder = tmp_path_factory.mktemp("shop")
    return prepared(write_parquet(folder / "log.parquet", log), folder / "data")


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def recommender(run: Path) -> Recommender:
    return Recommender.from_pretrained(run, device="cpu")


@pytest.fixture(scope="module")
def events(log: list[Any]) -> pd.DataFrame:
    return pd.DataFrame(log, columns=["user_id", "item_id", "timestamp"])


def by_hand(recommender: Recommender, log: list[Any], user: str, t_now: int) -> list[tuple[str, float]]:
    """Every item of the catalogue with its score, best first, from the model itself."""
    ids = recommender.catalogue.item_ids.to_list()
    history = sorted((e for e in log if e[0] == user), key=lambda e: e[2])[-MAX_LEN:]
    items = torch.tensor([[ids.index(item) + 1 for _, item, _ in history]])
    times = torch.tensor([[time for *_, time in history]])
    with torch.inference_mode():
        model = recommender.model
        vector = model.encode_last(items, times, torch.tensor([len(history)]), torch.tensor([t_now]))
        scores = (vector @ model.item_vectors().T)[0, 1:].tolist()
    return sorted(zip(ids, scores, strict=True), key=lambda pair: -pair[1])


def test_recommendations_are_the_models_best_items(recommender: Recommender, log: list[Any], events: Any) -> None:
    """For every user, across batches, whatever the order of the rows."""
    shuffled = events.sample(frac=1, random_state=0).sort_values("timestamp", kind="stable")
    out = recommender.recommend(shuffled, t_now=NOW, k=4)
    assert list(out.columns) == ["user_id", "item_id", "score", "rank"]
    assert list(out["user_id"].unique()) == list(shuffled["user_id"].unique())
    for user, part in out.groupby("user_id"):
        expected = by_hand(recommender, log, user, NOW)[:4]
        assert list(part["item_id"]) == [item for item, _ in expected]
        assert part["score"].to_numpy() == pytest.approx([score for _, score in expected], abs=1e-6)
        assert list(part["rank"]) == [1, 2, 3, 4]


def test_the_same_kind_comes_back(recommender: Recommender, events: Any) -> None:
    expected = recommender.recommend(events, t_now=NOW).to_dict("list")
    polars = recommender.recommend(pl.DataFrame(events.to_dict("list")), t_now=NOW)
    arrow = recommender.recommend(pa.Table.from_pandas(events), t_now=NOW)
    assert isinstance(polars, pl.DataFrame) and polars.to_dict(as_series=False) == expected
    assert isinstance(arrow, pa.Table) and arrow.to_pydict() == expected


def test_an_empty_answer_has_the_types_of_any_other(recommender: Recommender, events: Any) -> None:
    everything = recommender.catalogue.originals(np.arange(1, len(recommender.catalogue) + 1))
    for table in (events, pl.DataFrame(events.to_dict("list")), pa.Table.from_pandas(events)):
        some, none = (recommender.recommend(table, NOW, deny=deny) for deny in (None, everything))
        assert len(none) == 0 and len(some)
        for kinds in ("dtypes", "schema"):
            assert str(getattr(some, kinds, "")) == str(getattr(none, kinds, ""))


def test_numbers_of_numpy_are_numbers(recommender: Recommender, events: Any) -> None:
    expected = recommender.recommend(events, NOW, k=2, within=60)
    found = recommender.recommend(events, np.int64(NOW), k=np.int64(2), within=np.int32(60))
    pd.testing.assert_frame_equal(found, expected)
    histories = Histories(np.array([1, 2]), START + np.arange(2), np.array([0, 2]))
    asked = [recommender.rank_moments(histories, np.array([[NOW]]), k) for k in (2, np.int64(2))]
    assert asked[0].items_BMK.tolist() == asked[1].items_BMK.tolist()


def test_user_ids_keep_their_type(recommender: Recommender, events: Any) -> None:
    numbered = pl.DataFrame(events.to_dict("list")).with_columns(
        pl.col("user_id").str.slice(1).cast(pl.Int16), pl.col("timestamp").cast(pl.Int32)
    )
    out = recommender.recommend(numbered, t_now=NOW, k=1)
    assert out.schema["user_id"] == pl.Int16
    categories = recommender.recommend(events.astype({"user_id": "category", "item_id": "category"}), t_now=NOW, k=1)
    assert categories["user_id"].dtype == "category"


def test_datetimes_are_seconds_and_decide_the_order_below_them(recommender: Recommender, events: Any) -> None:
    expected = recommender.recommend(events, t_now=NOW)
    times = pd.to_datetime(events["timestamp"], unit="s")
    utc = times.dt.tz_localize("UTC")
    zones = ("Asia/Tokyo", "America/New_York", "Etc/GMT+3", "UTC+02:00")
    for column in (times, utc, *(utc.dt.tz_convert(zone) for zone in zones)):
        pd.testing.assert_frame_equal(recommender.recommend(events.assign(timestamp=column), t_now=NOW), expected)
    # Two events of one second, told apart by their milliseconds.
    first, second = (pd.Timestamp(START, unit="s") + pd.Timedelta(milliseconds=ms) for ms in (100, 900))
    pair = pd.DataFrame({"user_id": 1, "item_id": ["item 1", "item 2"], "timestamp": [second, first]})
    whole = pd.DataFrame({"user_id": 1, "item_id": ["item 2", "item 1"], "timestamp": START})
    pd.testing.assert_frame_equal(recommender.recommend(pair, NOW), recommender.recommend(whole, NOW))


def test_a_moment_for_each_user(recommender: Recommender, log: list[Any], events: Any) -> None:
    moments = {user: NOW + 86_400 * place for place, user in enumerate(events["user_id"].unique())}
    out = recommender.recommend(events, t_now=moments, k=3)
    for user, part in out.groupby("user_id"):
        assert list(part["item_id"]) == [item for item, _ in by_hand(recommender, log, user, moments[user])[:3]]
    stamped = events.assign(asked=pd.to_datetime(events["user_id"].map(moments), unit="s", utc=True))
    pd.testing.assert_frame_equal(recommender.recommend(stamped, t_now="asked", k=3), out)
    del moments["u01"]
    with pytest.raises(ValueError, match="no moment for 1 of 20 users, the first is 'u01'"):
        recommender.recommend(events, t_now=moments)
    stamped.loc[stamped.index[stamped["user_id"] == "u02"][0], "asked"] += pd.Timedelta(days=1)
    with pytest.raises(ValueError, match=r"one value per user, got .* for user 'u02'"):
        recommender.recommend(stamped, t_now="asked")


def test_the_past_is_refused_unless_asked_for(recommender: Recommender, log: list[Any], events: Any) -> None:
    with pytest.raises(ValueError, match=r"t_now must not lie before a user's last event.*allow_past=True"):
        recommender.recommend(events, t_now=START + 10)
    out = recommender.recommend(events, t_now=START + 10, k=2, allow_past=True)
    expected = [item for item, _ in by_hand(recommender, log, "u03", START + 10)[:2]]
    assert list(out[out["user_id"] == "u03"]["item_id"]) == expected


@pytest.mark.parametrize("filter_seen", ["window", "history"])
def test_seen_items_are_left_out(recommender: Recommender, log: list[Any], events: Any, filter_seen: str) -> None:
    out = recommender.recommend(events, t_now=NOW, k=15, filter_seen=filter_seen)
    for user in events["user_id"].unique():
        history = sorted((e for e in log if e[0] == user), key=lambda e: e[2])
        seen = {item for _, item, _ in (history[-MAX_LEN:] if filter_seen == "window" else history)}
        expected = [item for item, _ in by_hand(recommender, log, user, NOW) if item not in seen]
        assert list(out[out["user_id"] == user]["item_id"]) == expected


def test_unknown_items_are_refused_or_dropped(recommender: Recommender, events: Any) -> None:
    expected = recommender.recommend(events, t_now=NOW)
    new = pd.DataFrame({"user_id": "u01", "item_id": ["lamp", "sofa"], "timestamp": START + 5})
    more = pd.concat([events, new])
    with pytest.raises(ValueError, match="2 rows with 2 items not among the model's 15: 'lamp', 'sofa'"):
        recommender.recommend(more, t_now=NOW)
    pd.testing.assert_frame_equal(recommender.recommend(more, t_now=NOW, unknown_items="drop"), expected)
    with pytest.raises(ValueError, match="user 'u99' has no event with a known item"):
        recommender.recommend(pd.concat([events, new.assign(user_id="u99")]), t_now=NOW, unknown_items="drop")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.rename(columns={"item_id": "sku"}), "must have a column 'item_id', got user_id, sku, timestamp"),
        (lambda e: e.assign(timestamp=e["timestamp"] * 1000), "looks like milliseconds"),
        (lambda e: e.assign(timestamp=0), "must be positive Unix seconds"),
        (lambda e: e.assign(timestamp=e["timestamp"] / 1), "whole Unix seconds or datetimes, got Float64"),
        (lambda e: e.assign(item_id=7), "item_id must be text"),
        (lambda e: e.assign(user_id=None), "rows without user_id; drop them"),
        (lambda e: e.head(0), "events is empty"),
        (lambda e: pl.LazyFrame(e.to_dict("list")), "got LazyFrame; collect it first"),
        (lambda e: e.to_numpy(), "or an Arrow table, got ndarray$"),
        (lambda e: pd.concat([e, e[["item_id"]]], axis=1), "two columns of one name"),
        (lambda e: pd.DataFrame(), "must have a column 'user_id', got none"),
        (lambda e: pa.table({**e, "timestamp": pa.array([b"2017"] * len(e), pa.binary(4))}), "datetimes, got Unknown"),
    ],
)
def test_bad_events(recommender: Recommender, events: Any, change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recommender.recommend(change(events), t_now=NOW)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"t_now": NOW * 1000}, "t_now must be Unix seconds.*looks like milliseconds"),
        ({"k": 0}, "k must be a whole number from 1, got 0"),
        ({"deny": 3}, "deny must be a list of item ids, got 3; put it into a list"),
        ({"filter_seen": "some"}, "filter_seen must be one of"),
        ({"unknown_items": "ignore"}, "unknown_items must be one of"),
    ],
)
def test_bad_arguments(recommender: Recommender, events: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recommender.recommend(events, **{"t_now": NOW, **arguments})


@pytest.mark.parametrize("offsets", [[0], [0, 2, 2]], ids=["nobody", "one without events"])
def test_a_history_has_an_event(recommender: Recommender, offsets: list[int]) -> None:
    events = np.arange(1, offsets[-1] + 1)
    histories = Histories(events, START + events, np.array(offsets))
    with pytest.raises(ValueError, match="there must be a history, and an event in each"):
        recommender.rank(histories, np.full(len(offsets) - 1, NOW))


@pytest.mark.parametrize("moments", [[NOW], [NOW] * 3, [[NOW] * 2], []], ids=str)
def test_every_history_needs_a_moment(recommender: Recommender, moments: Any) -> None:
    histories = Histories(np.array([1, 2, 3]), START + np.arange(3), np.array([0, 2, 3]))
    with pytest.raises(ValueError, match="one moment for each of 2 histories, got shape"):
        recommender.rank(histories, np.array(moments, np.int64))


def test_the_events_of_a_history_are_in_order(recommender: Recommender) -> None:
    histories = Histories(np.array([1, 2, 3]), START + np.array([5, 0, 1]), np.array([0, 1, 3]))
    recommender.rank(histories, np.array([NOW, NOW]))  # the second user's events may begin before the first's end
    histories = Histories(np.array([1, 2, 3]), START + np.array([5, 1, 0]), np.array([0, 1, 3]))
    with pytest.raises(ValueError, match=r"at place 1 of row 1; sort each sequence's events by time$"):
        recommender.rank(histories, np.array([NOW, NOW]))


@pytest.mark.parametrize(
    "change",
    [
        {"items": np.array([1, 2, 0])},
        {"items": np.array([1, -1, 2])},
        {"items": np.array([1, 100_000, 2])},
        {"items": np.array([1.0, 2.0, 3.0])},
        {"times": np.array([NOW, NOW, NOW], np.float64)},
        {"offsets": [0, 3]},
    ],
)
def test_a_history_of_something_else_is_refused(recommender: Recommender, change: dict[str, Any]) -> None:
    good = Histories(np.array([1, 2, 3]), np.array([NOW, NOW, NOW]), np.array([0, 3]))
    assert len(recommender.rank(good, np.array([NOW]), k=3).items) == 3
    said = "items must be 1 .. [0-9]+, got|must be a NumPy array of whole numbers, got (float64|list)"
    with pytest.raises(ValueError, match=said):
        recommender.rank(good._replace(**change), np.array([NOW]))
    with pytest.raises(ValueError, match=said):
        recommender.rank_moments(good._replace(**change), np.array([[NOW]]))


@pytest.mark.parametrize("dtype", ["uint32", "uint64", ">i8", "int32"])
def test_whole_numbers_of_any_width_are_taken(recommender: Recommender, dtype: str) -> None:
    """torch compares no unsigned numbers, in which columns of times often come."""
    arrays = np.array([1, 2, 3]), np.array([START, NOW, NOW]), np.array([0, 2, 3])
    histories, moments = Histories(*arrays), np.array([NOW, NOW])
    expected = recommender.rank(histories, moments, k=3), recommender.rank_moments(histories, moments[:, None], k=3)
    histories, moments = Histories(*(x.astype(dtype) for x in arrays)), moments.astype(dtype)
    found = recommender.rank(histories, moments, k=3), recommender.rank_moments(histories, moments[:, None], k=3)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert recommender.remember(histories) is not None


@pytest.mark.parametrize("items", [np.array([1, 2]), np.array([1, 2, 3, 4]), np.array([[1, 2, 3]])])
def test_each_event_has_an_item_and_a_time(recommender: Recommender, items: np.ndarray) -> None:
    histories = Histories(items, np.array([NOW, NOW, NOW]), np.array([0, 3]))
    said = re.escape(f"one item and one time for each event, got shapes {items.shape} and (3,)")
    with pytest.raises(ValueError, match=said):
        recommender.rank(histories, np.array([NOW]))
    with pytest.raises(ValueError, match=said):
        recommender.rank_moments(histories, np.array([[NOW]]))
    with pytest.raises(ValueError, match=said):
        recommender.remember(histories)


def test_a_diverged_model_is_refused(data: Sequences, run: Path) -> None:
    histories = Histories(np.array([1, 2]), START + np.arange(2), np.array([0, 2]))
    broken = Recommender.from_pretrained(run, device="cpu")
    for block in broken.model.blocks.parameters():
        block.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"outputs contain NaN or infinity.*train again"):
        broken.rank(histories, np.array([NOW]))
    broken.model.items.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="item vectors contain NaN"):
        Recommender(broken.model, broken.catalogue, "cpu")


def test_histories_of_a_dataset_end_before_the_moment(data: Sequences) -> None:
    users = torch.tensor([5, 0, 7])
    counts = data.count_before(users, torch.tensor([NOW, START + 900_000, START + 500_000]))
    histories = Histories.of(data, users, counts)
    assert np.diff(histories.offsets).tolist() == counts.tolist()
    for row, (user, count) in enumerate(zip(users.tolist(), counts.tolist(), strict=True)):
        own = slice(int(data.offsets[user]), int(data.offsets[user]) + count)
        part = slice(*histories.offsets[row : row + 2])
        assert histories.items[part].tolist() == data.items[own].tolist()
        assert histories.times[part].tolist() == data.times[own].tolist()


def test_integer_items(tmp_path: Path) -> None:
    data = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "data")
    recommender = Recommender.from_pretrained(make_run(data, tmp_path / "run"))
    events = pl.DataFrame(random_log(), schema=["user_id", "item_id", "timestamp"], orient="row")
    out = recommender.recommend(events, t_now=NOW)
    assert out.schema == {"user_id": pl.Int64, "item_id": pl.Int64, "score": pl.Float32, "rank": pl.Int64}
    with pytest.raises(ValueError, match="item_id must be integers"):
        recommender.recommend(events.cast({"item_id": pl.String}), t_now=NOW)


def test_an_id_is_found_by_its_exact_text() -> None:
    """int() would take all of these for 7, 10, 9 or -3."""
    ids = Ids(np.array([-3, 0, 7, 9, 10]))
    assert [ids.find(text) for text in ("-3", "0", "7", "9", "10", 10)] == [0, 1, 2, 3, 4, 4]
    for text in ("007", "1_0", "\uff19", "+7", " 7", "7\n", "7.0", "-0", "00", "\u0667", "--3", "", "1" * 5_000):
        assert ids.find(text) is None, text


def test_a_run_of_another_catalogue_is_refused(run: Path, recommender: Recommender, tmp_path: Path) -> None:
    smaller = prepared(write_parquet(tmp_path / "log.parquet", random_log(items=9)), tmp_path / "data")
    smaller.write_catalogue(tmp_path / "catalogue")
    with pytest.raises(ValueError, match="the catalogue has 9 items, the model 15"):
        Recommender(recommender.model, Catalogue.load(tmp_path / "catalogue"))
    (tmp_path / "catalogue" / "item_ids.npy").write_bytes(b"short")
    with pytest.raises(ValueError, match="truncated or from another dataset"):
        Catalogue.load(tmp_path / "catalogue")
    with pytest.raises(FileNotFoundError, match="run made by `trope train`"):
        Catalogue.load(tmp_path)


def test_the_command(run: Path, data: Sequences, recommender: Recommender, log: list[Any]) -> None:
    result = CliRunner().invoke(app, ["recommend", str(run), "--user", "u07", "--at", str(NOW), "-k", "3"])
    assert result.exit_code == 0, result.output
    for rank, (item, score) in enumerate(by_hand(recommender, log, "u07", NOW)[:3], start=1):
        assert any(line.split()[0] == str(rank) and item in line and f"{score:.4f}" in line
                   for line in result.output.splitlines() if line.strip())  # fmt: skip


def test_the_command_uses_events_up_to_the_moment(run: Path, log: list[Any]) -> None:
    times = sorted(time for user, _, time in log if user == "u07")
    result = CliRunner().invoke(app, ["recommend", str(run), "--user", "u07", "--at", str(times[4])])
    assert "from 5 events until" in " ".join(result.output.split())


def test_the_command_takes_a_date(run: Path) -> None:
    result = CliRunner().invoke(app, ["recommend", str(run), "--user", "u07", "--at", "2020-10-20"])
    assert "user u07 at 2020-10-20 00:00 UTC" in " ".join(result.output.split())


def test_the_command_shows_names_only_where_there_are_any(run: Path, tmp_path: Path) -> None:
    def header(folder: Path, user: str) -> list[str]:
        result = CliRunner().invoke(app, ["recommend", str(folder), "--user", user, "--at", str(NOW)])
        assert result.exit_code == 0, result.output
        return next(line.split() for line in result.output.splitlines() if line.split()[:1] == ["rank"])

    assert header(run, "u07") == ["rank", "item", "score"]
    rows = [(user, item, time) for user, item, time in random_log()]
    movies = "".join(f"{item}::Film {item} (1999)::Drama\n" for item in {item for _, item, _ in rows})
    (tmp_path / "movies.dat").write_text(movies, encoding="latin-1")
    (tmp_path / "ratings.dat").write_text("".join(f"{u}::{i}::5::{t}\n" for u, i, t in rows), encoding="latin-1")
    named = make_run(prepared("ml-1m", tmp_path / "data", raw=tmp_path), tmp_path / "run")
    assert header(named, "7") == ["rank", "item", "name", "score"]


def test_the_command_takes_several_users(run: Path, recommender: Recommender, log: list[Any]) -> None:
    command = ["recommend", str(run), "--at", str(NOW), "-k", "2", "--user", "u07", "--user", "u03", "--user", "u07"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    _, first, second = result.output.split("user u")
    for user, shown in (("u07", first), ("u03", second)):
        assert shown.startswith(user[1:])
        for item, score in by_hand(recommender, log, user, NOW)[:2]:
            assert item in shown and f"{score:.4f}" in shown
    result = CliRunner().invoke(app, [*command, "--user", "u99"])
    assert isinstance(result.exception, ValueError) and "has no user 'u99'" in str(result.exception)
    assert "rank" not in result.output


@pytest.mark.parametrize(
    "ids", [["[/bold]", "[red]x", ":smile:"], ["\x1b[2J\x1b]0;pwned\x07", "a\nb", "\u202etxt.exe"]]
)
def test_the_command_prints_ids_as_they_are(ids: list[str], tmp_path: Path) -> None:
    """Neither markup nor escape codes of an id, or of a user's, are obeyed."""
    log = [(f"[/b]{ids[0]}", ids[n % 3], START + n) for n in range(9)] + [
        ("u", ids[n % 3], START + n) for n in range(9)
    ]
    data = prepared(write_parquet(tmp_path / "log.parquet", log), tmp_path / "data", loose())
    run = make_run(data, tmp_path / "run")
    result = CliRunner().invoke(app, ["recommend", str(run), "--user", f"[/b]{ids[0]}", "--at", str(NOW)])
    assert result.exit_code == 0, result.exception
    assert not {"\x1b", "\x07", "\u202e"} & set(result.output)
    for shown in map(printable, [*ids, f"user [/b]{ids[0]} at"]):
        assert shown in result.output


def test_the_command_says_when_the_moment_is_long_after_the_training_data(run: Path, data: Sequences) -> None:
    first, last = data.time_span
    tenth = (last - first) // 10

    def said(moment: int) -> str:
        result = CliRunner().invoke(app, ["recommend", str(run), "--user", "u07", "--at", str(moment)])
        assert result.exit_code == 0, result.output
        return result.stderr

    assert said(last + tenth) == ""
    note = said(last + tenth + 60)
    assert note.count("\n") == 1 and "train again" in note
    assert say_minute(last + tenth + 60) in note and say_minute(last) in note


def test_long_after_is_a_tenth_of_the_span_and_at_most_60_days() -> None:
    assert long_after((START, START + 100 * DAY), START + 110 * DAY) is None
    assert "10 days after" in str(long_after((START, START + 100 * DAY), START + 110 * DAY + 1))
    years = (START, START + 5_000 * DAY)
    assert long_after(years, years[1] + 60 * DAY) is None and long_after(years, years[1] + 60 * DAY + 1) is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_that_would_hang_is_refused(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """torch's threads do not survive a fork. One thread alone needs no others: the child may rank then."""
    histories = Histories(np.array([1, 2]), START + np.arange(2), np.array([0, 2]))
    expected = recommender.rank(histories, np.array([NOW])).items.tolist()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing may return into pytest
        said = []
        for ask in (
            lambda: recommender.rank(histories, np.array([NOW])).items.tolist(),
            lambda: len(Recommender(recommender.model, recommender.catalogue, "cpu").catalogue),
        ):
            try:
                said.append(str(ask()))
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writing, "|".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answers = pipe.read().split("|")
    os.waitpid(child, 0)
    if threads == 1:
        assert answers == [str(expected), str(len(recommender.catalogue))]
    else:
        refusal = r"ValueError: .* forked .* would hang; start workers with spawn.*torch\.set_num_threads\(1\)"
        assert all(re.match(refusal, answer) for answer in answers), answers


def test_the_pages_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    data = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "data")
    make_run(data, tmp_path / "runs" / "clicks")
    found: dict[str, Any] = {}
    exec(compile(snippets[0], "serving.md", "exec"), found)
    top = found["top"].copy()
    for snippet in snippets[1:]:
        exec(compile(snippet, "serving.md", "exec"), found)
    # The page asks the same in three ways.
    ranking, items = found["ranking"], found["recommender"].catalogue.originals
    assert items(ranking.items) == list(top["item_id"]) and ranking.rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert items(found["year"].items_BMK[0, 0]) == list(top["item_id"][:3])
    assert not {3, 7} & set(found["top"]["item_id"][:3])


def test_the_commands_errors(run: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        command = [sys.executable, "-m", "trope", "recommend", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
        return done.stderr

    assert "has no user 'u99' among its 20" in said(run, "--user", "u99", "--at", NOW)
    other = tmp_path / "other"
    prepared(write_parquet(tmp_path / "log.parquet", random_log()), other)
    assert "is not the dataset that" in said(run, "--user", "u07", "--at", NOW, "--data", other)
