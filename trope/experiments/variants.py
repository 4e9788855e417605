"""What a command line asks to be trained: models by name, own variants, a config file as their common base.

How a file and a preset merge: the preset decides what makes a model that model (`model.block`, `model.position_bias`,
`model.time_bias`, `model.gate_floor` and the whole group `rotary`), the file decides everything else it states (sizes,
training, evaluation), and `--set` has the last word on what all variants share. A variant's own settings come after
that, since they are what it is. Seeds come from `--seeds`. So one file serves six models, and results.jsonl holds what
it said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from trope.config import PRESETS, Config
from trope.experiments.pool import Variant
from trope.settings import preset, read_toml

_ATTENTION = ("rotary.readout=0",)
_PRINTED = (*_ATTENTION, "rotary.phase=fp32", "rotary.conditioning=paper", "model.gate_floor=none")
NAMED = {
    # T-RoPE in attention alone, as in the paper; and with the paper's arithmetic and coordinates (docs/method.md).
    "hstu-trope-attention": Variant("hstu-trope-attention", "hstu-trope", _ATTENTION),
    "hstu-trope-paper": Variant("hstu-trope-paper", "hstu-trope", _PRINTED),
}
"""Variants that `--models` knows besides the presets."""
_MODELS = (*PRESETS, *NAMED)
_OF_THE_PRESET = {"model.block", "model.position_bias", "model.time_bias", "model.gate_floor"}
_OF_THE_COMMAND = {"train.seed"}


def common_settings(file: Path | None, settings: Sequence[str]) -> tuple[str, ...]:
    """What every variant is trained with: the file's sizes, training and evaluation, then `--set`."""
    return (*(settings_of_file(file) if file is not None else ()), *settings)


def settings_of_file(file: Path) -> tuple[str, ...]:
    """What a config file states, as "group.field=value", without what a preset or the command decides."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no config file {file}")
    read_toml(file)  # refuses unknown names and wrong types
    stated = tomllib.loads(file.read_text(encoding="utf-8"))
    found = {f"{group}.{name}": value for group, entries in stated.items() for name, value in entries.items()}
    left_out = _OF_THE_PRESET | _OF_THE_COMMAND | {path for path in found if path.startswith("rotary.")}
    return tuple(f"{path}={_text(value)}" for path, value in found.items() if path not in left_out)


def choose(models: Sequence[str], own: Sequence[str] = (), common: Sequence[str] = ()) -> list[Variant]:
    """The variants of `--models` and, after them, of `--variant NAME=MODEL,group.field=value,…`.

    A wrong name or value is refused here, before anything is trained.
    """
    asked = [_named(name.strip()) for name in models if name.strip()] + [_parse(text) for text in own]
    variants = [Variant(each.name, each.model, (*common, *each.settings)) for each in asked]
    for variant in variants:
        preset(variant.model, variant.settings)
    return variants


def configure(model: str, settings: Sequence[str]) -> Config:
    """The config of a preset or of a variant by its name; settings have the last word."""
    variant = _named(model)
    return preset(variant.model, [*variant.settings, *settings])


def _named(name: str) -> Variant:
    if name not in _MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(_MODELS)}")
    return NAMED.get(name) or Variant(name, name)


def _parse(text: str) -> Variant:
    name, equals, rest = text.partition("=")
    model, *settings = (part.strip() for part in rest.split(","))
    if not (equals and name.strip() and model in _MODELS) or "/" in name:
        raise ValueError(
            f"a variant is NAME=MODEL,group.field=value,… with a model of {', '.join(_MODELS)}, got {text!r}"
        )
    base = _named(model)
    return Variant(name.strip(), base.model, (*base.settings, *settings))


def _text(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
