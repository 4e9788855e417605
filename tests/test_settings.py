"""Configs as text: what older versions saved, removed settings, and settings without effect."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trope.config import PRESETS, Config
from trope.models.recommender import SequentialRecommender
from trope.settings import from_dict, migrate, preset, read_saved_toml, read_toml, to_dict, to_toml, without_effect

SAVED = Path(__file__).parent / "saved_by_b687b81"  # by the last version with 65 settings, see its README.md
MODELS = ("sasrec", "sasrec-trope", "tisasrec", "hstu", "hstu-time", "hstu-torope", "hstu-trope")


def test_there_are_at_most_46_settings() -> None:
    assert sum(len(dataclasses.fields(getattr(Config(), group.name))) for group in dataclasses.fields(Config)) <= 46


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_older_code_saved_answers_the_same(name: str) -> None:
    expected = load_file(SAVED / "expected.safetensors")
    model = SequentialRecommender.from_pretrained(SAVED / name).eval()
    with torch.no_grad():
        found = model.encode_last(*(expected[part] for part in ("items", "times", "lengths", "t_now")))
    torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-6)


def test_saved_again_it_is_of_todays_format(tmp_path: Path) -> None:
    SequentialRecommender.from_pretrained(SAVED / "hstu-trope").save_pretrained(tmp_path / "m")
    described = json.loads((tmp_path / "m" / "config.json").read_text())
    assert described["format"] == "trope-model-2" and "stationary" not in described["config"]["rotary"]
    assert SequentialRecommender.from_pretrained(tmp_path / "m").config.model.width == 8


def test_an_older_model_that_no_longer_exists_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rotary\.stationary=0\.5 is no longer supported.*trope as of b687b81"):
        SequentialRecommender.from_pretrained(SAVED / "stationary")


def test_what_only_changed_the_training_matters_only_to_a_training() -> None:
    values = {"train": {"logq": True, "lr": 1e-3}, "rotary": {"blur": 0.1}, "eval": {"batch": 7}}
    assert migrate(values) == {"train": {"lr": 1e-3}, "rotary": {}, "eval": {}}
    with pytest.raises(ValueError, match=r"train\.logq=True is no longer supported"):
        migrate(values, training=True)
    assert migrate({"train": {"frequency_lr": 0.5, "lr": 0.5}}, training=True) == {"train": {"lr": 0.5}}
    with pytest.raises(ValueError, match=r"train\.frequency_lr=0\.001 is no longer supported, only 0\.5"):
        migrate({"train": {"frequency_lr": 0.001, "lr": 0.5}}, training=True)


@pytest.mark.parametrize(("group", "name", "word"), [
    ("rotary", "kind", "rope"), ("train", "loss", "ful"), ("train", "precision", "fp16"), ("model", "predicts", "next"),
    ("model", "gate_floor", "automatic"), ("eval", "filter_seen", "all"),
])  # fmt: skip
def test_a_word_that_is_no_choice_is_refused_in_python_too(group: str, name: str, word: str) -> None:
    """`rotary.kind="rope"` would be a model without an encoding, `train.precision="fp16"` a training in fp32."""
    changed = dataclasses.replace(getattr(Config(), group), **{name: word})
    with pytest.raises(ValueError, match=rf"{group}\.{name} must be one of .*, got '{word}'"):
        dataclasses.replace(Config(), **{group: changed})


def test_migration_changes_nothing_of_todays_configs(tmp_path: Path) -> None:
    for config in PRESETS.values():
        assert from_dict(migrate(to_dict(config), training=True)) == config
    (tmp_path / "config.toml").write_text(to_toml(PRESETS["hstu-trope"]) + "[rotary.stationary]\n")
    with pytest.raises(ValueError, match=r"config\.toml"):
        read_saved_toml(tmp_path / "config.toml")


def test_a_file_of_ones_own_is_not_migrated(tmp_path: Path) -> None:
    """Who writes a removed setting is told; only what was saved is forgiven."""
    (tmp_path / "own.toml").write_text("[rotary]\nblur = 0.0\n")
    with pytest.raises(ValueError, match=r"rotary\.blur was removed after b687b81; leave it out \(docs/tried\.md"):
        read_toml(tmp_path / "own.toml")


def test_a_damaged_old_config_is_a_line(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "hstu", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "config": {"model": 7}}))
    with pytest.raises(ValueError, match=r"config\.json: unknown config group 'model'"):
        SequentialRecommender.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize(("model", "setting", "reason"), [
    ("hstu-time", "rotary.shifted=false", "without a rotary encoding"),
    ("hstu-time", "rotary.learnable=false", "nothing learns frequencies"),
    ("hstu-torope", "rotary.phase=fp32", "it belongs to trope"),
    ("hstu-torope", "rotary.bank=calendar", "it belongs to trope"),
    ("sasrec", "model.gate_floor=1", "which has no gate"),
])  # fmt: skip
def test_a_setting_without_effect_is_named(model: str, setting: str, reason: str) -> None:
    config = preset(model, [setting])
    (said,) = without_effect(config, [setting])
    assert said.startswith(setting.partition("=")[0]) and reason in said


def test_settings_without_effect_beside_another() -> None:
    settings = ["rotary.rotate_key=false", "rotary.conjugate=false", "rotary.share_alpha=true"]
    assert len(list(without_effect(preset("hstu-trope", settings), settings))) == 2
    settings = ["train.loss=full", "train.negatives=5", "train.shared_negatives=true"]
    assert len(list(without_effect(preset("hstu", settings), settings))) == 2


@pytest.mark.parametrize(
    "setting", ["rotary.shifted=false", "rotary.readout=0.5", "train.lr=0.1", "model.gate_floor=1"]
)
def test_what_has_an_effect_is_not_named(setting: str) -> None:
    assert list(without_effect(preset("hstu-trope", [setting]), [setting])) == []


@pytest.mark.parametrize(("settings", "message"), [
    (["model.head_dim=127"], "needs an even model.head_dim, got 127"),
    (["rotary.rotate_query=false", "rotary.rotate_key=false"], "rotates neither query nor key"),
    (["rotary.bank=calendar", "rotary.multiscale=false"], "rotary.bank=calendar needs"),
    (["model.width=1000000000"], "model.width must lie between 1 and 65536"),
    (["train.seed=-1"], "train.seed must lie between 0"),
    (["model.block=tisasrec", "model.position_bias=false", "model.time_bias=false"], "has no rotary encoding"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_the_config(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("hstu-trope", settings)
