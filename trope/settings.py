"""Configs as text: `--set` on the command line, TOML files, JSON of a checkpoint, and what older versions saved.

Types are checked here, values by `trope.config.Config` itself.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from trope.config import BLOCKS, PRESETS, Config

# Settings that older versions had, each with the one value that today's code keeps. Of the first group any other value
# is another network; of the second it was only another training.
_NETWORK_BEFORE: dict[str, Any] = {
    "rotary.stationary": 0.0, "rotary.step": 8.0, "rotary.beta_min": None, "rotary.beta_max": None,
    "rotary.fusion": "dimension", "rotary.time_share": 0.5, "rotary.unit": "days", "model.time_buckets": 128,
    "model.intervals": 256,
}  # fmt: skip
_TRAINING_BEFORE: dict[str, Any] = {
    "rotary.stationary_planes": "slow", "rotary.alpha_init": "normal", "rotary.jitter": "none", "rotary.blur": 0.0,
    "train.logq": False, "train.factor": 0.1, "train.beta1": 0.9, "train.beta2": 0.98, "train.frequency_lr": 1e-3,
    "train.min_epochs": 10, "eval.batch": 512, "eval.precision": "auto",
}  # fmt: skip
_LAST_WITH_THEM = "b687b81"
_OF_TROPE = (
    "position", "multiscale", "shifted", "conjugate", "rotate_query", "rotate_key", "share_alpha", "bank",
    "conditioning", "phase",
)  # fmt: skip


def preset(name: str, settings: Iterable[str] = ()) -> Config:
    """A preset by name, with settings such as "train.epochs=20" applied."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(PRESETS)}")
    return with_settings(PRESETS[name], settings)


def with_settings(config: Config, settings: Iterable[str]) -> Config:
    """The config with "group.field=value" settings applied, each checked for its type."""
    values = to_dict(config)
    groups = typing.get_type_hints(Config)
    for setting in settings:
        path, equals, text = setting.partition("=")
        group_name, dot, name = path.strip().partition(".")
        if not (equals and dot and group_name in groups):
            raise ValueError(f"a setting is group.field=value with a group of {', '.join(groups)}, got {setting!r}")
        kind = _kind(group_name, name)
        values[group_name][name] = _parse(text.strip(), kind, path)
    return from_dict(values)  # checked as a whole: one setting may need another


def without_effect(config: Config, settings: Iterable[str]) -> Iterator[str]:
    """Settings that a model of this kind does not read, each with its reason."""
    for path in (setting.partition("=")[0].strip() for setting in settings):
        reason = _why_without_effect(config, path)
        if reason is not None:
            yield f"{path} has no effect {reason}"


def _why_without_effect(config: Config, path: str) -> str | None:
    model, rotary, train = config.model, config.rotary, config.train
    group, _, name = path.partition(".")
    if path == "model.gate_floor" and not BLOCKS[model.block].relative_bias:
        return f"on block {model.block}, which has no gate"
    if group == "rotary" and name not in ("kind", "readout"):
        if name == "learnable":
            has_frequencies = rotary.kind in ("trope", "torope") or config.readout_share
            return None if has_frequencies else f"where nothing learns frequencies (rotary.kind is {rotary.kind})"
        if rotary.kind == "none":
            return "on a model without a rotary encoding (rotary.kind is none)"
        if name in _OF_TROPE and rotary.kind != "trope":
            return f"on rotary.kind={rotary.kind}: it belongs to trope"
        if name == "conjugate" and not rotary.rotate_key:
            return "where keys are not rotated (rotary.rotate_key is false)"
        if name == "shifted" and not rotary.rotate_query:
            return "where queries are not rotated (rotary.rotate_query is false)"
        if name == "share_alpha" and (not (rotary.rotate_query and rotary.rotate_key) or rotary.bank == "calendar"):
            return "where only one side has coefficients, or the calendar bank shares them anyway"
    if name in ("negatives", "negative_source", "shared_negatives") and train.loss == "full":
        return "on the full softmax (train.loss is full)"
    if path in ("train.patience", "train.early_stop") and getattr(train, name) >= train.epochs:
        return f"from train.epochs = {train.epochs} on"
    return None


