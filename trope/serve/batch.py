"""Recommendations for every user of a dataset, one batch after the other: nothing grows with the number of users.

Of a stream, the users of one block after the other.

Shapes: B users of a batch, N recommendations of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trope.data.pick import pick
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.serve.histories import Histories, Ranking
from trope.serve.index import recall, tune
from trope.serve.recommender import Recommender

USERS_OF_A_BATCH = 1 << 12
_SAMPLE = 256  # users that an index is measured on
Ints = npt.NDArray[np.int64]


class Answers(NamedTuple):
    """Recommendations of one batch of users at one moment, each user's best first.

    asked: users of the batch; those without an event before the moment have no recommendations.
    """

    moment: int
    asked: int
    without_events: int
    users_N: Ints  # places in the dataset
    items_N: Ints  # dense ids
    scores_N: npt.NDArray[np.float32]
    ranks_N: Ints  # from 1


def recommend_all(
    recommender: Recommender, data: Sequences | Stream, moments: Sequence[int], k: int, filter_seen: str = "none"
) -> Iterator[Answers]:
    """Every user at each moment, from the user's events strictly before it; by moment, then by user.

    Moments come one after the other, since what everybody does at a moment is computed once for it.
    """

    def answer(first: int, store: Sequences, moment: int) -> Iterator[Answers]:
        for users in torch.arange(store.num_users).split(USERS_OF_A_BATCH):
            found = _answer(recommender, store, users, moment, k, filter_seen)
            yield found._replace(users_N=found.users_N + first)

    def answer_block(first: int, store: Sequences, moment: int) -> list[Answers]:
        return list(answer(first, store, moment))

    for moment in moments:
        if isinstance(data, Sequences):
            yield from answer(0, data, moment)
            continue
        for answers in data.over_blocks(partial(answer_block, moment=moment)):
            yield from answers


def _answer(
    recommender: Recommender, data: Sequences, users: torch.Tensor, moment: int, k: int, filter_seen: str
) -> Answers:
    counts = data.count_before(users, moment)
    # By length, so that short histories are not padded to long ones.
    known, histories = histories_before(data, users[torch.argsort(counts, stable=True)], moment)
    nothing = np.zeros(0, np.int64)
    found = Ranking(nothing, nothing, np.zeros(0, np.float32), nothing)
    if len(known):
        found = recommender.rank(histories, np.full(len(known), moment), k, filter_seen)
    whose = known[found.rows]
    order = np.argsort(whose, kind="stable")
    answers = found.items[order], found.scores[order], found.ranks[order]
    return Answers(moment, len(users), len(users) - len(known), whose[order], *answers)


def histories_before(data: Sequences, users: torch.Tensor, moment: int) -> tuple[Ints, Histories]:
    """Those of some users who have an event before a moment, and their events up to it."""
    counts = data.count_before(users, moment)
    known = counts > 0
    return users[known].numpy(), Histories.of(data, users[known], counts[known])


def measure_index(
    recommender: Recommender, data: Sequences | Stream, moment: int, k: int, filter_seen: str = "none"
) -> tuple[float, int]:
    """Tune the index on some users, and measure its recall on others, as many; returns it, and how many they are.

    Users are drawn by chance, always the same ones.
    """
    drawn = torch.randperm(data.num_users, generator=torch.Generator().manual_seed(0))[: 2 * _SAMPLE]
    if isinstance(data, Stream):
        numbers = drawn.sort()
        data, drawn = pick(data, numbers.values.tolist()), numbers.indices.argsort()  # places among those picked
    known, _ = histories_before(data, drawn, moment)
    if len(known) == 0:
        raise ValueError("no user has an event before the moment, so there is nothing to measure the index on")
    halves = [torch.from_numpy(known[half::2]) for half in (0, 1)] if len(known) > 1 else [torch.from_numpy(known)] * 2
    asked = []
    for users in halves:
        _, histories = histories_before(data, users, moment)
        asked.append((histories, np.full(len(users), moment)))
    tune(recommender, *asked[0], k, filter_seen)
    return recall(recommender, *asked[1], k, filter_seen), len(halves[1])
