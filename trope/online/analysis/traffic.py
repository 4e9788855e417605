"""Did the arms see the same traffic? Where they did not, no difference between them means anything.

Two checks, both on users and their first exposures. Assignment decides who is first exposed where; what an arm shows
cannot. Later visits are not compared: a good arm causes more of them.

- Sample ratio: users per arm against the arms' shares (tea-tasting's test).
- Traffic: first exposures by day, and by hour of the day, must fall on the arms alike (chi-square test of homogeneity).
  An arm that was down for a day, began late or served one time zone fails.

The threshold is 0.001 for each kind of check, as is usual for sample ratios: an A/A test is refused once in about 500.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tea_tasting as tt
from scipy import stats

from trope.online.analysis.experiment import Experiment
from trope.online.analysis.exposures import Exposed

THRESHOLD = 1e-3
# The usual least expected count of a cell of a chi-square test.
_LEAST = 5


@dataclass(frozen=True)
class Check:
    """One check. p: smaller is worse. limit: below it the check fails. said: what was found, one sentence."""

    name: str
    p: float
    limit: float
    said: str

    @property
    def failed(self) -> bool:
        return self.p < self.limit


def checks(experiment: Experiment, exposed: Exposed) -> list[Check]:
    """All checks, failed or not."""
    return [*_sample_ratios(experiment, exposed), *_traffic(experiment, exposed)]


def _sample_ratios(experiment: Experiment, exposed: Exposed) -> list[Check]:
    users = {arm: exposed.users_of(place) for place, arm in enumerate(experiment.names)}
    shares = {arm: experiment.arms[arm].share for arm in users}
    counts = {arm: tt.aggr.Aggregates(count_=count) for arm, count in users.items()}
    control = experiment.control
    found = []
    for arm in experiment.treatments:
        ratio = shares[arm] / shares[control]
        p = tt.SampleRatio(ratio).analyze(counts, control, arm).pvalue
        expected = ratio / (1 + ratio)
        share = users[arm] / (users[arm] + users[control])
        said = f"{arm} has {100 * share:.2f} % of the users of {arm} and {control}, and {100 * expected:.2f} % were due"
        found.append(Check(f"sample ratio of {arm}", float(p), THRESHOLD / len(experiment.treatments), said))
    return found


def _traffic(experiment: Experiment, exposed: Exposed) -> list[Check]:
    found = []
    for what, part in (("day", 1), ("hour of the day", 2)):
        table = _table(exposed, len(experiment.names), part)
        p = _homogeneity(table)
        said = f"first exposures by {what} fall on the arms {'alike' if p >= THRESHOLD / 2 else 'differently'}"
        found.append(Check(f"traffic by {what}", p, THRESHOLD / 2, f"{said} (p = {p:.2g})"))
    return found


def _table(exposed: Exposed, arms: int, part: int) -> np.ndarray:
    """Counts of users [arm, group], groups in order. part: which part of a key of `Exposed.counts` is the group."""
    groups = sorted({key[part] for key in exposed.counts})
    table = np.zeros((arms, len(groups)))
    for key, count in exposed.counts.items():
        table[key[0], groups.index(key[part])] += count
    return table


def _homogeneity(table: np.ndarray) -> float:
    """p-value of the chi-square test of homogeneity. Neighbours with too few users for the test are merged first."""
    share = table.sum(axis=1) / table.sum()
    merged: list[np.ndarray] = []
    waiting = np.zeros(len(table))
    for column in table.T:
        waiting = waiting + column
        if share.min() * waiting.sum() >= _LEAST:
            merged.append(waiting)
            waiting = np.zeros(len(table))
    if waiting.any() and merged:
        merged[-1] = merged[-1] + waiting
    if len(merged) < 2:
        return 1.0
    return float(stats.chi2_contingency(np.array(merged).T, correction=False).pvalue)
