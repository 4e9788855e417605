"""What a model costs: parameters and FLOPs of each part, as a function of its config.

FLOPs are those of one forward over B full histories of L events. They come in two columns:
- products: matrix products, where a multiply-add is 2. Attention is counted over all L * L pairs, as torch's
  `FlopCounterMode` counts it; kernels that skip the future do about half of that.
- other: everything between the products, where a multiplication, addition or division is 1. Transcendental functions
  (exp, log, sin, cos, roots), comparisons, dropout and masks are not counted. The paper counts T-RoPE in this way
  (appendix "Parameter and FLOP overhead").
tests/test_cost.py compares parameters and products with torch's own counts.

Shape letters: B sequences, L positions, T = B * L tokens, E width, H heads, D head dim, I = H * D, P planes, V items,
K half-lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from trope.config import Config, RotaryConfig
from trope.models.blocks import BLOCKS
from trope.models.hstu import LAST_BUCKET
from trope.models.modern import inner_width
from trope.models.pulse import HALF_LIVES, PERIODS
from trope.models.pulse.own import FEATURES
from trope.models.pulse.seasons import BINS
from trope.models.transformer import MOST_INTERVALS
from trope.rotary.readout import turning_planes

Stage = Literal["network", "request", "training"]
# Operations for each value. Layer norm: mean, difference, square, mean, scale. RMS norm and unit length: square, mean,
# scale. SiLU: x / (1 + exp(-x)) with its sign. Scores: SiLU and a division by n; or scale, maximum, sum and division.
LAYER_NORM, RMS_NORM, SILU, SCORE = 5, 3, 3, 4
ANGLE, ROTATION = 2, 6  # of a coordinate and of a plane, as in the paper's appendix


@dataclass(frozen=True)
class Part:
    """One part of a model, all blocks together.

    stage: network: every forward. request: scoring the catalogue for B requests of one moment. training: scoring the
        loss's candidates. parameters: learned by the optimiser. held: other numbers that the part keeps: fitted
        weights and counts. products, other: FLOPs, see above.
    """

    name: str
    stage: Stage = "network"
    parameters: int = 0
    held: int = 0
    products: int = 0
    other: int = 0


def model_cost(config: Config, items: int, batch: int, length: int) -> list[Part]:
    """The parts of a model with V items, for B histories of L events; in the order in which a forward meets them."""
    model = config.model
    if min(items, batch, length) < 1 or length > model.max_len:
        raise ValueError(
            f"items and batch must be at least 1, and length between 1 and model.max_len = {model.max_len}, got "
            f"{items:,} items, batch {batch:,} and length {length:,}"
        )
    if model.block not in _BLOCKS:
        raise ValueError(f"the cost of block {model.block!r} is not known; it is known for {', '.join(_BLOCKS)}")
    T, E = batch * length, model.width
    parts = [Part("item table", parameters=(items + 1) * E, other=T * E)]
    if BLOCKS[model.block].adds_positions:
        parts.append(Part("positions", parameters=model.max_len * E, other=T * E))
    parts += _BLOCKS[model.block](config, batch, length)
    if config.readout_share:
        parts.append(_readout(config, T))
    parts.append(Part("unit vectors", other=RMS_NORM * T * E))
    if model.pulse:
        parts += _pulse(config, items, batch, length)
    parts.append(Part("scores of all items", "request", products=2 * batch * items * E))
    candidates = items if config.train.loss == "full" else 1 + config.train.negatives
    parts.append(Part("scores of the loss", "training", products=2 * T * candidates * E))
    return parts


def total(parts: Iterable[Part], *stages: Stage) -> Part:
    """The sum of the parts of these stages; of all without any."""
    chosen = [part for part in parts if not stages or part.stage in stages]
    sums = {name: sum(getattr(part, name) for part in chosen) for name in ("parameters", "held", "products", "other")}
    return Part("total", **sums)


def _hstu(config: Config, B: int, L: int) -> list[Part]:
    model = config.model
    N, E, H, inner = model.blocks, model.width, model.heads, model.heads * model.head_dim
    T, pairs = B * L, B * L * L
    biases = model.position_bias + model.time_bias
    weights = model.position_bias * (2 * model.max_len - 1) + model.time_bias * (LAST_BUCKET + 1)
    # Both biases are added up once for all heads. Buckets are formed once for all blocks.
    bias_flops = N * (H * pairs + (biases - 1) * pairs) + 2 * pairs * model.time_bias if biases else 0
    return [
        Part("norms and residuals", other=N * (LAYER_NORM + 1) * T * E),
        Part("projections", parameters=N * (E * 4 * inner + inner * E + E), products=N * 2 * T * 5 * inner * E,
             other=N * T * (E + SILU * 3 * inner)),
        *_rotary(config, T),
        *_attention(N, H, model.head_dim, pairs),
        *([Part("relative bias", parameters=N * weights, other=bias_flops)] if biases else []),
        Part("gate", other=N * (LAYER_NORM + SILU + 1) * T * inner),
    ]  # fmt: skip


def _sasrec(config: Config, B: int, L: int) -> list[Part]:
    model = config.model
    N, E, T = model.blocks, model.width, B * L
    return [
        Part("norms and residuals", parameters=(2 * N + 1) * 2 * E,
             other=(2 * N + 1) * (LAYER_NORM + 2) * T * E + 2 * N * T * E),
        Part("projections", parameters=N * (4 * E * E + 4 * E), products=N * 2 * T * 4 * E * E, other=N * T * 4 * E),
        *_rotary(config, T),
        *_attention(N, model.heads, model.head_dim, B * L * L),
        Part("feed-forward", parameters=N * 2 * (E * E + E), products=N * 2 * T * 2 * E * E, other=N * T * 2 * E),
    ]  # fmt: skip


def _tisasrec(config: Config, B: int, L: int) -> list[Part]:
    model = config.model
    N, E, T, pairs, rows = model.blocks, model.width, B * L, B * L * L, MOST_INTERVALS + 1
    # q meets every row of the interval table, and attention, summed by interval, every row of the other. Positions are
    # added to k and v. Intervals are formed once for all blocks.
    added = N * (3 * T * E + 2 * model.heads * pairs) + 2 * pairs
    intervals = Part(
        "intervals", parameters=2 * (rows + model.max_len) * E, products=N * 2 * 2 * T * rows * E, other=added
    )
    *first, feed_forward = _sasrec(config, B, L)
    return [*first, intervals, feed_forward]


def _transformer(config: Config, B: int, L: int) -> list[Part]:
    model = config.model
    N, E, T, inner = model.blocks, model.width, B * L, inner_width(model.width)
    return [
        Part("norms and residuals", other=(2 * N + 1) * RMS_NORM * T * E + 2 * N * T * E),
        Part("projections", parameters=N * 4 * E * E, products=N * 2 * T * 4 * E * E),
        *_rotary(config, T),
        *_attention(N, model.heads, model.head_dim, B * L * L),
        Part("feed-forward", parameters=N * 3 * inner * E, products=N * 2 * T * 3 * inner * E,
             other=N * (SILU + 1) * T * inner),
    ]  # fmt: skip


_BLOCKS: dict[str, Callable[[Config, int, int], list[Part]]] = {
    "hstu": _hstu,
    "sasrec": _sasrec,
    "tisasrec": _tisasrec,
    "transformer": _transformer,
}


def _attention(blocks: int, heads: int, head_dim: int, pairs: int) -> list[Part]:
    product = blocks * 2 * heads * pairs * head_dim
    return [
        Part("attention scores", products=product, other=blocks * SCORE * heads * pairs),
        Part("attention values", products=product),
    ]


def _rotary(config: Config, T: int) -> list[Part]:
    """Queries and keys of all blocks. Angles are the same for all heads; TO-RoPE's have two coordinates."""
    model, rotary = config.model, config.rotary
    if rotary.kind == "none":
        return []
    planes, coordinates = model.head_dim // 2, 2 if rotary.kind == "torope" else 1
    angles, rotations = 2 * ANGLE * coordinates * T * planes, 2 * ROTATION * T * model.heads * planes
    learned = model.blocks * _coefficients(rotary, planes)
    return [Part("rotary encoding", parameters=learned, other=model.blocks * (angles + rotations))]


