"""Targets from the user's next later time, for data where several events share a time and their order means nothing.

A basket is one moment: its lines are in the order of the file, often sorted by product, and "the next line" is then a
pattern of the file and not of the buyer. `model.predicts = "next-moment"` takes an event's target from the events of
the user's next later time instead, one of them drawn anew each epoch.

Shapes: N events, U users.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.data.sequences import Sequences


class Moments(NamedTuple):
    """For each training event, the range of events at its user's next later time.

    first, size: the range. An event without a later time has the range of itself.
    inputs: the number of each user's training events that have a later time.
    """

    first: Tensor  # [N] int64
    size: Tensor  # [N] int64
    inputs: Tensor  # [U] int64

    def draw(self, generator: torch.Generator) -> Tensor:
        """One event of the next moment for each event, int64 [N]."""
        share_N = torch.rand(len(self.size), dtype=torch.float64, generator=generator, device=self.size.device)
        return self.first + (share_N * self.size).long()


def next_moments(data: Sequences) -> Moments:
    """The next moments among training events. A moment that the split cuts ends at the last training event."""
    total, device = data.num_events, data.device
    place_N = torch.arange(total, device=device)
    begins_U, train_end_U = data.offsets[:-1], data.train_end.long()
    begins_moment = torch.zeros(total + 1, dtype=torch.bool, device=device)
    begins_moment[1:-1] = data.times[1:] != data.times[:-1]
    begins_moment[begins_U] = True
    begins_moment[begins_U + train_end_U] = True
    starts_M = torch.nonzero(begins_moment[:-1]).flatten()
    ends_M = torch.cat((starts_M[1:], starts_M.new_tensor([total])))
    moment_N = begins_moment[:-1].cumsum(0) - 1
    next_N = (moment_N + 1).clamp(max=len(starts_M) - 1)
    user_N = torch.searchsorted(data.offsets, place_N, right=True) - 1
    is_known_N = ends_M[moment_N] < (begins_U + train_end_U)[user_N]
    first_N = torch.where(is_known_N, starts_M[next_N], place_N)
    size_N = torch.where(is_known_N, ends_M[next_N] - starts_M[next_N], 1)
    inputs_U = torch.zeros(data.num_users, dtype=torch.int64, device=device)
    inputs_U.index_add_(0, user_N, is_known_N.long())
    return Moments(first_N, size_N, inputs_U)
