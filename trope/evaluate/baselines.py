"""Popularity baselines for every table: most popular overall, and in the last day and hour before t_now.

Shapes: B users of a batch, V items, T events in the order of time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trope.data.sequences import EvalBatch, Sequences
from trope.evaluate.evaluation import Scorer
from trope.evaluate.ranking import TileScores

MOST_POPULAR = "most popular"
RECENT = {"popular in 24 h": 24, "popular in 1 h": 1}
_LAST = {"popular in 24 h": "last 24 hours", "popular in 1 h": "last hour"}
NAMES = (MOST_POPULAR, *RECENT)


def baselines(data: Sequences, split: str) -> dict[str, Scorer]:
    """Scorers by their name in tables, for `trope.evaluate.evaluation.rank_users`."""
    recent = {name: RecentlyPopular(data, split, hours) for name, hours in RECENT.items()}
    return {MOST_POPULAR: MostPopular(data), **recent}


def equal_baselines(scorers: Mapping[str, Scorer], data: Sequences, split: str) -> list[str]:
    """A sentence for each baseline that ranks as another one does because nothing more happened in its window.

    scorers: of `baselines`, for the same data and split.
    """
    t_now = data.eval_batch(split, data.eval_users(split), 1).t_now
    counts = {name: each.count(t_now) for name, each in scorers.items() if isinstance(each, RecentlyPopular)}
    said = []
    for place, (name, count) in enumerate(counts.items()):
        if not count.any():
            why = f"no event lies in the {_LAST[name]} before t_now, for any {split} user"
            said.append(f"{name!r} equals {MOST_POPULAR!r}: {why}")
            continue
        # Windows end at the same moment, so two that hold as many events hold the same.
        shorter = next((other for other in list(counts)[place + 1 :] if count.equal(counts[other])), None)
        if shorter is not None:
            why = f"every event of the {_LAST[name]} before t_now lies in the {_LAST[shorter]}, for every {split} user"
            said.append(f"{name!r} equals {shorter!r}: {why}")
    return said


class MostPopular:
    """Scores an item by the number of its training events."""

    def __init__(self, data: Sequences) -> None:
        events = data.first_events(data.train_end)
        self.counts_V = torch.bincount(data.items[events], minlength=data.num_items + 1).double()

    def __call__(self, batch: EvalBatch) -> TileScores:
        return lambda first, last: self.counts_V[first:last].repeat(len(batch.users), 1)


class RecentlyPopular:
    """Scores an item by its events in the last hours before t_now, then by its training events.

    It counts events of the split's histories that are strictly earlier than t_now. For `test` these include the
    validation events; without them the last hours before a holdout would be empty.

    data: the store; split: valid or test; hours: length of the window.
    """

    def __init__(self, data: Sequences, split: str, hours: int) -> None:
        events = data.first_events(data.split_range(split)[0])
        self.times_T, order = torch.sort(data.times[events])
        self.items_T = data.items[events][order].long()
        self.seconds = 3_600 * hours
        self.overall_V = MostPopular(data).counts_V

    def count(self, t_now: Tensor) -> Tensor:
        """How many events the windows before these moments hold."""
        return torch.searchsorted(self.times_T, t_now) - torch.searchsorted(self.times_T, t_now - self.seconds)

    def __call__(self, batch: EvalBatch) -> TileScores:
        """Needs a batch in the order of t_now: then each event comes into the window once and leaves it once."""
        assert (batch.t_now.diff() >= 0).all(), "rank_users orders users by t_now"
        users = len(batch.users)
        begin_B = torch.searchsorted(self.times_T, batch.t_now - self.seconds)
        end_B = torch.searchsorted(self.times_T, batch.t_now)
        event = torch.arange(int(begin_B[0]), int(end_B[-1]), device=begin_B.device)
        item = self.items_T[event]
        # The first user whose window has the event, and the first who no longer has it (`users` where all have).
        enters, leaves = (torch.searchsorted(bound, event, right=True) for bound in (end_B, begin_B))
        # Whole numbers below 2^53, so recent events decide and ties among them fall to the overall count.
        weight = self.overall_V.max() + 1

        def scores(first: int, last: int) -> Tensor:
            here = (item >= first) & (item < last)
            change_BV = self.overall_V.new_zeros(users + 1, last - first)
            one = change_BV.new_ones(())
            change_BV.index_put_((enters[here], item[here] - first), one, accumulate=True)
            change_BV.index_put_((leaves[here], item[here] - first), -one, accumulate=True)
            return change_BV[:-1].cumsum(0).mul_(weight).add_(self.overall_V[first:last])

        return scores