def _coefficients(rotary: RotaryConfig, planes: int) -> int:
    """Learned coefficients of one block."""
    if not rotary.learnable or rotary.kind == "index":
        return 0
    if rotary.kind == "torope":
        return 2  # a gain of time and one of the index
    if rotary.bank == "calendar":
        return planes // 2  # shared by query and key; harmonics of the calendar are frozen
    return planes if rotary.share_alpha else planes * (rotary.rotate_query + rotary.rotate_key)


def _readout(config: Config, T: int) -> Part:
    planes = turning_planes(config.model.width, config.readout_share)
    # What the stream began with is subtracted, but where a final norm has mixed it with the rest.
    subtracted = 2 * planes if BLOCKS[config.model.block].final_norm(config) is None else 0
    learned = planes if config.rotary.learnable else 0
    return Part("readout", parameters=learned, other=T * ((ANGLE + ROTATION) * planes + subtracted))


def _pulse(config: Config, items: int, B: int, L: int) -> list[Part]:
    """The pulse of B requests at one moment, whose histories hold L different items each; every season is counted."""
    K, P, columns = len(HALF_LIVES), len(PERIODS), items + 1
    features = FEATURES + K
    # A scale of four features for two kinds of planes, and a weight for each feature of the user's own items.
    network, everybody = 4 * 2, 3 * (K + P)
    weights = Part(
        "pulse: weights", "request", held=network + everybody + features + 1,  # and the unit of age
        products=2 * B * network + 2 * B * L * features, other=B * config.model.width + B * L,
    )  # fmt: skip
    # Counts decay, what the year expects since the last event told is added, and with a prior they become shares; their
    # weighted sum is added to each request's scores.
    counts = Part(
        "pulse: counts", "request", held=(K + P * BINS) * columns + 1,  # and their moment
        products=2 * (K + P) * columns + 2 * (K + P) * BINS * columns, other=5 * (K + P) * columns + B * items,
    )  # fmt: skip
    return [weights, counts]
