"""Metrics: HR, Recall, NDCG and MRR per user from places in the ranking, and the paired bootstrap of two systems.

A positive's place is two counts over the whole candidate list: the items scored strictly better, and the other items
with the same score. Its rank is 1 + better + ties / 2, the mean rank when equal scores are shuffled. Every metric is
the mean over all orders of equal scores, so the order in which a library sorts ties cannot flatter a model. A model
that scores all items alike gets K / V for HR@K, as blind guessing does. Without ties these are the usual metrics.

A user may have several positives (a basket, a day); each counts once. HR@K is 1 if any of them is in the first K.
Recall@K is the share of them in the first K. NDCG@K divides by the best possible DCG@K. MRR takes the best-placed one.

Shapes: U users, S positives of all users, M metrics, R resamples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CUTOFFS = (10, 50, 200)
# Resampling weights made at a time: 32 MiB of them.
_WEIGHTS = 1 << 22


class Places(NamedTuple):
    """Where the positives came; user u owns offsets[u] .. offsets[u+1], at least one each."""

    better: Ints  # [S] candidates with a higher score
    ties: Ints  # [S] other candidates with the same score
    offsets: Ints  # [U+1]

    @property
    def ranks(self) -> Floats:
        """[S], from 1; a half where the number of ties is odd."""
        return 1.0 + self.better + self.ties / 2


class Interval(NamedTuple):
    """A mean and the bounds of its bootstrap interval, each [M] (or a scalar for one metric)."""

    mean: Floats
    low: Floats
    high: Floats

    @property
    def significant(self) -> NDArray[np.bool_]:
        """Whether the interval leaves out zero."""
        return (self.low > 0) | (self.high < 0)


def per_user(places: Places, cutoffs: tuple[int, ...] = CUTOFFS) -> dict[str, Floats]:
    """Every metric of every user, as fractions: "HR@10" .., "Recall@10" .., "NDCG@10" .., "MRR", each [U]."""
    starts, sizes = places.offsets[:-1], np.diff(places.offsets)
    if len(sizes) == 0 or sizes.min() < 1:
        raise ValueError(f"metrics need users with at least one positive each, got {len(sizes)} users, some without")
    better_S, group_S = places.better, places.ties + 1
    best = _best_group(better_S, group_S, places.offsets)
    gains = np.concatenate(([0.0], np.cumsum(1 / np.log2(np.arange(2, max(cutoffs) + 2)))))
    hit, recall, ndcg = {}, {}, {}
    for k in cutoffs:
        top_S = np.clip(k - better_S, 0, group_S) / group_S
        gain_S = (gains[np.minimum(better_S + group_S, k)] - gains[np.minimum(better_S, k)]) / group_S
        hit[f"HR@{k}"] = _any_in_top(best, k)
        recall[f"Recall@{k}"] = np.add.reduceat(top_S, starts) / sizes
        ndcg[f"NDCG@{k}"] = np.add.reduceat(gain_S, starts) / gains[np.minimum(sizes, k)]
    return {**hit, **recall, **ndcg, "MRR": _reciprocal_rank(best)}


def average(values: dict[str, Floats]) -> dict[str, float]:
    """The mean of each metric over users."""
    return {name: float(value.mean()) for name, value in values.items()}


def resampled_means(values: Floats, resamples: int = 10_000, seed: int = 0) -> Floats:
    """The mean over each draw of users with replacement, [R] or [R, M].

    The draws depend on the seed only. Two systems' means may therefore be subtracted: the result is the resampled mean
    of their difference.
    """
    if resamples < 1:
        raise ValueError(f"a bootstrap needs resamples >= 1, got {resamples}")
    users, rng = len(values), np.random.default_rng(seed)
    means = []
    for size in _pieces(resamples, max(1, _WEIGHTS // users)):
        # 32-bit draws are seven times as fast as 64-bit ones.
        drawn = rng.integers(0, users, (size, users), dtype=np.int32) + users * np.arange(size)[:, None]
        # How often each user was drawn; one product then serves every metric.
        weights = np.bincount(drawn.ravel(), minlength=size * users).reshape(size, users)
        means.append(weights.astype(np.float64) @ values / users)
    return np.concatenate(means)


def interval(mean: Floats, draws: Floats) -> Interval:
    """The percentile interval of what `resampled_means` drew."""
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return Interval(mean, low, high)


class _Best(NamedTuple):
    """Each user's highest-placed positives, which share one score; each [U]."""

    better: Ints  # candidates above that score
    group: Ints  # candidates with that score
    positives: Ints  # of them positives


def _best_group(better_S: Ints, group_S: Ints, offsets: Ints) -> _Best:
    starts, sizes = offsets[:-1], np.diff(offsets)
    better = np.minimum.reduceat(better_S, starts)
    at_best = better_S == np.repeat(better, sizes)
    group = np.maximum.reduceat(np.where(at_best, group_S, 0), starts)
    return _Best(better, group, np.add.reduceat(at_best.astype(np.int64), starts))


def _any_in_top(best: _Best, k: int) -> Floats:
    """The chance that a positive is among the first k: one minus the chance that all are behind (hypergeometric)."""
    behind = best.group - np.clip(k - best.better, 0, best.group)
    miss = np.ones(len(behind))
    for drawn in range(int(best.positives.max())):
        factor = np.maximum(behind - drawn, 0) / np.maximum(best.group - drawn, 1)
        miss = np.where(best.positives > drawn, miss * factor, miss)
    return 1 - miss


def _reciprocal_rank(best: _Best) -> Floats:
    """The mean of 1 / rank of the first positive."""
    harmonic = np.concatenate(([0.0], np.cumsum(1 / np.arange(1, int((best.better + best.group).max()) + 1))))
    result = (harmonic[best.better + best.group] - harmonic[best.better]) / best.group
    # Positives that tie with each other are rare and fall into few states: one sum for each different state.
    several = np.flatnonzero(best.positives > 1)
    states, state_of = np.unique(np.stack(best)[:, several], axis=1, return_inverse=True)
    sums = np.array([_first_of_several(*map(int, state)) for state in states.T])
    if len(several):
        result[several] = sums[state_of.ravel()]
    return result


def _first_of_several(better: int, group: int, positives: int) -> float:
    """The mean of 1 / rank of the first of `positives` items shuffled among `group`, with `better` above them."""
    place = np.arange(group - positives + 1)
    here = positives / (group - place)  # the chance to be first at this place, if not before
    not_before = np.concatenate(([1.0], np.cumprod(1 - here)[:-1]))
    return float(np.sum(not_before * here / (better + 1 + place)))


def _pieces(total: int, size: int) -> list[int]:
    return [min(size, total - first) for first in range(0, total, size)]
