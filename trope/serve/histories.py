"""What a `Recommender` takes and gives as arrays: histories with dense ids, and rankings.

Shape letters: B histories, T events of all of them, K recommendations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trope.data.sequences import Sequences
from trope.evaluate.ranking import TopK


class Histories(NamedTuple):
    """Events of several users, one user after the other: user b owns offsets[b] .. offsets[b+1], in order of time."""

    items: npt.NDArray[np.int64]  # [T] dense ids
    times: npt.NDArray[np.int64]  # [T] Unix seconds
    offsets: npt.NDArray[np.int64]  # [B+1]

    @classmethod
    def of(cls, data: Sequences, users: Tensor, counts: Tensor) -> Histories:
        """The first `counts` events of some users of a dataset; `data.count_before` counts them up to a moment."""
        return cls(*(x.cpu().numpy() for x in data.whole_histories(users, counts)))


class Ranking(NamedTuple):
    """Recommendations of several users, one user after the other, each user's best first."""

    rows: npt.NDArray[np.int64]  # whose, as a row of the histories
    items: npt.NDArray[np.int64]  # dense ids
    scores: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]  # from 1


def listed(found: TopK, rows: npt.NDArray[np.int64]) -> Ranking:
    """Recommendations one after the other; rows: [B] whose they are."""
    chosen, scores = found.items_BK.cpu().numpy(), found.scores_BK.cpu().numpy()
    kept, places = np.nonzero(chosen)
    return Ranking(rows[kept], chosen[kept, places], scores[kept, places], places + 1)
