"""Reads a config file for training: as the common base of many models, or as the config of one.

A comparison takes sizes, training and evaluation from the file. What makes a model that model comes from its preset:
`model.block`, the biases, `model.gate_floor` and the whole group `rotary`. Seeds come from `--seeds`. A file that
states one of these is refused, since its value would be ignored. `--set` is applied after the file, a variant's own
settings after `--set`.

A recipe is a config file with a `[recipe]` table (`trope.experiments.recipes`). That table is no setting.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trope.config import Config
from trope.experiments.variants import configure
from trope.settings import from_dict, with_settings

RECIPE = "recipe"
_OF_THE_PRESET = {"model.block", "model.position_bias", "model.time_bias", "model.gate_floor"}
_OF_THE_COMMAND = {"train.seed"}


def read_tables(file: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The config groups that a TOML file states, and its recipe, None if it has none."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no config file {file}")
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from None
    recipe = tables.pop(RECIPE, None)
    if recipe is not None and not isinstance(recipe, dict):
        raise ValueError(f"{file}: recipe must be a table, got {recipe!r}; write [recipe]")
    return tables, recipe


def settings_of_file(file: Path) -> tuple[str, ...]:
    """What a config file states, as "group.field=value"; what a comparison would ignore is refused."""
    tables, _ = read_tables(file)
    from_dict(tables)  # refuses unknown names and wrong types
    found = {f"{group}.{name}": value for group, entries in tables.items() for name, value in entries.items()}
    of_preset = [path for path in found if path in _OF_THE_PRESET or path.startswith("rotary.")]
    if of_preset:
        raise ValueError(
            f"{file} states {', '.join(of_preset)}, which would be ignored: they are what tells models apart, and each "
            f"model's preset decides them. Remove them from the file, and compare a model that has them with "
            f"--variant NAME=MODEL,{of_preset[0]}={_words(found[of_preset[0]])}; "
            "`trope train --config` trains the file as it stands"
        )
    if of_command := [path for path in found if path in _OF_THE_COMMAND]:
        raise ValueError(
            f"{file} states {', '.join(of_command)}, which would be ignored: --seeds N trains with seeds 0 to N - 1. "
            "Remove it from the file"
        )
    return tuple(f"{path}={_words(value)}" for path, value in found.items())


def common_settings(file: Path | None, settings: Sequence[str]) -> tuple[str, ...]:
    """What every variant is trained with: what the file states, then `--set`."""
    return (*(settings_of_file(file) if file is not None else ()), *settings)


def config_of_file(file: Path, model: str | None, settings: Sequence[str], default: str) -> Config:
    """The config that `trope train --config FILE [--model MODEL]` trains.

    A recipe names no model: it is a base for MODEL, or for `default` without one. Any other file is a whole config, and
    a model beside it is refused.
    """
    tables, recipe = read_tables(file)
    if recipe is not None:
        return configure(model or default, common_settings(file, settings))
    if model is not None:
        raise ValueError(
            f"{file} is a whole config, so --model {model} would be ignored; give one of the two, or a file with a "
            "[recipe] table, which is a base for any model"
        )
    return with_settings(from_dict(tables), settings)


def _words(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
