"""Every recipe in configs/ says what the paper, the docs and results/ say; `trope reproduce` runs it, anywhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main
from data_logs import random_log, write_parquet

from trope.cli.main import app
from trope.cli.train import resolve_config
from trope.experiments import recipes
from trope.experiments.config_file import common_settings, read_tables, settings_of_file
from trope.experiments.recipes import Recipe, find, recipe_files
from trope.experiments.variants import choose, configure
from trope.settings import from_dict, migrate, preset, to_dict

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))
PAPER = {"ml-20m": 200, "amazon-books": 50, "pixel200k": 50, "pixel1m": 50, "pixel8m": 50}
MEASURED = {
    "globo-news", "amazon-grocery-5core-2014", "online-retail-ii", "complete-journey", "ml-1m", "ml-1m-large",
    "calendar-shop",
}  # fmt: skip
COMMANDS = typer.main.get_command(app)
SHOP = """
[[recipe.prepare]]
name = "shop"
protocol = "loo-strict"
source = "SOURCE"
arguments = ["--min-user", "1", "--min-item", "1"]
[recipe.compare]
models = ["hstu", "sasrec"]
seeds = 1
[model]
width = 8
heads = 2
head_dim = 4
max_len = 8
blocks = 1
[train]
epochs = 2
negatives = 4
"""


def reproduce(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "trope", "reproduce", *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_there_is_one_for_every_set_of_the_paper_and_of_ours() -> None:
    assert {file.stem for file in FILES} == set(PAPER) | MEASURED


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_sets_have_the_papers_recipe(name: str) -> None:
    """Appendix D, Table 7 and the text under it."""
    recipe = find(name, CONFIGS)
    config = configure("hstu-trope-paper", recipe.settings(name))
    model, train = config.model, config.train
    assert (model.width, model.blocks, model.heads, model.head_dim) == (512, 2, 4, 128)
    assert (model.max_len, model.dropout, model.position_bias, model.time_bias) == (PAPER[name], 0.2, True, True)
    assert (train.lr, train.weight_decay, train.batch) == (1e-3, 1e-3, 128)
    assert (train.epochs, train.seed, train.negatives) == (100, 42, 128)
    assert (train.loss, train.temperature, train.patience) == ("sampled", 0.05, 10)
    assert (config.rotary.kind, config.rotary.phase, config.rotary.conditioning) == ("trope", "fp32", "paper")
    assert config.eval.filter_seen == "window" and config.readout_share == 0 and model.gate_floor is None
    six = {"sasrec", "tisasrec", "hstu", "hstu-time", "hstu-torope", "hstu-trope"}
    assert six < set(recipe.compare.models) and recipe.compare.seeds == 1
    assert [each.protocol for each in recipe.prepare] == ["loo-paper", "loo-strict"]
    assert all(each.arguments == ["--raw", "SOURCE"] for each in recipe.prepare)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_are_real_and_the_models_can_be_made(file: Path) -> None:
    recipe = Recipe.read(file)
    assert recipe.targets[0] == file.stem
    for target in recipe.targets:
        compared = recipe.comparison_command(target, ["--jobs", "2"])
        for name, *words in [*recipe.commands_for_data(target, "events.parquet"), compared]:
            command = COMMANDS.commands[name]  # type: ignore[attr-defined]
            command.make_context(name, list(words)).close()  # refuses unknown options and wrong values
        assert compared[1] == f"data/{target}" and f"runs/{target}" in compared and str(file) in compared
        models, variants = recipe.compare.models, recipe.compare.variants
        assert len(choose(models, variants, recipe.settings(target))) == len(models) + len(variants) >= 2
        from_command = [word for before, word in pairwise(compared) if before == "--set"]
        assert recipe.settings(target) == [*common_settings(file, from_command)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_compare_takes_every_setting_of_the_file(file: Path) -> None:
    tables, recipe = read_tables(file)
    config, own = to_dict(preset("hstu-trope", settings_of_file(file))), to_dict(preset("hstu-trope"))
    assert recipe is not None and set(tables) == {"model", "train", "eval"}
    for group, entries in config.items():
        assert entries == {**own[group], **tables.get(group, {})}


def test_what_a_comparison_would_ignore_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", '[model]\nwidth = 8\ntime_bias = false\n[rotary]\nkind = "trope"\n')
    words = (
        r"c.toml states model.time_bias, rotary.kind, which would be ignored.*Remove them from the file.*"
        r"--variant NAME=MODEL,model.time_bias=false; `trope train --config`"
    )
    with pytest.raises(ValueError, match=words):
        settings_of_file(file)
    for stated in ("block = 'hstu'", "gate_floor = 'auto'", "position_bias = true"):
        with pytest.raises(ValueError, match=f"states model.{stated.split()[0]}, which would be ignored"):
            settings_of_file(write(tmp_path / "c.toml", f"[model]\n{stated}\n"))
    with pytest.raises(ValueError, match=r"states train.seed, which would be ignored: --seeds N trains"):
        settings_of_file(write(tmp_path / "c.toml", "[train]\nseed = 5\n"))


def test_a_file_of_sizes_is_a_base_for_a_model_and_without_one_its_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[model]\nwidth = 64\nblocks = 3\n[train]\nseed = 5\nrefit = true\n"
    file, stated = write(tmp_path / "c.toml", text), ["model.width=64", "model.blocks=3", "train.seed=5"]
    expected = configure("trope", [*stated, "train.refit=true", "model.heads=2"])
    assert resolve_config("trope", file, ["model.heads=2"], None) == expected and expected.model.pulse
    assert not capsys.readouterr().err
    assert resolve_config(None, file, [], None) == preset("hstu-time", [*stated, "train.refit=true"])
    named = capsys.readouterr().err
    assert named == f"trope: model: hstu-time ({file} has no [rotary]); add --model trope for the recommended one\n"
    resolve_config(None, file, ["model.time_bias=false"], None)
    assert "model: hstu (" in capsys.readouterr().err
    for settings in (["rotary.kind=trope"], ["model.pulse=true"]):  # --set names the model
        resolve_config(None, file, settings, None)
        assert not capsys.readouterr().err
    own = write(tmp_path / "own.toml", "[model]\npulse = true\n")
    with pytest.raises(ValueError, match=r"so --model hstu would be ignored: it states model\.pulse;"):
        resolve_config("hstu", own, [], None)


def test_train_takes_a_recipe_for_a_model_and_any_other_file_as_it_stands(tmp_path: Path) -> None:
    recipe, seed = CONFIGS / "ml-1m.toml", ["train.seed=3"]
    settings = [*find("ml-1m", CONFIGS).settings("ml-1m"), *seed]
    assert resolve_config(None, recipe, seed, None) == configure("trope", settings)
    assert resolve_config("hstu-trope-paper", recipe, seed, None) == configure("hstu-trope-paper", settings)
    whole = write(tmp_path / "c.toml", '[rotary]\nkind = "torope"\n')
    assert resolve_config(None, whole, ["model.blocks=3"], None) == preset("hstu-torope", ["model.blocks=3"])
    with pytest.raises(ValueError, match=r"is a whole config, so --model hstu would be ignored: it states \[rotary\];"):
        resolve_config("hstu", whole, [], None)
    with pytest.raises(FileNotFoundError, match="there is no config file"):
        resolve_config(None, tmp_path / "none.toml", [], None)


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
    recipe = find(target, CONFIGS)
    common = recipe.settings(target)
    then = [setting for setting in measured["settings"] if not setting.startswith("train.min_epochs=")]  # gone since
    for model in ("hstu-time", "hstu-trope"):
        assert preset(model, common) == preset(model, then)
    checked = set()
    for run in map(json.loads, (ROOT / "results" / f"{target}.jsonl").read_text().splitlines()):
        if run["name"] not in recipe.compare.models:
            continue  # a variant that was measured besides, with a setting that trope no longer has
        own = run["settings"][len(measured["settings"]) :]
        today = preset(run["model"], [*common, *own, f"train.seed={run['seed']}"])
        recorded = from_dict(migrate(run["config"], training=True))
        assert recorded.resolved == today.resolved, "measured with another preset than today's"
        checked.add(run["name"])
    assert {"hstu-time", "hstu-trope"} <= checked
    assert recipe.dataset(target).protocol == measured["data"]["protocol"]["name"]


def test_a_tried_run_is_named_by_what_it_changes_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from tried import nearest

    common = [*find("globo-news-holdout", CONFIGS).settings("globo-news-holdout"), "train.seed=2"]
    assert "train.refit=true" in common
    for model, own in (("hstu-trope", ["rotary.bank=calendar"]), ("hstu-time", ["model.dropout=0.3", "train.clip=1"])):
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
    named = set(re.findall(r"DATA=([\w-]+)", text)) | set(re.findall(r"trope reproduce ([a-z][\w-]+)", text))
    assert len(named) >= 4 and named <= set(targets)


def test_a_recipe_is_found_by_what_it_prepares() -> None:
    assert find("globo-news-holdout", CONFIGS).file.stem == "globo-news"
    with pytest.raises(ValueError, match=r"no recipe in .*configs prepares 'netflix'; there are amazon-books"):
        find("netflix", CONFIGS)
    with pytest.raises(ValueError, match=r"data/pixel1m is not there; name its raw .*--source.*trope prepare pixel1m"):
        find("pixel1m", CONFIGS).commands_for_data("pixel1m", None)
    generated, prepared = find("calendar-shop-none", CONFIGS).commands_for_data("calendar-shop-none", None)
    assert (generated[0], prepared[0]) == ("generate", "prepare") and "--no-yearly" in generated
    generated, prepared = find("calendar-shop-holdout", CONFIGS).commands_for_data("calendar-shop-holdout", None)
    assert generated[-1] == "data/calendar-shop.parquet" == prepared[1] and "--yearly" in generated


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("protocol", "protocoll"), r"recipe.prepare has unknown names: protocoll; it may have arguments, generated"),
        (('name = "shop"\n', ""), r"recipe.prepare needs name, got protocol, source, arguments"),
        (("seeds = 1", "seeds = '1'"), r"recipe.compare.seeds must be a whole number, got '1'"),
        (('source = "SOURCE"', 'generated = "shop"'), r"'shop': there is no generate table named 'shop'"),
        (('source = "SOURCE"', ""), r"'shop' needs either a source or generated, and not both"),
        (("[[recipe.prepare]]", "[recipe.prepare]"), r"recipe.prepare must be an array of tables; write \[\[recipe"),
        (("[model]", "[recipe.settings]\nholdout = []\n[model]"), r"recipe.settings has unknown names: holdout"),
        (("[model]", "[recipe.settings]\nloo-strict = 'a'\n[model]"), r"settings.loo-strict must be a list"),
        ((SHOP, "[model]\nwidth = 8\n"), r"shop.toml has no \[recipe\] table"),
        ((SHOP, "[recipe]\n[recipe.compare]\nmodels = []\nseeds = 1"), r"recipe prepares nothing; it needs a \[\["),
        ((SHOP, "recipe = 3"), r"recipe must be a table, got 3; write \[recipe\]"),
        ((SHOP, "recipe ="), r"shop.toml is not TOML"),
        ((SHOP, "a = " + "[" * 5_000), r"shop.toml is not TOML"),
        ((SHOP, "a = " + "1" * 5_000), r"shop.toml is not TOML"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert change[0] in SHOP
    with pytest.raises(ValueError, match=words):
        Recipe.read(write(tmp_path / "shop.toml", SHOP.replace(*change)))


def test_recipes_of_ones_own_come_first_then_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a wheel, outside a checkout: the package holds a copy of configs/."""
    shipped = tmp_path / "package"
    write(shipped / "shop.toml", SHOP.replace("seeds = 1", "seeds = 7"))
    write(shipped / "other.toml", SHOP.replace('"shop"', '"other"'))
    monkeypatch.setattr(recipes, "SHIPPED", shipped)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert find("shop").compare.seeds == 7 and find("other").file == shipped / "other.toml"
    write(work / "configs" / "mine.toml", SHOP)
    write(work / "configs" / "plain.toml", "[model]\nwidth = 8\n")
    assert find("shop").compare.seeds == 1 and find("shop").comparison_command("shop")[3] == "configs/mine.toml"
    with pytest.raises(
        ValueError, match=r"no recipe in ./configs or in the package prepares 'x'; there are shop, other$"
    ):
        find("x")


