"""Configuration: frozen dataclasses, one docstring entry a field, and the models as presets.

An ablation is a difference in here and nothing else. This module is the only one that refuses a value: what a `Config`
holds can be trained. `trope.settings` turns configs into text and back; docs/configuration.md is generated from the
docstrings below.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import Literal

PAPER_WIDTH = 512  # "auto" settings are stated for this width and change in proportion to the width


@dataclass(frozen=True)
class BlockRules:
    """What a block allows in a config; `trope.models.blocks` has the classes.

    relative_bias: it has HSTU's relative attention bias and gate.
    heads_fill_width: heads * head_dim must be the width.
    rotary: queries and keys can be rotated.
    """

    relative_bias: bool = False
    heads_fill_width: bool = False
    rotary: bool = True


BLOCKS: dict[str, BlockRules] = {
    "hstu": BlockRules(relative_bias=True),
    "sasrec": BlockRules(heads_fill_width=True),
    "tisasrec": BlockRules(heads_fill_width=True, rotary=False),
    "transformer": BlockRules(heads_fill_width=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """The network: a block, its bias and its size.

    block: the layer that is stacked: hstu, sasrec, tisasrec, or transformer (RMSNorm, softmax attention, SwiGLU).
    width: E, the length of item vectors.
    blocks: how many layers.
    heads: H, attention heads of a layer.
    head_dim: D, dims of a head. All blocks but hstu need heads * head_dim = width.
    max_len: L, the longest history; longer ones are cut to their last events.
    predicts: what an event is trained to predict. next-event: the next one, as in the paper. next-moment: one of the
        user's events at the next later time, drawn anew each epoch and seen from that time. Use it for baskets, whose
        lines share a time and have no order but the file's.
    dropout: share of activations dropped wherever the paper drops.
    position_bias: HSTU's relative attention bias by position.
    time_bias: HSTU's relative attention bias by bucketed time gap.
    gate_floor: floor on the standard deviation in the norm before HSTU's gate. none: the public code's epsilon. auto:
        1 at a width of 512, in proportion to the width. Without a floor, trainings with T-RoPE can diverge
        (docs/method.md).
    pulse: add to the scores what everybody chooses now and what the user chose before, counted from the events. Some
        sixty weights say how much; they are fitted on the validation events (docs/method.md).
    """

    block: str = "hstu"
    width: int = 512
    blocks: int = 2
    heads: int = 4
    head_dim: int = 128
    max_len: int = 50
    predicts: Literal["next-event", "next-moment"] = "next-event"
    dropout: float = 0.2
    position_bias: bool = True
    time_bias: bool = True
    gate_floor: float | Literal["auto"] | None = None
    pulse: bool = False

    @property
    def floor(self) -> float | None:
        """`gate_floor` as a number: a key of a narrow model adds less to what attention sums up."""
        return self.width / PAPER_WIDTH if self.gate_floor == "auto" else self.gate_floor


@dataclass(frozen=True)
class RotaryConfig:
    """How queries and keys are rotated, and whether the output is.

    kind: the encoding: none, trope, torope, or index (standard RoPE).
    position: part 1 of the paper: rotate by times, or by index (trope).
    learnable: part 2: learn the frequencies (trope, torope, readout).
    multiscale: part 3: a geometric bank of time constants instead of one (trope).
    shifted: part 4: a query looks from the next event's time, the last one from t_now (trope).
    conjugate: part 5: the key turns the other way (trope).
    rotate_query: rotate queries (trope).
    rotate_key: rotate keys (trope).
    share_alpha: one coefficient for query and key, as Theorems 1 and 2 assume (trope).
    bank: time constants: geometric; or calendar, half stationary and half on harmonics of day, week, year (trope).
    conditioning: span: learn frequencies in coordinates scaled by the data's time span. paper: learn alpha (trope).
    phase: exact, or fp32 for the paper's arithmetic (trope).
    readout: share of the output's planes that the request time rotates before the output meets the items; 0 for none.
        auto: a quarter at a width of 512, in proportion to the width, at least two planes. Any kind, any block.
    """

    kind: Literal["none", "trope", "torope", "index"] = "none"
    position: Literal["times", "index"] = "times"
    learnable: bool = True
    multiscale: bool = True
    shifted: bool = True
    conjugate: bool = True
    rotate_query: bool = True
    rotate_key: bool = True
    share_alpha: bool = False
    bank: Literal["geometric", "calendar"] = "geometric"
    conditioning: Literal["span", "paper"] = "span"
    phase: Literal["exact", "fp32"] = "exact"
    readout: float | Literal["auto"] = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The paper's recipe (appendix D) unless said otherwise.

    epochs: at most so many.
    early_stop: stop after so many epochs without a better validation, after ten at the earliest.
    criterion: the metric by which validation chooses the epoch and the learning rate. The paper takes HR@10; where
        users have many positives, Recall@10 or NDCG@10 tell more.
    batch: histories of a step, over all processes.
    lr: AdamW's learning rate, of the rotary frequencies too.
    weight_decay: AdamW's; rotary frequencies have none.
    patience: validations without improvement before the learning rate is divided by ten.
    loss: sampled or full softmax.
    negatives: sampled items of a position.
    negative_source: draw them from the whole catalogue (uniform), or from the batch's own items (batch).
    shared_negatives: one draw for the whole batch, which makes the loss a matrix product.
    temperature: divides the scores, which are cosines.
    stride: none: train on each user's last window. A number: on all windows, so many events apart.
    clip: largest gradient norm; 0 does not clip.
    parts: compute a batch in so many parts, a power of two. Then 1, 2, 4 .. processes, at most so many, train the same
        model to the last bit. On a CPU only, in one thread unless OMP_NUM_THREADS says otherwise.
    table_state: AdamW's second moment of the item table. full: as in the paper. row: one number a row, for tables of
        millions of items; results differ a little.
    eval_every: epochs between validations.
    refit: when validation has chosen the epoch, train again on training and validation events for as long, and test
        that model. It is what one would deploy. Not possible with protocol loo-paper, which validates on the test.
    seed: of everything random.
    precision: auto is bf16 on CUDA and fp32 on CPU.
    """

    epochs: int = 100
    early_stop: int = 20
    criterion: Literal["HR@10", "Recall@10", "NDCG@10"] = "HR@10"
    batch: int = 128
    lr: float = 1e-3
    weight_decay: float = 1e-3
    patience: int = 10
    loss: Literal["sampled", "full"] = "sampled"
    negatives: int = 128
    negative_source: Literal["uniform", "batch"] = "uniform"
    shared_negatives: bool = False
    temperature: float = 0.05
    stride: int | None = None
    clip: float = 0.0
    parts: int = 1
    table_state: Literal["full", "row"] = "full"
    eval_every: int = 1
    refit: bool = False
    seed: int = 42
    precision: Literal["auto", "bf16", "fp32"] = "auto"


