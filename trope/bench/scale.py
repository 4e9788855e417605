"""Memory, traffic and time of a step on many GPUs, on paper: formulas over what one GPU measured.

Every GPU takes the same number of histories, so the global batch grows with their number. The item table's rows are
spread over all GPUs; the rest is replicated. What one GPU measured is taken as it is. Bandwidths between GPUs are the
makers' numbers and are not measured. No time is hidden behind another, which real systems do in part.

Shapes: V items, E width, T tokens of one GPU's batch, N negatives, G GPUs, U rows that a GPU asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trope.config import Config
from trope.models.cost import model_cost, total
from trope.models.pulse import HALF_LIVES, PERIODS
from trope.models.pulse.seasons import BINS

GIB = 2**30
_FLOAT, _BF16, _ID = 4, 2, 8  # bytes
# A batch's rows at the highest point of the plain step, in copies: rows, unit vectors, and what the backward pass of
# their normalisation makes (tests/test_scale.py counts).
ROWS_HELD = 6


@dataclass(frozen=True)
class Links:
    """Bandwidth out of one GPU, in bytes a second and one direction: to its node, and to other nodes.

    The defaults are an H200's NVLink and one 400 Gbit/s adapter a GPU.
    """

    node: int = 8
    inside: float = 450e9
    outside: float = 50e9

    def seconds(self, sent: float, gpus: int) -> float:
        """To send so many bytes, spread evenly over all GPUs, the own one included; nodes and network at once."""
        near, far = min(gpus, self.node) - 1, max(0, gpus - self.node)
        return max(sent * near / gpus / self.inside, sent * far / gpus / self.outside)


@dataclass(frozen=True)
class Measured:
    """One GPU's step. table_ms: the part of it that updates the table. peak_GiB: all memory that it took."""

    step_ms: float
    table_ms: float
    peak_GiB: float
    tokens: int


@dataclass(frozen=True)
class Estimate:
    """What each of `gpus` GPUs holds, sends and waits for."""

    gpus: int
    table_GiB: float  # weights, moments and unit vectors of its rows
    rows_GiB: float  # the rows of its batch, `ROWS_HELD` times
    rest_GiB: float  # as measured on one GPU
    sent_GiB: float  # in a step, to all GPUs and itself
    exchange_ms: float
    reduce_ms: float
    step_ms: float
    tokens_per_s: float  # of all GPUs

    @property
    def memory_GiB(self) -> float:
        """Of one GPU."""
        return self.table_GiB + self.rows_GiB + self.rest_GiB


def rows_asked(config: Config, items: int, tokens: int) -> float:
    """U: different items among the inputs and targets of a batch and its negatives, all drawn evenly.

    Real inputs repeat more, so this is a bound on them. A batch shares its negatives with those of all GPUs.
    """
    train = config.train
    draws = 2 * tokens + train.negatives * (1 if train.shared_negatives else tokens)
    return -items * math.expm1(draws * math.log1p(-1 / items)) if items > 1 else 1.0


def table_bytes(config: Config, items: int) -> int:
    """Weights, first moment, second moment and unit vectors of the rows of so many items."""
    width = config.model.width
    second = width if config.train.table_state == "full" else 1
    return items * (_FLOAT * (2 * width + second) + _BF16 * width)


def pulse_bytes(config: Config, items: int, seasons: int = len(PERIODS)) -> int:
    """The pulse's counts of so many items, which every GPU holds whole; `Measured` has them if its model does.

    seasons: how many of `PERIODS` the log is long enough for.
    """
    return config.model.pulse * items * _FLOAT * (len(HALF_LIVES) + BINS * seasons)


def exchanged_bytes(config: Config, rows: float) -> float:
    """What a GPU sends in a step: the ids it asks for, the gradients of their rows, and as many rows to others."""
    return rows * (_ID + 2 * _FLOAT * config.model.width)


def estimate(config: Config, items: int, gpus: int, measured: Measured, links: Links | None = None) -> Estimate:
    """A step of `gpus` GPUs with the measured GPU's batch each."""
    links = links or Links()
    parts = model_cost(config, items, 1, 1)
    dense = (total(parts, "network").parameters - parts[0].parameters) * _FLOAT
    is_alone = gpus == 1
    rows = 0.0 if is_alone else rows_asked(config, items, measured.tokens)
    sent = exchanged_bytes(config, rows)
    exchange = links.seconds(sent, gpus)
    # A ring sends every number twice, and is as fast as its slowest link.
    slowest = links.inside if gpus <= links.node else links.outside
    reduce = 0.0 if is_alone else 2 * dense * (gpus - 1) / gpus / slowest
    step = (measured.step_ms - measured.table_ms + measured.table_ms / gpus) / 1e3 + exchange + reduce
    return Estimate(
        gpus,
        table_bytes(config, -(-items // gpus)) / GIB,
        ROWS_HELD * rows * config.model.width * _FLOAT / GIB,
        measured.peak_GiB - table_bytes(config, items) / GIB,
        sent / GIB,
        1e3 * exchange,
        1e3 * reduce,
        1e3 * step,
        gpus * measured.tokens / step,
    )
