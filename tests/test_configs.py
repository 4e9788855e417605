"""Every recipe in configs/: it loads, says what the paper, the docs and results/ say, and its commands are real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from data_logs import random_log, write_parquet

from trope.cli.main import app
from trope.experiments.recipes import Recipe, find, option
from trope.experiments.variants import choose, common_settings, settings_of_file
from trope.settings import from_dict, preset, read_toml, to_dict

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.toml"))
PAPER = {"ml-20m": 200, "amazon-books": 50, "pixel200k": 50, "pixel1m": 50, "pixel8m": 50}
MEASURED = {
    "globo-news", "amazon-grocery-5core-2014", "online-retail-ii", "complete-journey", "ml-1m", "calendar-shop",
}  # fmt: skip
COMMANDS = typer.main.get_command(app)


def reproduce(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trope.experiments.recipes", *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True)


def test_there_is_one_for_every_set_of_the_paper_and_of_ours() -> None:
    assert {file.stem for file in FILES} == set(PAPER) | MEASURED


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sets_have_the_papers_recipe(name: str) -> None:
    """Appendix D, Table 7 and the text under it."""
    config = read_toml(ROOT / "configs" / f"{name}.toml")
    model, train = config.model, config.train
    assert (model.width, model.blocks, model.heads, model.head_dim, model.time_buckets) == (512, 2, 4, 128, 128)
    assert (model.max_len, model.dropout, model.position_bias, model.time_bias) == (PAPER[name], 0.2, True, True)
    assert (train.lr, train.beta1, train.beta2, train.weight_decay, train.batch) == (1e-3, 0.9, 0.98, 1e-3, 128)
    assert (train.min_epochs, train.epochs, train.seed, train.negatives) == (10, 100, 42, 128)
    assert (train.loss, train.temperature, train.patience, train.factor) == ("sampled", 0.05, 10, 0.1)
    assert (config.rotary.kind, config.rotary.phase, config.rotary.conditioning) == ("trope", "fp32", "paper")
    (compared,) = [words for words in Recipe.read(ROOT / "configs" / f"{name}.toml").commands if words[0] == "compare"]
    six = {"sasrec", "tisasrec", "hstu", "hstu-time", "hstu-torope", "hstu-trope"}
    assert six <= set(option(compared, "--models").split(","))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_are_real_and_the_models_can_be_made(file: Path) -> None:
    recipe = Recipe.read(file)
    assert recipe.targets[0] == file.stem and recipe.commands[-1][0] == "compare"
    for name, *words in recipe.commands:
        assert not {"#", "\\"} & set(words)
        command = COMMANDS.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, list(words)).close()  # refuses unknown options and wrong values
    compared = recipe.comparing(file.stem)
    assert compared[1] == f"data/{file.stem}" and option(compared, "--out") == f"runs/{file.stem}"
    models = option(compared, "--models").split(",")
    assert len(choose(models, [], common_settings(file, []))) == len(models) >= 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_compare_takes_everything_but_rotary_and_seed_from_the_file(file: Path) -> None:
    config = preset("hstu-trope", settings_of_file(file))
    stated = to_dict(read_toml(file))
    model = {**stated["model"], "gate_floor": config.model.gate_floor}  # the preset's own
    expected = {**to_dict(config), "model": model, "eval": stated["eval"]}
    expected["train"] = {**stated["train"], "seed": config.train.seed}
    assert config == from_dict(expected) and config.rotary == preset("hstu-trope").rotary


@pytest.mark.parametrize(
    "target",
    [
        "ml-1m", "ml-1m-strict", "globo-news", "globo-news-holdout", "amazon-grocery-5core-2014",
        "amazon-grocery-5core-2014-holdout",
        "online-retail-ii", "online-retail-ii-holdout", "online-retail-ii-loo", "complete-journey",
        "complete-journey-holdout", "calendar-shop", "calendar-shop-none",
    ],
)  # fmt: skip
def test_what_was_measured_was_measured_with_this_recipe(target: str) -> None:
    measured = json.loads((ROOT / "results" / f"{target}.json").read_text())
    recipe = find(target, ROOT / "configs")
    common = recipe.settings(target)
    for model in ("hstu-time", "hstu-trope"):
        assert preset(model, common) == preset(model, measured["settings"])
    for run in map(json.loads, (ROOT / "results" / f"{target}.jsonl").read_text().splitlines()):
        settings = [*common, *run["settings"][len(measured["settings"]) :], f"train.seed={run['seed']}"]
        today = preset(run["model"], settings)
        assert from_dict(run["config"]).resolved == today.resolved, "measured with another preset than today's"
    prepares = {Path(option(words, "--out")).name: words for words in recipe.commands if words[0] == "prepare"}
    assert option(prepares[target], "--protocol") == measured["data"]["protocol"]["name"]


def test_a_tried_run_is_named_by_what_it_changes_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from tried import nearest

    common = [*find("globo-news-holdout", ROOT / "configs").settings("globo-news-holdout"), "train.seed=2"]
    assert "train.refit=true" in common
    for model, own in (("hstu-trope", ["rotary.blur=0.1"]), ("hstu-time", ["model.dropout=0.3", "train.clip=1"])):
        assert nearest(preset(model, [*common, *own]), "globo-news-holdout") == (model, own)
    (printed,) = choose(["hstu-trope-paper"], [], common)
    assert nearest(preset(printed.model, printed.settings), "globo-news-holdout") == ("hstu-trope-paper", [])
    assert nearest(preset("hstu", common), "globo-news") == ("hstu", ["train.refit=true"])


def test_the_docs_name_every_recipe_and_only_real_ones() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text()
    targets = [target for file in FILES for target in Recipe.read(file).targets]
    assert len(set(targets)) == len(targets)
    for target in targets:
        assert f"| {target} " in text
    assert set(re.findall(r"DATA=([\w-]+)", text)) <= set(targets)


def test_a_recipe_is_found_by_what_it_prepares() -> None:
    assert find("globo-news-holdout", ROOT / "configs").file.stem == "globo-news"
    with pytest.raises(ValueError, match=r"no recipe in .* makes 'netflix'; there are amazon-books"):
        find("netflix", ROOT / "configs")
    with pytest.raises(ValueError, match=r"data/pixel1m is not there; say with SOURCE=.*trope prepare pixel1m --raw"):
        find("pixel1m", ROOT / "configs").making("pixel1m", None)
    made = find("calendar-shop-none", ROOT / "configs").making("calendar-shop-none", None)
    assert [words[0] for words in made] == ["generate", "prepare"] and "--no-yearly" in made[0]
    made = find("calendar-shop-holdout", ROOT / "configs").making("calendar-shop-holdout", None)
    assert option(made[0], "--out") == "data/calendar-shop.parquet" == made[1][1] and len(made) == 2


def test_a_recipe_runs_from_raw_events_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=400, users=30, items=20))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "shop.toml").write_text(
        "# trope prepare SOURCE --min-user 1 --min-item 1 \\\n#   --protocol loo-strict --out data/shop\n"
        "# trope compare data/shop --config configs/shop.toml --models hstu,sasrec --out runs/shop --resamples 50\n"
        "[model]\nwidth = 8\nheads = 2\nhead_dim = 4\nmax_len = 8\nblocks = 1\n[train]\nepochs = 2\nnegatives = 4\n"
    )
    missing = reproduce(tmp_path, "shop")
    assert missing.returncode == 2 and missing.stderr.startswith("trope: data/shop is not there; say with SOURCE=")
    ran = reproduce(tmp_path, "shop", "--source", log, "--jobs", 2, "--set", "train.epochs=1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "$ trope prepare" in ran.stdout and (tmp_path / "runs" / "shop" / "report.html").is_file()
    lines = [json.loads(line) for line in (tmp_path / "runs" / "shop" / "results.jsonl").read_text().splitlines()]
    assert [line["epochs"] for line in lines] == [1, 1] and "model.width=8" in lines[0]["settings"]
    dry = reproduce(tmp_path, "shop", "--dry").stdout
    assert "prepare" not in dry and "compare data/shop" in dry  # it is prepared, and nothing was run


def test_make_hands_everything_on() -> None:
    line = ["make", "-n", "reproduce", "DATA=ml-1m", "SOURCE=x.csv", "JOBS=3", "SEEDS=2", "SET=a.b=1 c.d=2"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = "-m trope.experiments.recipes ml-1m --source x.csv --jobs 3 --seeds 2 --set a.b=1 --set c.d=2"
    assert wanted in " ".join(said.replace("\\\n", " ").split())
