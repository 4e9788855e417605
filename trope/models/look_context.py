"""What the blocks share while they look: a few pending tokens of each history, seen from many moments.

Shape letters: B histories, M moments, G pending tokens of a history, T = B M G tokens, S settled events, K = S + G keys
of a pending token, H heads, D head dim, P planes, C coordinates, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trope.kernels.attention.reference import time_buckets
from trope.kernels.rotary.reference import phase
from trope.models.context import Rotation, product_dtype


class Pending(NamedTuple):
    """The last events of B histories, which look from the moment that is asked for; right-padded to G.

    Their keys are the settled events, right-padded to S, and then the pending ones.
    """

    items_BG: Tensor  # 0 for padding
    times_BG: Tensor  # int64 seconds
    index_BG: Tensor  # each event's place in its history
    counts_B: Tensor  # from 1
    key_times_BK: Tensor  # int64 seconds
    distances_BGK: Tensor  # key's place minus pending event's
    seen_BGK: Tensor | None  # which keys exist and are not later; None if all


class Speeds:
    """How fast the planes of all layers turn, formed once for all looks. It belongs to the weights, as memories do.

    rotaries: the layers' encodings, all of one kind, or none.
    """

    def __init__(self, rotaries: Sequence[Rotation]) -> None:
        self.rotary = rotaries[0] if rotaries else None
        self._place = {rotary: place for place, rotary in enumerate(rotaries)}
        self._freqs: list[Tensor] = []  # of queries and of keys, [C, N * 2P]
        self._betas: Tensor | None = None
        if self.rotary is None:
            return
        assert all(type(rotary) is type(self.rotary) for rotary in rotaries), "layers stand at the same coordinates"
        assert all(rotary.layout == "interleaved" and rotary.rotary_dim == rotary.head_dim for rotary in rotaries)
        parts = [rotary.paper_phase() or (*rotary.frequencies(), None) for rotary in rotaries]
        # A plane (x0, x1) turns to (x0, x1) * (cos, cos) + (x1, x0) * (-sin, sin): each frequency with both signs.
        signs = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=parts[0][0].device)
        for side in (0, 1):
            freqs_CP = torch.cat([part[side] for part in parts], dim=-1)
            self._freqs.append((freqs_CP[..., None] * signs.to(freqs_CP.dtype)).flatten(-2))
        if parts[0][2] is not None:
            self._betas = torch.cat([betas.repeat_interleave(2) for *_, betas in parts if betas is not None])

    def cos_sin(self, coords: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, and sin with its signs, of queries and keys at their coordinates [C, T] each; [2, T, N * 2P]."""
        sides = zip(coords, self._freqs, strict=True)
        angles = torch.cat([phase(coords_CT[:, None], freqs, self._betas) for coords_CT, freqs in sides]).to(dtype)
        return angles.cos(), angles.sin()

    def dims_of(self, rotary: Rotation) -> slice:
        """Where a layer's planes lie in `cos_sin`."""
        place = self._place[rotary]
        return slice(place * rotary.rotary_dim, (place + 1) * rotary.rotary_dim)


class LookContext:
    """The pending tokens once for each moment: token (b, m, g) is the g-th pending event of b, seen from moment m.

    Args:
        pending: the events of each history.
        moments_BM: int64 seconds.
        like: a tensor of the device and dtype that blocks compute in.
        speeds: of the model.
    """

    def __init__(self, pending: Pending, moments_BM: Tensor, like: Tensor, speeds: Speeds) -> None:
        (B, M), G = moments_BM.shape, pending.items_BG.shape[1]
        self.shape, self.pending, self.moments_BM = (B, M, G), pending, moments_BM
        self._like, self._speeds = like, speeds
        self._cos_sin: tuple[Tensor, Tensor] | None = None
        self._buckets: dict[int, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of the products: autocast's where it is on."""
        return product_dtype(self._like)

    def each_moment(self, x: Tensor) -> Tensor:
        """x of every token, [T, ..], where it is given once for all moments, [B * G, ..]."""
        B, M, G = self.shape
        if len(x) == B * M * G:
            return x
        return x.view(B, 1, G, *x.shape[1:]).expand(B, M, G, *x.shape[1:]).flatten(0, 2)

    def rotated(self, rotary: Rotation | None, qk_2THD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, H, D], rotated where there is an encoding."""
        q_THD, k_THD = (qk_2THD if rotary is None else self._turned(rotary, qk_2THD, slice(2))).unbind(0)
        return q_THD, k_THD

    def rotated_keys(self, rotary: Rotation | None, k_THD: Tensor) -> Tensor:
        """Keys alone."""
        return k_THD if rotary is None else self._turned(rotary, k_THD[None], slice(1, 2))[0]

    def _turned(self, rotary: Rotation, x_2THD: Tensor, sides: slice) -> Tensor:
        """x turned by the angles of queries, keys or both; float64 stays float64, all else turns in float32."""
        if self._cos_sin is None:
            dtype = torch.promote_types(x_2THD.dtype, torch.float32)
            self._cos_sin = self._speeds.cos_sin(self._coordinates(rotary), dtype)
        cos_2TD, sin_2TD = (x[sides, :, self._speeds.dims_of(rotary)].unsqueeze(2) for x in self._cos_sin)
        wide = x_2THD.to(cos_2TD.dtype)
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.addcmul(wide * cos_2TD, swapped, sin_2TD).to(x_2THD.dtype)

    def _coordinates(self, rotary: Rotation) -> list[Tensor]:
        """Where queries and keys stand, [C, T] each."""
        B, M, G = self.shape
        looking_from_BMG, times_BMG, index_BMG = (
            x.expand(B, M, G)
            for x in (self.moments_BM[:, :, None], self.pending.times_BG[:, None], self.pending.index_BG[:, None])
        )
        return [x.flatten(1) for x in rotary.coordinates_at(times_BMG, looking_from_BMG, index_BMG)]

    def buckets(self, last: int) -> Tensor:
        """Buckets 0 .. last of the times from keys to moments, [B, M, 1, K], the same for a whole group."""
        if last not in self._buckets:
            self._buckets[last] = time_buckets(self.moments_BM, self.pending.key_times_BK, last)[:, :, None]
        return self._buckets[last]