def test_without_a_wheels_copy_the_checkouts_recipes_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [file.name for file in recipe_files()] == [file.name for file in FILES]
    monkeypatch.chdir(ROOT)
    assert recipe_files() == [file.relative_to(ROOT) for file in FILES], "each once, by the shorter path"


def test_a_wheel_holds_the_recipes_where_they_are_looked_for() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert ROOT / build["force-include"]["configs"] == recipes.SHIPPED


def test_a_recipe_runs_from_raw_events_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = write_parquet(tmp_path / "log.parquet", random_log(rows=400, users=30, items=20))
    write(tmp_path / "configs" / "shop.toml", SHOP)
    missing = reproduce(tmp_path, "shop")
    assert missing.returncode == 2 and missing.stderr.startswith("trope: data/shop is not there; name its raw events")
    commands = reproduce(tmp_path, "shop", "--dry", "--seeds", 4)
    assert commands.returncode == 0 and "$ trope prepare SOURCE " in commands.stdout
    assert commands.stdout.count("--seeds") == 1 and "--seeds 4" in commands.stdout
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
    wanted = "-m trope reproduce ml-1m --source x.csv --jobs 3 --seeds 2 --set a.b=1 --set c.d=2"
    assert wanted in " ".join(said.replace("\\\n", " ").split())
