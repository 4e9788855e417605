"""Who makes the slates of a rehearsal: a model in this process, or an arm each for the users of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from trope.evaluate.evaluation import fitted_pulse
from trope.models.pulse import LiveCounts
from trope.online.simulation.population import Ints
from trope.serve.histories import Histories, Ranking
from trope.serve.recommender import Recommender
from trope.times import DAY


class Answers(Protocol):
    """Answers visits, and is told of purchases. Items are the shop's own numbers."""

    def answer(self, users: Ints, histories: Histories, moments: Ints) -> Ints:
        """A slate for each user at a moment, [N, K], best first; -1 where there are not so many items."""

    def observe(self, users: Ints, items: Ints, times: Ints) -> None:
        """What was bought by anybody."""


class DailyCounts(LiveCounts):
    """Counts that are looked at once a day: the shares of a day's first question serve until something is added.

    Computing them for every visit would take more time than all else.
    """

    _kept: tuple[int, int, torch.Tensor] | None = None

    def log_shares(self, moment: int) -> torch.Tensor:
        """See `LiveCounts`."""
        if self._kept is None or self._kept[:2] != (self.added, moment // DAY):
            self._kept = self.added, moment // DAY, super().log_shares(moment)
        return self._kept[2]


class InProcess:
    """A model in this process; its counts begin as after training.

    Args:
        recommender: of a model that was trained on the shop's log.
        items: of the shop; those that the model does not know are left out of histories.
        k: places of a slate.
        daily: look at the counts once a day, see `DailyCounts`; off, at each moment, as a server does.
    """

    def __init__(self, recommender: Recommender, items: int, k: int, daily: bool = True) -> None:
        if recommender.catalogue.is_text:
            raise ValueError("the model's items are text, but the shop's are numbers; train on the shop's own log")
        self.recommender, self.k, self.daily = recommender, k, daily
        self._dense = recommender.catalogue.dense(list(range(items)))
        self._originals = np.array([-1, *recommender.catalogue.item_ids.to_list()], np.int64)
        if not self._dense.any() or self._originals.max() >= items:
            raise ValueError("the model's items are not the shop's; train on the shop's own log, or name its --shop")
        self.reset()

    def reset(self) -> None:
        """Forget what was observed."""
        pulse = fitted_pulse(self.recommender.model)
        live = None if pulse is None else pulse.kept()
        if live is not None and self.daily:
            live = DailyCounts(live.counts, live.seasons, live.since)
        self.recommender.live = live

    def answer(self, users: Ints, histories: Histories, moments: Ints) -> Ints:
        """See `Answers`."""
        dense = self._dense[histories.items]
        known = dense > 0
        counts = np.concatenate(([0], np.cumsum(known)))[histories.offsets]
        lengths = np.diff(counts)
        slates = np.full((len(users), self.k), -1)
        asked, strangers = np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
        if len(asked):
            own = Histories(dense[known], histories.times[known], np.append(counts[:-1][asked], counts[-1]))
            self._fill(slates, asked, self.recommender.rank(own, moments[asked], self.k))
        if len(strangers):
            self._fill(slates, strangers, self.recommender.rank_by_counts(moments[strangers], self.k))
        return slates

    def observe(self, users: Ints, items: Ints, times: Ints) -> None:
        """See `Answers`."""
        live, dense = self.recommender.live, self._dense[items]
        if live is not None and dense.any():
            live.add(torch.from_numpy(dense[dense > 0]), torch.from_numpy(times[dense > 0]))

    def _fill(self, slates: Ints, rows: Ints, found: Ranking) -> None:
        slates[rows[found.rows], found.ranks - 1] = self._originals[found.items]


class ByArm:
    """Each user is answered by an arm; every arm is told of everybody's purchases.

    arm_of: [U] places in `arms`.
    """

    def __init__(self, arms: Sequence[Answers], arm_of: Ints) -> None:
        self.arms, self.arm_of = arms, arm_of

    def answer(self, users: Ints, histories: Histories, moments: Ints) -> Ints:
        """See `Answers`."""
        parts = []
        for place, arm in enumerate(self.arms):
            rows = np.flatnonzero(self.arm_of[users] == place)
            if len(rows):
                parts.append((rows, arm.answer(users[rows], _some(histories, rows), moments[rows])))
        slates = np.empty((len(users), parts[0][1].shape[1]), np.int64)
        for rows, slate in parts:
            slates[rows] = slate
        return slates

    def observe(self, users: Ints, items: Ints, times: Ints) -> None:
        """See `Answers`."""
        for arm in self.arms:
            arm.observe(users, items, times)


def open_arms(runs: Mapping[str, str], items: int, k: int, device: str = "cpu") -> dict[str, InProcess]:
    """Models of runs, by arm."""
    return {arm: InProcess(Recommender.from_pretrained(run, device), items, k) for arm, run in runs.items()}


def _some(histories: Histories, rows: Ints) -> Histories:
    lengths = np.diff(histories.offsets)
    kept = np.isin(np.repeat(np.arange(len(lengths)), lengths), rows)
    return Histories(histories.items[kept], histories.times[kept], np.concatenate(([0], np.cumsum(lengths[rows]))))
