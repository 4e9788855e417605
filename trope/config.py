"""Configuration: frozen dataclasses, one docstring line a field, TOML in and out, and the six models as presets.

An ablation is a difference in here and nothing else. `--set group.field=value` on the command line reaches every field.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["none", "trope", "torope", "index"]
BlockKind = Literal["hstu", "sasrec", "tisasrec"]
PAPER_WIDTH = 512  # "auto" settings are in proportion to the width, and stated for this one


@dataclass(frozen=True)
class RotaryConfig:
    """How queries and keys are rotated; the fields after `kind` are the arguments of TRoPE and TORoPE.

    kind: none, trope, torope, or index (standard RoPE).
    position, learnable, multiscale, shifted, conjugate: the paper's five parts, each a switch (TRoPE).
    rotate_query, rotate_key, share_alpha, alpha_init: ablations of the coefficients (TRoPE).
    stationary, stationary_planes, step: share of planes that know only gaps, and which; s of the conditioning (TRoPE).
    beta_min, beta_max: ends of the geometric bank in seconds; none for the paper's 1e2 and 1e8 (TRoPE).
    jitter: in training every history is moved by a random number of whole days, weeks or years, so that the date itself
        cannot be learned by heart; gaps stay (TRoPE).
    blur: in training every history is moved by a normal draw whose deviation is this share of the training data's time
        span: what is learned of a moment holds for its neighbourhood, also beyond the last event; gaps stay (TRoPE).
    bank, conditioning, phase: geometric or calendar; span or paper; exact or fp32 (TRoPE).
    fusion, time_share, unit: how TO-RoPE divides planes between time and index.
    readout: share of the output's planes that turn with the moment looked from before they meet the items; auto is a
        quarter at a width of 512, in proportion to the width, two planes at least (trope.readout; HSTU, any kind).
    """

    kind: Kind = "none"
    position: Literal["times", "index"] = "times"
    learnable: bool = True
    multiscale: bool = True
    shifted: bool = True
    conjugate: bool = True
    rotate_query: bool = True
    rotate_key: bool = True
    share_alpha: bool = False
    alpha_init: Literal["normal", "ones", "calendar"] = "normal"
    stationary: float = 0.0
    stationary_planes: Literal["slow", "fast"] = "slow"
    step: float = 8.0
    beta_min: float | None = None
    beta_max: float | None = None
    jitter: Literal["none", "day", "week", "year"] = "none"
    blur: float = 0.0
    bank: Literal["geometric", "calendar"] = "geometric"
    conditioning: Literal["span", "paper"] = "span"
    phase: Literal["exact", "fp32"] = "exact"
    fusion: Literal["dimension", "head", "early"] = "dimension"
    time_share: float = 0.5
    unit: Literal["seconds", "hours", "days"] = "days"
    readout: float | Literal["auto"] = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """The network: a block, its bias and its size.

    block: hstu, sasrec or tisasrec.
    width, blocks, heads, head_dim: E, number of blocks, H, D (sasrec and tisasrec need heads * head_dim = width).
    max_len: L, the longest history.
    predicts: what an event speaks for. next-event: the next one, as in the paper. next-moment: one of the user's events
        at the next later time, drawn anew each epoch, seen from that time; for baskets, whose lines share a time and
        have no order but the file's.
    dropout: everywhere the paper has one.
    position_bias, time_bias: HSTU's relative attention bias by position and by bucketed time gap.
    time_buckets: of the time bias, one more for everything longer.
    intervals: TiSASRec's clip of relative intervals.
    gate_floor: HSTU normalises what attention sums up before it gates; sums that spread less than this stay small; auto
        is 1 at a width of 512, in proportion to the width. None for the public code's epsilon. With a rotation scores
        change their sign, and with them the sums: without a floor the norm makes a jump of it, and training derails
        (docs/method.md).
    """

    block: BlockKind = "hstu"
    width: int = 512
    blocks: int = 2
    heads: int = 4
    head_dim: int = 128
    max_len: int = 50
    predicts: Literal["next-event", "next-moment"] = "next-event"
    dropout: float = 0.2
    position_bias: bool = True
    time_bias: bool = True
    time_buckets: int = 128
    intervals: int = 256
    gate_floor: float | Literal["auto"] | None = None

    @property
    def floor(self) -> float | None:
        """`gate_floor` as a number: a key of a narrow model adds less to what attention sums up."""
        return self.width / PAPER_WIDTH if self.gate_floor == "auto" else self.gate_floor


@dataclass(frozen=True)
class TrainConfig:
    """The paper's recipe (appendix D) unless said otherwise.

    epochs, min_epochs: at most and at least; early_stop: epochs without a better validation before stopping.
    criterion: the metric by which validation chooses the epoch and the learning rate. HR@10 as in the paper; where
        users have many positives it saturates early, and Recall@10 or NDCG@10 say more.
    batch, lr, beta1, beta2, weight_decay: AdamW; frequency_lr: of the rotary coefficients, without decay.
    patience, factor: reduce the learning rate when validation stalls.
    loss: sampled or full softmax; negatives: per position; negative_source: uniform over the catalogue, or batch (the
        batch's unique items); shared_negatives: one draw for the whole batch, from either source, which makes the loss
        a matrix product; logq: correct for the draw's frequency.
    temperature: of the scores, which are cosines.
    stride: None for each user's last window, or all windows every so many events.
    clip: largest gradient norm; 0 does not clip.
    table_state: AdamW's second moment of the item table, full (the paper) or row: one number a row, the mean of its
        squared gradients. For tables of millions of items; another optimiser, so its results are its own.
    eval_every: epochs between validations.
    refit: when validation has chosen the epoch, train anew on training and validation events together, as long and with
        the same learning rates, and test that model: what one would deploy. Not with the protocol loo-paper, whose
        validation is the test.
    seed: of everything random. precision: auto is bf16 on CUDA and fp32 on CPU.
    """

    epochs: int = 100
    min_epochs: int = 10
    early_stop: int = 20
    criterion: Literal["HR@10", "Recall@10", "NDCG@10"] = "HR@10"
    batch: int = 128
    lr: float = 1e-3
    frequency_lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 1e-3
    patience: int = 10
    factor: float = 0.1
    loss: Literal["sampled", "full"] = "sampled"
    negatives: int = 128
    negative_source: Literal["uniform", "batch"] = "uniform"
    shared_negatives: bool = False
    logq: bool = False
    temperature: float = 0.05
    stride: int | None = None
    clip: float = 0.0
    table_state: Literal["full", "row"] = "full"
    eval_every: int = 1
    refit: bool = False
    seed: int = 42
    precision: Literal["auto", "bf16", "fp32"] = "auto"


@dataclass(frozen=True)
class EvalConfig:
    """How rankings are judged.

    filter_seen: leave out of the ranking none, the items of the window, or of the whole history.
    batch: users scored at a time, where the fused ranking (on a GPU) does not choose for itself.
    precision: in which histories are encoded; auto is bf16 on CUDA, as in training, and fp32 on CPU. Scores are fp32.
    """

    filter_seen: Literal["none", "window", "history"] = "none"
    batch: int = 512
    precision: Literal["auto", "bf16", "fp32"] = "auto"


@dataclass(frozen=True)
class Config:
    """Everything that makes a run, besides the data."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def readout_share(self) -> float:
        """`rotary.readout` as a number: small data, which narrow models are for, hold less about each item's time."""
        share = self.rotary.readout
        if share != "auto":
            return share
        width = self.model.width
        return min(1.0, max(width / PAPER_WIDTH / 4, 4 / width))  # two planes at least: one is but the fastest

    @property
    def resolved(self) -> Config:
        """The same with a number for every auto: two configs that agree in this are one training."""
        model = dataclasses.replace(self.model, gate_floor=self.model.floor)
        return dataclasses.replace(
            self, model=model, rotary=dataclasses.replace(self.rotary, readout=self.readout_share)
        )

    def __post_init__(self) -> None:
        _check(self)


def _check(config: Config) -> None:
    """What no single field can know."""
    model, train = config.model, config.train
    positive = {
        "model.width": model.width, "model.blocks": model.blocks, "model.heads": model.heads,
        "model.head_dim": model.head_dim, "model.max_len": model.max_len, "train.batch": train.batch,
        "train.lr": train.lr, "train.epochs": train.epochs, "train.temperature": train.temperature,
        "rotary.step": config.rotary.step,
        "train.negatives": train.negatives, "train.eval_every": train.eval_every, "eval.batch": config.eval.batch,
    }  # fmt: skip
    for path, value in positive.items():
        if not value > 0:
            raise ValueError(f"{path} must be greater than 0, got {value}")
    if model.block != "hstu" and model.heads * model.head_dim != model.width:
        raise ValueError(
            f"{model.block} needs heads * head_dim = width, got {model.heads} * {model.head_dim} != {model.width}; "
            "set model.head_dim to width / heads"
        )
    if model.block != "hstu" and (model.position_bias or model.time_bias):
        raise ValueError(f"a relative attention bias belongs to block hstu, not {model.block}; set it to false")
    readout = config.readout_share
    if not 0 <= readout <= 1:
        raise ValueError(f"rotary.readout must be auto or a share of the planes, from 0 to 1, got {readout}")
    if readout and model.width < 2:
        raise ValueError(f"a readout by time needs a plane, that is model.width of at least 2, got {model.width}")
    if model.block != "hstu" and readout:
        raise ValueError(f"a readout by time belongs to block hstu, not {model.block}; set rotary.readout to 0")
    shares = {
        "model.dropout": model.dropout, "train.factor": train.factor,
        "train.beta1": train.beta1, "train.beta2": train.beta2,
    }  # fmt: skip
    for path, value in shares.items():
        if not 0 <= value < 1:
            raise ValueError(f"{path} must lie in [0, 1), got {value}")
    not_negative = {
        "train.weight_decay": train.weight_decay, "train.frequency_lr": train.frequency_lr, "train.clip": train.clip,
        "train.patience": train.patience, "train.early_stop": train.early_stop, "train.min_epochs": train.min_epochs,
        "rotary.blur": config.rotary.blur,
    }  # fmt: skip
    for path, value in not_negative.items():
        if not value >= 0:
            raise ValueError(f"{path} must not be negative, got {value}")
    if model.floor is not None and not model.floor > 0:
        raise ValueError(f"model.gate_floor must be auto, greater than 0, or none, got {model.gate_floor}")


PRESETS: dict[str, Config] = {
    "sasrec": Config(ModelConfig(block="sasrec", position_bias=False, time_bias=False)),
    "sasrec-trope": Config(
        ModelConfig(block="sasrec", position_bias=False, time_bias=False), RotaryConfig(kind="trope")
    ),
    "tisasrec": Config(ModelConfig(block="tisasrec", position_bias=False, time_bias=False)),
    "hstu": Config(ModelConfig(time_bias=False)),
    "hstu-time": Config(),
    "hstu-torope": Config(rotary=RotaryConfig(kind="torope")),
    "hstu-trope": Config(ModelConfig(gate_floor="auto"), RotaryConfig(kind="trope", readout="auto")),
}


def preset(name: str, settings: Iterable[str] = ()) -> Config:
    """A preset by name, with settings such as "train.epochs=20" applied."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(PRESETS)}")
    return with_settings(PRESETS[name], settings)


def with_settings(config: Config, settings: Iterable[str]) -> Config:
    """The config with "group.field=value" settings applied, each checked for its type."""
    values = to_dict(config)
    for setting in settings:
        path, equals, text = setting.partition("=")
        group_name, dot, name = path.strip().partition(".")
        groups = typing.get_type_hints(Config)
        if not (equals and dot and group_name in groups):
            raise ValueError(f"a setting is group.field=value with a group of {', '.join(groups)}, got {setting!r}")
        kinds = typing.get_type_hints(groups[group_name])
        if name not in kinds:
            raise ValueError(f"{group_name} has no field {name!r}; it has {', '.join(kinds)}")
        values[group_name][name] = _parse(text.strip(), kinds[name], path)
    return from_dict(values)  # checked as a whole: one setting may need another


def without_effect(config: Config, settings: Iterable[str]) -> Iterator[str]:
    """Settings that a model of this kind does not read, each with its reason."""
    read = {"rotary.kind", "rotary.readout"} | ({"rotary.learnable"} if config.readout_share else set())
    for path in (setting.partition("=")[0].strip() for setting in settings):
        if config.rotary.kind == "none" and path.startswith("rotary.") and path not in read:
            yield f"{path} has no effect on a model without a rotary encoding (rotary.kind is none)"
        if path == "model.gate_floor" and config.model.block != "hstu":
            yield f"{path} has no effect on block {config.model.block}, which has no gate"


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
        hints = typing.get_type_hints(kinds[group_name])
        for name, value in entries.items():
            if name not in hints:
                raise ValueError(f"{group_name} has no field {name!r}; it has {', '.join(hints)}")
            _check_type(value, hints[name], f"{group_name}.{name}")
        groups[group_name] = kinds[group_name](**entries)
    return Config(**groups)


def read_toml(path: Path) -> Config:
    """A config from a TOML file."""
    try:
        return from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
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


def _options(kind: Any) -> tuple[Any, ...]:
    """The types, or the literal values, that a field may take."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return typing.get_args(kind)
    return (kind,)


def _fits(value: Any, option: Any) -> bool:
    """Whether a value is of a type; True is an int to Python, not to a reader, and 1 is a fine float."""
    if typing.get_origin(option) is Literal:
        return value in typing.get_args(option)
    if isinstance(value, bool):
        return option is bool
    return isinstance(value, (int, float) if option is float else option)


def _wanted(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    return " or ".join(names.get(option) or _wanted(option) for option in _options(kind))


def _check_type(value: Any, kind: Any, path: str) -> None:
    if not any(_fits(value, option) for option in _options(kind)):
        raise ValueError(f"{path} must be {_wanted(kind)}, got {value!r}")


def _parse(text: str, kind: Any, path: str) -> Any:
    """A value from the command line, by the field's type."""
    for option in _options(kind):
        if option is type(None) and text.lower() == "none":
            return None
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
