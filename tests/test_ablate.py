"""`trope ablate`: the paper's rows are what the paper says, ours are one change each, and the report shows both."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from finished_runs import finish
from training import SIZE, tiny_data
from typer.testing import CliRunner, Result

from trope.cli import main as cli
from trope.config import Config
from trope.data.sequences import Sequences
from trope.experiments.ablation import FULL, ROWS, select, variants
from trope.experiments.pool import Run
from trope.models.recommender import SequentialRecommender
from trope.settings import preset

PAPER = [
    "T-RoPE", "- Non-Stationary", "- shifted", "- multiscale freq. bank", "- abs. time embedding (HSTU + Time RAB)",
    "- Shifted Query RoPE", "- Key RoPE", "- Time RAB",
]  # fmt: skip
BY_NAME = {row.variant.name: row for row in ROWS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("ablate"), "holdout")


def config_of(name: str) -> Config:
    return preset(BY_NAME[name].variant.model, BY_NAME[name].variant.settings)


def changes(name: str) -> dict[str, object]:
    """What a row's config has other than the full model's."""
    full, ours = asdict(config_of(FULL)), asdict(config_of(name))
    return {f"{g}.{f}": v for g, fields in ours.items() for f, v in fields.items() if v != full[g][f]}


def ablate(data: Path, out: Path, *more: object) -> Result:
    chosen = [part for setting in SIZE for part in ("--set", setting)]
    line = ["ablate", data, "--out", out, "--device", "cpu", "--resamples", 200, *chosen, *more]
    return CliRunner(env={"COLUMNS": "140"}).invoke(cli.app, list(map(str, line)), catch_exceptions=False)


def test_the_papers_rows_are_cumulative_then_single() -> None:
    assert [row.label for row in ROWS if row.table == "paper"] == PAPER
    off = {"rotary.conjugate": False}
    assert config_of(FULL) == preset("hstu-trope", ["rotary.readout=0"]) and changes("minus-nonstationary") == off
    assert changes("minus-shifted") == (off := off | {"rotary.shifted": False})
    assert changes("minus-multiscale") == off | {"rotary.multiscale": False}
    assert config_of("minus-time") == preset("hstu-time")
    assert changes("minus-time") == {"rotary.kind": "none", "model.gate_floor": None}
    assert changes("no-shifted-query") == {"rotary.shifted": False}
    assert changes("no-key") == {"rotary.rotate_key": False}
    assert changes("no-time-rab") == {"model.time_bias": False} and config_of("no-time-rab").model.position_bias


def test_ours_are_one_change_each() -> None:
    assert changes("fp32") == {"rotary.phase": "fp32"}
    assert changes("paper-conditioning") == {"rotary.conditioning": "paper"}
    assert changes("no-floor") == {"model.gate_floor": None} and changes("time-floor") == {"rotary.kind": "none"}
    assert changes("printed") == changes("fp32") | changes("paper-conditioning") | changes("no-floor")
    assert changes("shared") == {"rotary.share_alpha": True}
    assert changes("shared-stationary") == changes("shared") | changes("minus-nonstationary")
    assert changes("frozen") == {"rotary.learnable": False} and changes("calendar") == {"rotary.bank": "calendar"}
    assert changes("no-query") == {"rotary.rotate_query": False}
    assert changes("torope") == {"rotary.kind": "torope", "model.gate_floor": None}
    assert changes("torope-floor") == {"rotary.kind": "torope"}
    assert changes("torope-no-rab") == changes("torope-no-time-rab") | {"model.position_bias": False}


def test_the_readouts_rows_turn_the_output() -> None:
    assert config_of("default") == preset("hstu-trope") and changes("default") == {"rotary.readout": "auto"}
    assert config_of("readout-alone") == preset("hstu-time", ["rotary.readout=auto"])
    assert config_of("readout-no-time") == preset("hstu", ["rotary.readout=auto"])
    assert changes("readout-no-key") == changes("default") | changes("no-key")
    for row in ROWS:
        assert (config_of(row.variant.name).readout_share > 0) == (row.table == "readout")


def test_no_two_rows_are_the_same_and_each_makes_a_model() -> None:
    configs = [preset(each.model, each.settings) for each in variants(ROWS, SIZE)]
    assert len({json.dumps(asdict(config)) for config in configs}) == len(ROWS) == 29
    for config in configs:
        assert SequentialRecommender(config, 10, (1_600_000_000, 1_600_100_000)).config.model.width == 8


def test_rows_are_chosen_by_table_or_name_and_always_with_the_full_model() -> None:
    assert [row.variant.name for row in select("no-key, fp32")] == [FULL, "no-key", "fp32"]
    assert (
        len(select("paper")) == 8
        and len(select("ours")) == 16
        and len(select("ours,readout")) == 22
        and select(None) == list(ROWS)
    )
    with pytest.raises(ValueError, match="no such row: tpyo; there are paper, ours, readout, full"):
        select("tpyo")
    with pytest.raises(ValueError, match="a row besides full"):
        select("full")


def test_the_report_has_both_tables_with_relative_changes(data: Sequences, tmp_path: Path) -> None:
    out, place = tmp_path / "runs", {name: 10 + row for row, name in enumerate(BY_NAME)}
    place[FULL], place["no-key"] = 1, 0  # the best, of which the report must not be ashamed

    def better(run: Run, count: int) -> np.ndarray:
        return place[run.variant.name] + np.random.default_rng(run.seed).integers(0, 2, count)

    finish(data, variants(ROWS, SIZE), 2, out, better)
    result = ablate(data.path, out, "--seeds", 2, "--json", tmp_path / "all.json")
    assert result.exit_code == 0 and "58 finished before" in result.output, result.output
    assert " 7. - Key RoPE " in result.output and " TO-RoPE - all RAB " in result.output  # on the screen as well
    warned = "Warning: the baseline 'most popular' is better than 2. - Non-Stationary, 3. - shifted"
    assert warned in " ".join(result.output.split())  # the warnings of the report, with its labels
    text, html = (out / "report.md").read_text(), (out / "report.html").read_text()
    titles = ("The paper's rows", "Ours", "The readout by time")
    paper, ours, readout = (text.split(f"## {title}\n")[1].split("\n## ")[0] for title in titles)
    assert "| configuration" in paper and "Recall@50" in paper and "Recall@10 " not in paper
    for number, label in enumerate(PAPER):
        assert f"| {number + 1}. {label} " in paper and f"{number + 1}. {label}" in html
    for row in ROWS[8:]:
        assert f"| {row.label} " in (ours if row.table == "ours" else readout)
    lines = {line.split(" | ")[0].strip("| "): line for line in paper.splitlines() if line.startswith("|")}
    written = json.loads((tmp_path / "all.json").read_text())
    full, no_key = (written["systems"][name]["MRR"]["mean"] for name in (FULL, "no-key"))
    assert f"({100 * (no_key / full - 1):+.1f} %) \\*" in lines["7. - Key RoPE"] and "**" in lines["7. - Key RoPE"]
    assert "%" not in lines["1. T-RoPE"] and "-" in lines["4. - multiscale freq. bank"].split("(")[-1]
    assert "most popular" in paper and written["reference"] == FULL and written["rows"]["no-key"]["table"] == "paper"
    assert written["deviation_over_seeds"][FULL]["MRR"] > 0


def test_two_rows_are_trained_for_real_and_not_twice(data: Sequences, tmp_path: Path) -> None:
    arguments = (data.path, tmp_path / "runs", "--only", "no-key", "--jobs", 2, "--set", "train.epochs=1")
    result = ablate(*arguments)
    assert result.exit_code == 0 and "0 finished before" in result.output and "2/2" in result.output, result.output
    assert "rotate_key = false" in (tmp_path / "runs" / "no-key-seed0" / "config.toml").read_text()
    assert len((tmp_path / "runs" / "results.jsonl").read_text().splitlines()) == 2
    assert "## The paper's rows" in (tmp_path / "runs" / "report.md").read_text()
    assert "2 finished before" in ablate(*arguments).output


def test_without_the_full_model_there_is_no_ablation(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "command", lambda *_: [sys.executable, "-S", "-c", "raise SystemExit(4)"])
    with pytest.raises(ValueError, match="needs the full model and another row, but none could be trained"):
        ablate(data.path, tmp_path / "runs", "--only", "fp32")


def test_list_prints_the_rows_and_needs_no_data() -> None:
    said = CliRunner().invoke(cli.app, ["ablate", "--list"])
    assert said.exit_code == 0 and len(said.output.splitlines()) == len(ROWS)
    assert "paper   no-time-rab" in said.output and "model.time_bias=false" in said.output