@dataclass(frozen=True)
class EvalConfig:
    """How rankings are judged.

    filter_seen: items left out of a ranking: none, those of the window the model sees, or of the whole history.
    """

    filter_seen: Literal["none", "window", "history"] = "none"


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
        rotary = dataclasses.replace(self.rotary, readout=self.readout_share)
        return dataclasses.replace(self, model=model, rotary=rotary)

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        _check_block(self)
        _check_rotary(self)
        _check_training(self)


# Smallest and largest value of each number. The largest are far beyond any use: a mistyped exponent is refused
# here in a line, and not by the machine's memory an hour later.
_RANGES: dict[str, tuple[float, float]] = {
    "model.width": (1, 65_536), "model.blocks": (1, 1_024), "model.heads": (1, 1_024), "model.head_dim": (1, 4_096),
    "model.max_len": (1, 1_048_576), "train.epochs": (1, 1_000_000),
    "train.early_stop": (0, 1_000_000), "train.batch": (1, 1_048_576), "train.lr": (1e-12, 100.0),
    "train.weight_decay": (0, 100.0), "train.patience": (0, 1_000_000), "train.negatives": (1, 1_000_000),
    "train.temperature": (1e-4, 1e4), "train.stride": (1, 1_048_576), "train.clip": (0, 1e9),
    "train.parts": (1, 1_024),
    "train.eval_every": (1, 1_000_000), "train.seed": (0, 2**63 - 1), "model.gate_floor": (1e-9, 1e6),
}  # fmt: skip
# Candidates of a batch whose tokens draw their own negatives; kernels count them in 32 bits.
_MOST_CANDIDATES = 2**31 - 1


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The words that a field may be, by "group.field"."""
    found = {}
    for group, kind in typing.get_type_hints(Config).items():
        for name, option in typing.get_type_hints(kind).items():
            literals = [each for each in (option, *typing.get_args(option)) if typing.get_origin(each) is Literal]
            if literals:
                found[f"{group}.{name}"] = tuple(word for each in literals for word in typing.get_args(each))
    return found


def _check_choices(config: Config) -> None:
    for path, words in _choices().items():
        group, _, name = path.partition(".")
        value = getattr(getattr(config, group), name)
        if isinstance(value, str) and value not in words:
            raise ValueError(f"{path} must be one of {', '.join(words)}, got {value!r}")


def _check_ranges(config: Config) -> None:
    for path, (least, most) in _RANGES.items():
        group, _, name = path.partition(".")
        value = getattr(getattr(config, group), name)
        if isinstance(value, (int, float)) and not least <= value <= most:
            raise ValueError(f"{path} must lie between {least:g} and {most:g}, got {value}")
    if not 0 <= config.model.dropout < 1:
        raise ValueError(f"model.dropout must lie in [0, 1), got {config.model.dropout}")


def _check_block(config: Config) -> None:
    model = config.model
    if model.block not in BLOCKS:
        raise ValueError(f"model.block must be one of {', '.join(BLOCKS)}, got {model.block!r}")
    rules = BLOCKS[model.block]
    if rules.heads_fill_width and model.heads * model.head_dim != model.width:
        raise ValueError(
            f"{model.block} needs heads * head_dim = width, got {model.heads} * {model.head_dim} != {model.width}; "
            "set model.head_dim to width / heads"
        )
    if not rules.relative_bias and (model.position_bias or model.time_bias):
        raise ValueError(
            f"block {model.block} has no relative attention bias; set model.position_bias and model.time_bias to false"
        )
    if not rules.rotary and config.rotary.kind != "none":
        raise ValueError(f"block {model.block} has no rotary encoding; set rotary.kind to none")


def _check_rotary(config: Config) -> None:
    model, rotary, share = config.model, config.rotary, config.readout_share
    if not 0 <= share <= 1:
        raise ValueError(f"rotary.readout must be auto or a share of the planes, from 0 to 1, got {share}")
    if share and model.width < 2:
        raise ValueError(f"a readout by time needs a plane, that is model.width of at least 2, got {model.width}")
    if rotary.kind != "none" and model.head_dim % 2:
        raise ValueError(f"a rotary encoding needs an even model.head_dim, got {model.head_dim}")
    if rotary.kind != "trope":
        return
    if not (rotary.rotate_query or rotary.rotate_key):
        raise ValueError("T-RoPE that rotates neither query nor key does nothing; set rotary.kind to none")
    if rotary.bank == "calendar" and (rotary.position == "index" or not rotary.multiscale or model.head_dim < 4):
        raise ValueError(
            "rotary.bank=calendar needs rotary.position=times, rotary.multiscale=true and model.head_dim of at least 4"
        )


def _check_training(config: Config) -> None:
    model, train = config.model, config.train
    if train.stride is not None and train.stride > model.max_len:
        raise ValueError(
            f"train.stride must be at most model.max_len = {model.max_len}, or events are skipped, got {train.stride}"
        )
    if train.parts & (train.parts - 1):
        raise ValueError(f"train.parts must be a power of two, got {train.parts}")
    candidates = train.batch * model.max_len * (1 + train.negatives)
    if train.loss == "sampled" and not train.shared_negatives and candidates > _MOST_CANDIDATES:
        raise ValueError(
            f"train.batch * model.max_len * (1 + train.negatives) must stay below 2^31, got {candidates:,}; lower one "
            "of them, or set train.shared_negatives=true"
        )


_TRANSFORMER = ModelConfig(block="sasrec", position_bias=False, time_bias=False)
_MODERN = dataclasses.replace(_TRANSFORMER, block="transformer")
PRESETS: dict[str, Config] = {
    "sasrec": Config(_TRANSFORMER),
    "sasrec-trope": Config(_TRANSFORMER, RotaryConfig(kind="trope")),
    "transformer": Config(_MODERN),
    "transformer-trope": Config(_MODERN, RotaryConfig(kind="trope", readout="auto")),
    "tisasrec": Config(dataclasses.replace(_TRANSFORMER, block="tisasrec")),
    "hstu": Config(ModelConfig(time_bias=False)),
    "hstu-time": Config(),
    "hstu-torope": Config(rotary=RotaryConfig(kind="torope")),
    "hstu-trope": Config(ModelConfig(gate_floor="auto"), RotaryConfig(kind="trope", readout="auto")),
    "trope": Config(ModelConfig(gate_floor="auto", pulse=True), RotaryConfig(kind="trope", readout=0.25)),
}
