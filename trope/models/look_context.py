"""What the blocks share while they look: a few pending tokens of each history, seen from many moments.

Shape letters: B histories, M moments, G pending tokens of a history, R = B M sequences, Q = M G, T = B M G tokens,
S settled events of a history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.kernels.attention.reference import time_buckets
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.context import Context


class Settled(NamedTuple):
    """The events of B histories that no moment changes any more, right-padded."""

    times_BS: Tensor  # int64 seconds
    counts_B: Tensor


class Pending(NamedTuple):
    """The last events of B histories, which look from the moment that is asked for; right-padded to G."""

    items_BG: Tensor
    times_BG: Tensor
    index_BG: Tensor  # each event's place in its history
    counts_B: Tensor  # from 1


class LookContext(Context):
    """The pending tokens once for each moment: token (b, m, g) is the g-th pending event of b, seen from moment m.

    Args:
        settled, pending: of each history; the pending events follow the settled ones.
        moments_BM: int64 seconds.
        like: a tensor of the device and dtype that blocks compute in.
    """

    def __init__(self, settled: Settled, pending: Pending, moments_BM: Tensor, like: Tensor) -> None:
        (B, M), G = moments_BM.shape, pending.items_BG.shape[1]
        self.settled, self.pending, self.shape = settled, pending, (B, M, G)
        times_T, index_T = (x[:, None].expand(B, M, G).flatten() for x in (pending.times_BG, pending.index_BG))
        looking_from_T = moments_BM[:, :, None].expand(B, M, G).flatten()
        bounds = SequenceBounds.padded(pending.counts_B.repeat_interleave(M), G)
        super().__init__(bounds, times_T, looking_from_T, index_T, like)
        self._buckets: dict[int, tuple[Tensor, Tensor]] = {}
        self.places_S = torch.arange(settled.times_BS.shape[1], device=moments_BM.device)
        self.is_past_BS = self.places_S < settled.counts_B[:, None]

    def each_moment(self, x_T: Tensor) -> Tensor:
        """x of every token, [T, ..], where it is given once for all moments of a history, [B * G, ..]."""
        B, M, G = self.shape
        if len(x_T) == B * M * G:
            return x_T
        return x_T.unflatten(0, (B, 1, G)).expand(B, M, G, *x_T.shape[1:]).flatten(0, 2)

    def distances(self) -> tuple[Tensor, Tensor]:
        """Key's place minus query's place: [B, G, S] to settled events, [G, G] among pending ones."""
        own_G = torch.arange(self.shape[2], device=self.places_S.device)
        return self.places_S - self.pending.index_BG[:, :, None], own_G[None, :] - own_G[:, None]

    def buckets(self, last: int) -> tuple[Tensor, Tensor]:
        """Buckets 0 .. last of the time gaps: [B, Q, S] to settled events, [R, G, G] among pending ones."""
        if last not in self._buckets:
            B, M, G = self.shape
            times_RG, looking_from_RG = self.times_T.view(-1, G), self.query_times_T.view(-1, G)
            past_BMS = time_buckets(looking_from_RG[:, 0].view(B, M), self.settled.times_BS, last)
            past_BQS = past_BMS[:, :, None].expand(B, M, G, -1).flatten(1, 2)
            self._buckets[last] = past_BQS, time_buckets(looking_from_RG, times_RG, last)
        return self._buckets[last]
