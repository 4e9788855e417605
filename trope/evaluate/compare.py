"""Compare runs by paired bootstrap over users: which run is better, and whether the difference is more than chance.

Every run is compared with the first. All runs and metrics share the same draws of users, so differences between users
cancel out, and only differences between runs are left.

Shapes: U users, S systems, M metrics, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trope.evaluate import saved_ranks
from trope.evaluate.metrics import Floats, Interval, interval, per_user, resampled_means


@dataclass(frozen=True)
class Compared:
    """One system: its metrics, and how far they are from the first system's (None for the first itself).

    name: for the table. values, difference: intervals of [M].
    """

    name: str
    values: Interval
    difference: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Several systems on the same users.

    metrics: names of the M metrics. users: how many. systems: in the order given.
    means: [S, M]. draws: [R, S, M], the means over the same resamples of users.
    """

    metrics: list[str]
    users: int
    systems: list[Compared]
    means: Floats
    draws: Floats

    def apart(self, system: int, others: NDArray[np.int64]) -> Interval:
        """A system's distance from another one. `others` [M] says which one, by number, for each metric."""
        column = np.arange(len(self.metrics))
        mean = self.means[system] - self.means[others, column]
        return interval(mean, self.draws[:, system] - self.draws[:, others, column])


def compare_runs(runs: Sequence[Path], split: str = "test", resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare runs by the ranks that `trope evaluate` kept; they must rank the same positives among the same items."""
    if len(runs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(runs)}")
    values = {}
    (first, about), *_ = loaded = [saved_ranks.load(run, split) for run in runs]
    for run, name, (result, its_about) in zip(runs, _names(runs), loaded, strict=True):
        if reason := about.difference(its_about):
            raise ValueError(f"{runs[0]} and {run} cannot be compared: {reason}; evaluate both on the same data, alike")
        if not (np.array_equal(first.users, result.users) and np.array_equal(first.offsets, result.offsets)):
            raise ValueError(f"the ranks of {runs[0]} and {run} are of different users; evaluate both again")
        values[name] = per_user(result.places)
    return compare_values(values, resamples, seed)


def compare_values(values: dict[str, dict[str, Floats]], resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare systems by per-user metrics, `values[system][metric]` of [U]; the first system is the reference."""
    names = list(values)
    metrics = list(values[names[0]])
    each_USM = np.stack([np.stack([values[name][metric] for metric in metrics], 1) for name in names], axis=1)
    users, shape = len(each_USM), each_USM.shape[1:]
    # Drawing users is what takes the time: one set of draws serves every system and every difference.
    draws_RSM = resampled_means(each_USM.reshape(users, -1), resamples, seed).reshape(-1, *shape)
    means_SM = each_USM.mean(axis=0)
    systems = []
    for row, name in enumerate(names):
        difference = interval(means_SM[row] - means_SM[0], draws_RSM[:, row] - draws_RSM[:, 0]) if row else None
        systems.append(Compared(name, interval(means_SM[row], draws_RSM[:, row]), difference))
    return Comparison(metrics, users, systems, means_SM, draws_RSM)


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where two folders are called the same."""
    short = [run.resolve().name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"a run is compared with itself: {', '.join(names)}; name each run once")
    return names
