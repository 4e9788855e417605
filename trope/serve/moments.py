"""The best items of histories at many moments each; a history is encoded once (`trope.models.memory`).

Shape letters: B histories, M moments, R pairs of a history and a moment, L positions, E width, K recommendations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.windows import flatten_ranges, last_events, seen_counts
from trope.evaluate.ranking import Cells
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.models.memory import Memory
from trope.models.recommender import SequentialRecommender
from trope.rotary.checks import check_time_values
from trope.serve.lists import LeftOut

if TYPE_CHECKING:
    from trope.serve.recommender import Histories, Recommender

# Positions of the histories that a network encodes together, where these are more than USERS_AT_A_TIME: a GPU ranks
# thousands of users together, whatever the length of their histories. At width 512 the network's tensors then take
# about 13 GB in float32. A bound on memory, not tuned.
POSITIONS = 1 << 19


class MomentRanking(NamedTuple):
    """The best items at each moment, best first. Where fewer than K are left, item 0 and score -inf fill the row."""

    items_BMK: npt.NDArray[np.int64]  # dense ids
    scores_BMK: npt.NDArray[np.float32]


@torch.inference_mode()
def rank_moments(
    recommender: Recommender,
    histories: Histories,
    moments_BM: npt.NDArray[np.int64],
    k: int,
    filter_seen: str,
    within: int,
    memory: Memory | None,
) -> MomentRanking:
    """See `Recommender.rank_moments`; its caller has checked the histories."""
    items, times, offsets = (torch.from_numpy(x) for x in histories)
    moments = _checked(moments_BM, len(offsets) - 1)
    max_len = recommender.model.config.model.max_len
    if memory is not None:
        _check_memory(memory, histories, max_len)
    most, (B, M) = recommender.rows_at_a_time, moments.shape
    found_items = np.zeros((B, M, k), np.int64)
    found_scores = np.zeros((B, M, k), np.float32)
    at_a_time = max(1, min(most // M, histories_together(max_len)))
    for users in torch.arange(B).split(B if memory is not None else at_a_time):
        begins, ends = offsets[users], offsets[users + 1]
        history = last_events(items, times, begins, ends, min(max_len, int((ends - begins).max())))
        looked = _Outputs(recommender, history, memory)
        for places in torch.arange(M).split(max(1, most // len(users))):
            here = moments[users][:, places]
            begins_R, ends_R = (x.repeat_interleave(len(places)) for x in (begins, ends))
            seen = flatten_ranges(ends_R - seen_counts(ends_R - begins_R, max_len, filter_seen), ends_R)
            cells = Cells(seen.rows_T.to(recommender.device), items[seen.places_T].long().to(recommender.device))
            whole = None
            if recommender.live is not None:  # else nobody reads more than the network looks at
                events = flatten_ranges(begins_R, ends_R)
                whole = items[events.places_T], times[events.places_T], events.offsets_B
            t_now_R = here.flatten().to(recommender.device)
            best = recommender.best_of(looked.at(here), whole, t_now_R, k, LeftOut(cells, None), within)
            grid = np.ix_(users.numpy(), places.numpy())
            found_items[grid] = best.items_BK.view(*here.shape, k).cpu().numpy()
            found_scores[grid] = best.scores_BK.view(*here.shape, k).cpu().numpy()
    return MomentRanking(found_items, found_scores)


class _Outputs:
    """Outputs of some histories at their moments, by a memory where the model can remember."""

    def __init__(self, recommender: Recommender, history: tuple[Tensor, ...], memory: Memory | None) -> None:
        self.model, self.device = recommender.model, recommender.device
        self.history = [x.to(self.device) for x in history]
        self.memory = memory
        if memory is None and self.model.can_remember:
            self.memory = self.model.remember(*self.history)

    def at(self, moments: Tensor) -> Tensor:
        """Unit vectors [R, E] at moments [B, M], all moments of a history together."""
        if self.memory is not None:
            return self.memory.look(moments).flatten(0, 1)
        items, times, lengths = (x.repeat_interleave(moments.shape[1], dim=0) for x in self.history)
        return encode_last(self.model, items, times, lengths, moments.flatten().to(self.device))


def histories_together(length: int) -> int:
    """How many histories of so many events a network encodes together."""
    return max(USERS_AT_A_TIME, POSITIONS // max(1, length))


def encode_last(
    model: SequentialRecommender, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor
) -> Tensor:
    """`SequentialRecommender.encode_last` of any number of histories, float32 [B, E]."""
    most = histories_together(items_BL.shape[1])
    parts = zip(*(x.split(most) for x in (items_BL, times_BL, lengths_B, t_now_B)), strict=True)
    return torch.cat([model.encode_last(*part).float() for part in parts])


def _checked(moments_BM: npt.NDArray[np.int64], histories: int) -> Tensor:
    shape = np.shape(moments_BM)
    if len(shape) != 2 or shape[0] != histories or not np.size(moments_BM):
        raise ValueError(
            f"moments must be [B, M] with a row for each of {histories:,} histories and M from 1, got shape {shape}"
        )
    moments = torch.from_numpy(np.asarray(moments_BM, np.int64))
    check_time_values(moments, name="moments")
    return moments


def _check_memory(memory: Memory, histories: Histories, max_len: int) -> None:
    """Lengths and last events must be those of the histories; comparing all events would cost as much as reading."""
    counts = np.diff(histories.offsets)
    kept = memory.events
    if len(memory) == len(counts) and np.array_equal(kept.lengths_B, np.minimum(counts, max_len)):
        rows, last = np.arange(len(counts)), histories.offsets[1:] - 1
        pairs = ((kept.items_BL, histories.items), (kept.times_BL, histories.times))
        if all(np.array_equal(x_BL[rows, kept.lengths_B - 1], x[last]) for x_BL, x in pairs):
            return
    raise ValueError("the memory is of other histories: it has other lengths or last events; remember these anew")
