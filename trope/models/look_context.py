"""What the blocks share while they look: a few pending tokens of each history, seen from many moments.

Shape letters: B histories, M moments, G pending tokens of a history, R = B M sequences, Q = M G, T = B M G tokens,
S settled events of a history, K = S + G keys, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.kernels.attention.reference import time_buckets
from trope.kernels.rotary.reference import phase, rotate
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.context import Context, Rotation


class Settled(NamedTuple):
    """The events of B histories that no moment changes any more, right-padded."""

    times_BS: Tensor  # int64 seconds
    counts_B: Tensor
    has_padding: bool  # whether a history has fewer than S; known on the host


class Pending(NamedTuple):
    """The last events of B histories, which look from the moment that is asked for; right-padded to G."""

    items_BG: Tensor
    times_BG: Tensor
    index_BG: Tensor  # each event's place in its history
    counts_B: Tensor  # from 1


class Speeds:
    """How fast the planes of each encoding turn, formed once for all looks. It belongs to the weights, as memories do."""

    def __init__(self) -> None:
        self._of: dict[Rotation, tuple[Tensor, Tensor | None]] = {}

    def of(self, rotary: Rotation) -> tuple[Tensor, Tensor | None]:
        """Frequencies of queries and keys [C, 2, 1, P], and the betas of the paper's FP32 phases if these are meant."""
        if rotary not in self._of:
            freqs_q, freqs_k, betas = rotary.paper_phase() or (*rotary.frequencies(), None)
            self._of[rotary] = torch.stack((freqs_q, freqs_k), dim=1)[:, :, None], betas
        return self._of[rotary]


class LookContext(Context):
    """The pending tokens once for each moment: token (b, m, g) is the g-th pending event of b, seen from moment m.

    A pending token's keys are the settled events' and then those of its own group, K = S + G of them.

    Args:
        settled, pending: of each history; the pending events follow the settled ones.
        moments_BM: int64 seconds.
        like: a tensor of the device and dtype that blocks compute in.
        speeds: of the model.
    """

    def __init__(self, settled: Settled, pending: Pending, moments_BM: Tensor, like: Tensor, speeds: Speeds) -> None:
        (B, M), G = moments_BM.shape, pending.items_BG.shape[1]
        self.settled, self.pending, self.shape, self.speeds = settled, pending, (B, M, G), speeds
        self.moments_BM = moments_BM
        times_T, index_T = (x[:, None].expand(B, M, G).reshape(-1) for x in (pending.times_BG, pending.index_BG))
        looking_from_T = moments_BM[:, :, None].expand(B, M, G).reshape(-1)
        counts_R = pending.counts_B if M == 1 else pending.counts_B.repeat_interleave(M)
        super().__init__(SequenceBounds.padded(counts_R, G), times_T, looking_from_T, index_T, like)
        self._angles: dict[Rotation, Tensor] = {}
        self._buckets: dict[int, Tensor] = {}
        self._distances: Tensor | None = None

    @property
    def is_past_BS(self) -> Tensor | None:
        """Which places of the settled events are taken; None where all are."""
        if not self.settled.has_padding:
            return None
        return torch.arange(self.settled.times_BS.shape[1], device=self._like.device) < self.settled.counts_B[:, None]

    def each_moment(self, x_T: Tensor) -> Tensor:
        """x of every token, [T, ..], where it is given once for all moments of a history, [B * G, ..]."""
        B, M, G = self.shape
        if len(x_T) == B * M * G:
            return x_T
        return x_T.view(B, 1, G, *x_T.shape[1:]).expand(B, M, G, *x_T.shape[1:]).flatten(0, 2)

    def rotated(self, rotary: Rotation | None, qk_2THD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, H, D], rotated where there is an encoding."""
        if rotary is not None:
            qk_2THD = _turned(qk_2THD, self._angles_of(rotary), rotary)
        return qk_2THD[0], qk_2THD[1]

    def rotated_keys(self, rotary: Rotation | None, k_THD: Tensor) -> Tensor:
        """Keys alone."""
        return k_THD if rotary is None else _turned(k_THD[None], self._angles_of(rotary)[1:], rotary)[0]

    def _angles_of(self, rotary: Rotation) -> Tensor:
        """Angles of queries and of keys, [2, T, P]."""
        if rotary not in self._angles:
            freqs, betas = self.speeds.of(rotary)
            self._angles[rotary] = phase(torch.stack(self.coordinates(rotary), dim=1), freqs, betas)
        return self._angles[rotary]

    def distances(self) -> Tensor:
        """Key's place minus query's place, [B, 1, G, K], the same for all moments."""
        if self._distances is None:
            B, _, G = self.shape
            places_S = torch.arange(self.settled.times_BS.shape[1], device=self._like.device).expand(B, -1)
            index_BG = self.pending.index_BG
            self._distances = (torch.cat((places_S, index_BG), dim=1)[:, None] - index_BG[:, :, None])[:, None]
        return self._distances

    def buckets(self, last: int) -> Tensor:
        """Buckets 0 .. last of the times from keys to moments, [B, M, 1, K], the same for all of a group."""
        if last not in self._buckets:
            key_times_BK = torch.cat((self.settled.times_BS, self.pending.times_BG), dim=1)
            self._buckets[last] = time_buckets(self.moments_BM, key_times_BK, last)[:, :, None]
        return self._buckets[last]


def _turned(x_BLHD: Tensor, angles_BLP: Tensor, rotary: Rotation) -> Tensor:
    """x turned by these angles, in the arithmetic of `trope.kernels.rotary.reference.rotate_by`."""
    if x_BLHD.dtype != torch.float64:
        angles_BLP = angles_BLP.float()
    return rotate(x_BLHD, angles_BLP.cos(), angles_BLP.sin(), rotary.layout == "interleaved")
