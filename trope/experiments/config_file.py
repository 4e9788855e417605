"""Reads a config file for training: as the common base of many models, or as the config of one.

A comparison takes sizes, training and evaluation from the file. What makes a model that model comes from its preset:
`model.block`, the biases, `model.gate_floor` and the whole group `rotary`. Seeds come from `--seeds`. A file that
states one of these is refused, since its value would be ignored. `--set` is applied after the file, a variant's own
settings after `--set`.

`trope train --config FILE --model MODEL` takes the same order: the preset, the file, `--set`. There a file may state
anything but the model itself: `model.block`, `model.pulse` or the group `rotary`.

A recipe is a config file with a `[recipe]` table (`trope.experiments.recipes`). That table is no setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trope.config import Config
from trope.experiments.sizes import names
from trope.experiments.variants import configure
from trope.settings import from_dict, toml_values, with_settings

RECIPE = "recipe"
_OF_THE_PRESET = {"model.block", "model.position_bias", "model.time_bias", "model.gate_floor"}
_NAMES_A_MODEL = {"model.block", "model.pulse", "[rotary]"}
_OF_THE_COMMAND = {"train.seed"}


def read_tables(file: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The config groups that a TOML file states, and its recipe, None if it has none."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no config file {file}")
    tables = toml_values(file)
    recipe = tables.pop(RECIPE, None)
    if recipe is not None and not isinstance(recipe, dict):
        raise ValueError(f"{file}: recipe must be a table, got {recipe!r}; write [recipe]")
    return tables, recipe


def settings_of_file(file: Path) -> tuple[str, ...]:
    """What a config file states, as "group.field=value"; what a comparison would ignore is refused."""
    tables, _ = read_tables(file)
    from_dict(tables)  # refuses unknown names and wrong types
    found = _stated(tables)
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
    return _as_settings(found)


def common_settings(file: Path | None, settings: Sequence[str]) -> tuple[str, ...]:
    """What every variant is trained with: what the file states, then `--set`."""
    return (*(settings_of_file(file) if file is not None else ()), *settings)


def config_of_file(file: Path, model: str | None, settings: Sequence[str], default: str) -> Config:
    """The config that `trope train --config FILE [--model MODEL]` trains.

    A recipe names no model: it is a base for MODEL, or for `default` without one. Any other file is a base for MODEL,
    or without one a config as it stands. A model beside a file that states its own is refused.
    """
    tables, recipe = read_tables(file)
    if recipe is not None:
        return configure(model or default, common_settings(file, settings))
    config = from_dict(tables)  # refuses unknown names and wrong types
    if model is None:
        return with_settings(config, settings)
    found = _stated(tables)
    if own := _naming(found):
        raise ValueError(
            f"{file} is a whole config, so --model {model} would be ignored: it states {', '.join(own)}; give one of "
            "the two, or remove these from the file"
        )
    return configure(model, [*_as_settings(found), *settings])


def unnamed_model(file: Path, settings: Sequence[str], config: Config) -> str | None:
    """A line that names the model of `--config FILE` without --model, where neither FILE nor --set names one.

    config: what `config_of_file` returned.
    """
    tables, recipe = read_tables(file)
    if recipe is not None or _naming(_stated(tables)) or _naming(names(settings)):
        return None
    biases = config.model.position_bias, config.model.time_bias
    name = {(True, True): "hstu-time", (True, False): "hstu"}.get(biases, "block hstu")
    return f"model: {name} ({file} has no [rotary]); add --model trope for the recommended one"


def _naming(paths: Iterable[str]) -> list[str]:
    """Settings that are the model itself; those of a whole group as the group."""
    named = ("[rotary]" if path.startswith("rotary.") else path for path in paths)
    return list(dict.fromkeys(each for each in named if each in _NAMES_A_MODEL))


def _stated(tables: dict[str, Any]) -> dict[str, Any]:
    """Values by "group.field"."""
    return {f"{group}.{name}": value for group, entries in tables.items() for name, value in entries.items()}


def _as_settings(stated: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{path}={_words(value)}" for path, value in stated.items())


def _words(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
