"""`trope recommend --all`: every user, streamed into a file that is whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from data_logs import START, prepared, random_log, write_parquet
from test_recommender import NOW, make_run
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.sequences import Sequences
from trope.serve import batch
from trope.serve.recommender import Recommender

MIDDLE = START + 300_000


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "USERS_OF_A_BATCH", 7)


@pytest.fixture(scope="module")
def log() -> list[Any]:
    """Text ids; u99 has no event before MIDDLE."""
    late = [("u99", f"item {n}", NOW - 100 + n) for n in range(1, 6)]
    return [(f"u{user:02}", f"item {item}", time) for user, item, time in random_log()] + late


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, log: list[Any]) -> Sequences:
    folder = tmp_path_factory.mktemp("shop")
    names = folder / "items.csv"
    names.write_text('item,name\nitem 1,Bread\nitem 2,"Milk, 1 l"\n')
    return prepared(write_parquet(folder / "log.parquet", log), folder / "data", items=names)


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)])


def expected(run: Path, log: list[Any], moment: int, k: int, filter_seen: str = "none") -> pd.DataFrame:
    """The same from `Recommender.recommend`, with the events strictly before the moment."""
    events = pd.DataFrame(log, columns=["user_id", "item_id", "timestamp"])
    events = events[events["timestamp"] < moment].sort_values("user_id", kind="stable")
    return Recommender.from_pretrained(run, "cpu").recommend(events, moment, k, filter_seen)


def test_every_user_is_written_at_every_moment(run: Path, log: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "recs.parquet"
    result = invoke(run, "--all", "--at", NOW, "--at", MIDDLE, "--at", NOW, "-k", 3, "--out", out)
    assert result.exit_code == 0, result.output
    found = pq.read_table(out).to_pandas()
    assert list(found.columns) == ["user_id", "moment", "rank", "item_id", "score", "name"]
    seconds = found["moment"].astype("int64") // 1000
    assert pd.unique(seconds).tolist() == [NOW, MIDDLE]
    for moment in (NOW, MIDDLE):
        part, wanted = found[seconds == moment], expected(run, log, moment, 3)
        for column in ("user_id", "rank", "item_id", "name"):
            assert part[column].tolist() == wanted[column].tolist()
        np.testing.assert_allclose(part["score"], wanted["score"], atol=1e-6)
    assert {"Milk, 1 l", "item 3"} <= set(found["name"])
    assert "u99" not in set(found[seconds == MIDDLE]["user_id"]) and "u99" in set(found["user_id"])
    assert "41 answers to 21 users" in result.output and "1 time a user had no event" in result.output


def test_an_event_at_the_moment_is_not_history(run: Path, data: Sequences, log: list[Any]) -> None:
    moment = sorted(time for user, _, time in log if user == "u07")[4]
    known, histories = batch.histories_before(data, torch.arange(data.num_users), moment)
    ids = data.ids("user_ids")
    assert ids is not None
    row = [ids[user] for user in known.tolist()].index("u07")
    assert np.diff(histories.offsets)[row] == 4 and (histories.times < moment).all()


def test_a_csv_file_says_the_same(run: Path, tmp_path: Path) -> None:
    for name in ("recs.csv", "recs.parquet"):
        result = invoke(run, "--all", "--at", NOW, "-k", 2, "--filter-seen", "history", "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    text, table = pd.read_csv(tmp_path / "recs.csv"), pq.read_table(tmp_path / "recs.parquet").to_pandas()
    assert (tmp_path / "recs.csv").read_text().count("+00:00") == 0
    text["moment"] = pd.to_datetime(text["moment"])
    for column in table.columns:
        if column == "score":
            np.testing.assert_allclose(text[column], table[column], rtol=1e-6)
        else:
            assert text[column].tolist() == table[column].tolist()


def test_integer_ids_stay_integers_and_names_are_left_out(tmp_path: Path) -> None:
    data = prepared(write_parquet(tmp_path / "log.parquet", random_log()), tmp_path / "data")
    result = invoke(make_run(data, tmp_path / "run"), "--all", "--at", NOW, "--out", tmp_path / "new" / "recs.parquet")
    assert result.exit_code == 0, result.output
    schema = pq.read_schema(tmp_path / "new" / "recs.parquet")
    assert [str(kind) for kind in schema.types] == ["int64", "timestamp[ms, tz=UTC]", "int32", "int64", "float"]


def test_a_broken_stream_leaves_no_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a new file nor a half-written one; an older one stays as it was."""
    out = tmp_path / "recs.parquet"
    out.write_bytes(b"older")
    real, calls = Recommender.rank, []

    def breaks(self: Recommender, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Recommender, "rank", breaks)
    assert invoke(run, "--all", "--at", NOW, "--out", out).exit_code != 0 and len(calls) == 2
    assert out.read_bytes() == b"older" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all", "--out", "x.parquet", "--user", "u01"], "--all recommends to every user; leave --user out"),
        (["--all"], "--all needs a file to write"),
        ([], "say to whom: --user ID, or --all with --out FILE"),
        (["--user", "u01", "--out", "x.parquet"], "--out belongs to --all"),
        (["--user", "u01", "--index", "faiss"], "--index belongs to --all"),
        (["--all", "--out", "x.json"], "must end with .parquet or .csv"),
        (["--all", "--out", "x.csv", "--index", "annoy"], "index must be one of 'faiss', got 'annoy'"),
        (["--all", "--out", "x.csv", "--at", "1500000000"], "no user has an event before the moment"),
    ],
)
def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    moment = [] if "--at" in arguments else ["--at", NOW]
    result = invoke(run, *moment, *arguments)
    assert isinstance(result.exception, ValueError) and said in str(result.exception)
    assert "\n" not in str(result.exception) and not list(tmp_path.iterdir())


def test_an_index_is_measured_and_its_recall_printed(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="the extra ann is not installed")
    for name, index in (("exact.csv", []), ("index.csv", ["--index", "faiss"])):
        result = invoke(run, "--all", "--at", NOW, "-k", 3, "--out", tmp_path / name, *index)
        assert result.exit_code == 0, result.output
    assert "1 of 1 lists searched: recall@3 1.0000 against exact ranking, over 10 users" in result.output
    exact, found = (pd.read_csv(tmp_path / name) for name in ("exact.csv", "index.csv"))
    assert found["item_id"].tolist() == exact["item_id"].tolist()


def test_several_moments_in_the_terminal(run: Path) -> None:
    result = invoke(run, "--user", "u07", "--at", NOW, "--at", NOW + 60)
    assert result.exit_code == 0 and result.output.count("user u07 at") == 2
