"""The numbers behind the figures of the encoding: coefficients, periods, resonance and the geometry of scores.

Shape letters: L positions, P planes.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.kernels.rotary.reference import phase
from trope.rotary import TRoPE
from trope.rotary.base import Rotary
from trope.rotary.trope import STEP
from trope.times import DAY, MONTH, WEEK, YEAR

Floats = npt.NDArray[np.float64]
Side = Literal["q", "k"]
BLOCKS = (("day", DAY), ("week", WEEK), ("month", MONTH), ("year", YEAR))
"""The paper's constructed sequence (appendix, figure 5): blocks of events one day, week, month and year apart."""


def coefficients(rope: TRoPE, side: Side) -> Floats:
    """alpha_q or alpha_k of every plane."""
    return rope.alpha(side).detach().numpy()


def strength(rope: TRoPE, side: Side = "q") -> float:
    """RMS of a block's coefficients; the calendar bank's frozen ones are left out."""
    return rms(coefficients(rope, side)[: rope.learned])


def started_at(rope: TRoPE, side: Side) -> Floats | None:
    """The coefficients that training began with, of the learned planes; None where the run does not keep them."""
    start = dict(rope.named_buffers()).get(f"alpha0_{'q' if rope.shared else side}")
    return None if start is None else start.double().numpy()


def rms(values: Floats) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def base_periods(rope: TRoPE) -> Floats:
    """Seconds of one turn at alpha = 1: 2 pi beta."""
    return 2 * math.pi * rope.betas.numpy()


def periods(rope: TRoPE, side: Side) -> Floats:
    """Seconds of one turn as learned, 2 pi beta / |alpha|; infinite for a plane that does not turn."""
    with np.errstate(divide="ignore"):
        return base_periods(rope) / np.abs(coefficients(rope, side))


def nearest_plane(ropes: list[TRoPE], period: float) -> tuple[int, int, float]:
    """Layer, plane and period of the query plane whose turn is nearest to `period`, by ratio; of the key planes where
    no query turns."""
    side: Side = "q" if any(rope.rotate_query for rope in ropes) else "k"
    table = np.stack([periods(rope, side) for rope in ropes])
    layer, plane = np.unravel_index(np.argmin(np.abs(np.log(table / period))), table.shape)
    return int(layer), int(plane), float(table[layer, plane])


def starting_periods(rope: TRoPE) -> Floats | None:
    """Seconds of one turn of the query planes before training; None where the run does not keep the start."""
    start = started_at(rope, "q")
    if start is None or not rope.rotate_query:
        return None
    frozen = np.ones(rope.planes - rope.learned)
    return base_periods(rope) / np.abs(np.concatenate((start, frozen)))


def resonance(seconds: Floats, period: float | Floats) -> Floats:
    """How aligned a query is with itself `seconds` earlier, in a plane that turns once in `period`: cos."""
    return np.cos(2 * math.pi * seconds / period)


def movement(rope: TRoPE, side: Side) -> Floats | None:
    """How far training moved each learned frequency: radians of phase gained over the whole time span, 8 delta.

    None where frequencies are not learned in span coordinates: the start is not known then.
    """
    delta = dict(rope.named_parameters()).get(f"delta_{'q' if rope.shared else side}")
    return None if delta is None else STEP * delta.detach().double().numpy()


def geometry(rotary: Rotary, times_L: Tensor, query_times_L: Tensor) -> Floats:
    """The temporal part of the score of every query m with every key n, [L, L]: mean over planes of the cosine of the
    angle between them, which is what is left of eq. attention for q = k of equal length in every plane."""
    index_L = torch.arange(len(times_L))
    coords = rotary.coordinates_at(times_L, query_times_L, index_L)
    # paper_phase only rounds; the geometry is shown exactly.
    angle_q, angle_k = (
        phase(coords_1L[:, None], freqs) for coords_1L, freqs in zip(coords, rotary.frequencies(), strict=True)
    )
    angles_LLP = angle_q[0, :, None] - angle_k[0, None, :]
    return angles_LLP.cos().mean(-1).detach().numpy()


def block_sequence(end: int, each: int = 8) -> tuple[Tensor, Tensor]:
    """The paper's block sequence up to `end`, and from when each query looks: the next event, at last one year on.

    Blocks of `each` events, one day, week, month and year apart; a block's gap leads to its first event as well.
    """
    gaps = torch.tensor([round(gap) for _, gap in BLOCKS]).repeat_interleave(each)
    times = end - gaps.sum() + gaps.cumsum(0)
    return times, torch.cat((times[1:], times[-1:] + round(BLOCKS[-1][1])))


def block_share(scores_LL: Floats, each: int = 8) -> tuple[float, float]:
    """How much of what a map shows beyond position is told by the blocks of query and key; and how much by chance.

    Shares of the variance over keys before the query, when the mean of each distance in positions has been taken off:
    0 for a map that only knows positions, 1 for one that is even inside every pair of blocks.
    """
    query, key = np.tril_indices(len(scores_LL), k=-1)
    values, distance = scores_LL[query, key].copy(), query - key
    _, pair = np.unique((query // each) * len(scores_LL) + key // each, return_inverse=True)
    values -= _group_means(values, distance)
    total = float(np.square(values).sum())
    chance = float(pair.max()) / (len(values) - 1)
    # What rounding leaves of a map that only knows positions is no variance.
    if total <= 1e-12 * len(values):
        return 0.0, chance
    return float(np.square(_group_means(values, pair)).sum()) / total, chance


def _group_means(values: Floats, group: npt.NDArray[np.int64]) -> Floats:
    """Each value's mean over its group."""
    sums, counts = np.bincount(group, values), np.bincount(group)
    return (sums / np.maximum(counts, 1))[group]


def causal_correlation(first_LL: Floats, second_LL: Floats) -> float:
    """Correlation of two maps over keys up to the query; 0 where one is constant."""
    seen = np.tri(len(first_LL), dtype=bool)
    pair = np.stack((first_LL[seen], second_LL[seen]))
    return float(np.corrcoef(pair)[0, 1]) if pair.std(axis=1).all() else 0.0