def to_dict(config: Config) -> dict[str, Any]:
    """Plain groups and values, for TOML and JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """A config from groups and values; unknown names and wrong types are refused, missing ones take their default."""
    groups: dict[str, Any] = {}
    kinds = typing.get_type_hints(Config)
    for group_name, entries in values.items():
        if group_name not in kinds or not isinstance(entries, dict):
            raise ValueError(f"unknown config group {group_name!r}; there are {', '.join(kinds)}")
        for name, value in entries.items():
            check_type(value, _kind(group_name, name), f"{group_name}.{name}")
        groups[group_name] = kinds[group_name](**entries)
    return Config(**groups)


def migrate(values: dict[str, Any], training: bool = False) -> dict[str, Any]:
    """Groups and values that an older version saved, without the settings that are gone.

    A removed setting is dropped where it had the value that is fixed today, and refused where it had another one and
    the network would be another.

    training: refuse those that made another training too, because the run is to go on.
    """
    fixed = {**_NETWORK_BEFORE, **(_TRAINING_BEFORE if training else {})}
    if training and isinstance(values.get("train"), dict):
        fixed["train.frequency_lr"] = values["train"].get("lr", _TRAINING_BEFORE["train.frequency_lr"])  # as today
        fixed.pop("train.min_epochs")  # how long to train may change
    kept: dict[str, Any] = {}
    for group_name, entries in values.items():
        if not isinstance(entries, dict):
            kept[group_name] = entries  # `from_dict` refuses it
            continue
        kept[group_name] = {}
        for name, value in entries.items():
            path = f"{group_name}.{name}"
            if path in fixed and value != fixed[path]:
                raise ValueError(
                    f"{path}={value!r} is no longer supported, only {fixed[path]!r} is; use trope as of "
                    f"{_LAST_WITH_THEM} for this model, or train again"
                )
            if path not in _NETWORK_BEFORE and path not in _TRAINING_BEFORE:
                kept[group_name][name] = value
    return kept


def read_toml(path: Path) -> Config:
    """A config from a TOML file."""
    return from_dict(toml_values(path))


def read_saved_toml(path: Path, training: bool = False) -> Config:
    """The config that a run saved, maybe by an older version; training: see `migrate`."""
    try:
        return from_dict(migrate(toml_values(path), training))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def toml_values(path: Path) -> dict[str, Any]:
    """The groups and values of a TOML file, not checked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, thousands of digits, or nested too deep
        raise ValueError(f"{path} is not TOML: {error}") from None


def to_toml(config: Config) -> str:
    """The config as TOML; None is left out, since TOML has none, and read back as the default None."""
    lines = []
    for group_name, entries in to_dict(config).items():
        lines.append(f"[{group_name}]")
        lines += [f"{name} = {_toml(value)}" for name, value in entries.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _kind(group_name: str, name: str) -> Any:
    """The type of a field."""
    kinds = typing.get_type_hints(typing.get_type_hints(Config)[group_name])
    if name in kinds:
        return kinds[name]
    path = f"{group_name}.{name}"
    if path in _NETWORK_BEFORE or path in _TRAINING_BEFORE:
        raise ValueError(f"{path} was removed after {_LAST_WITH_THEM}; leave it out (docs/tried.md, CHANGELOG.md)")
    raise ValueError(f"{group_name} has no field {name!r}; it has {', '.join(kinds)}")


def _options(kind: Any) -> tuple[Any, ...]:
    """The types, or the literal values, that a field may take."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return typing.get_args(kind)
    return (kind,)


def _fits(value: Any, option: Any) -> bool:
    """Whether a value is of a type; True is an int to Python, not to a reader, and 1 is a fine float."""
    origin = typing.get_origin(option)
    if origin is Literal:
        return value in typing.get_args(option)
    if origin in (list, dict):
        inner = _options(typing.get_args(option)[-1])
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(any(_fits(v, kind) for kind in inner) for v in values)
    if isinstance(value, bool):
        return option is bool
    return isinstance(value, (int, float) if option is float else option)


def _wanted(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) in (list, dict):
        whole = "a list" if typing.get_origin(kind) is list else "names with values"
        return f"{whole}, each {_wanted(typing.get_args(kind)[-1])}"
    names = {
        int: "a whole number", float: "a number", bool: "true or false", str: "a name", type(None): "none",
        dict: "names with values", list: "a list",
    }  # fmt: skip
    return " or ".join(names.get(option) or _wanted(option) for option in _options(kind))


def check_type(value: Any, kind: Any, path: str) -> None:
    """Refuse a value that is not of a type such as int, float | None, list[int] or dict[str, float]; path: its name."""
    if not any(_fits(value, option) for option in _options(kind)):
        shown = repr(value)
        raise ValueError(f"{path} must be {_wanted(kind)}, got {shown if len(shown) <= 80 else shown[:80] + '...'}")


def _parse(text: str, kind: Any, path: str) -> Any:
    """A value from the command line, by the field's type."""
    for option in _options(kind):
        if option is type(None) and text.lower() == "none":
            return None
        if option is str:
            return text
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if typing.get_origin(option) is Literal and text in typing.get_args(option):
            return text
    raise ValueError(f"{path} must be {_wanted(kind)}, got {text!r}")
