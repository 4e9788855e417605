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
        self._place = {rotary: place for place, rotary in enumerate(rotaries)}
        self._freqs: list[Tensor] = []
        self._betas: Tensor | None = None
        if not rotaries:
            return
        assert len({type(rotary) for rotary in rotaries}) == 1, "layers stand at the same coordinates"
        assert all(rotary.layout == "interleaved" and rotary.rotary_dim == rotary.head_dim for rotary in rotaries)
        parts = [rotary.paper_phase() or (*rotary.frequencies(), None) for rotary in rotaries]
        # A plane (x0, x1) turns to (x0, x1) * (cos, cos) + (x1, x0) * (-sin, sin): each frequency with both signs.
        signs = torch.tensor([-1.0, 1.0], device=parts[0][0].device)
        both = [torch.cat([q for q, _, _ in parts], dim=-1), torch.cat([k for _, k, _ in parts], dim=-1)]
        freqs_q, freqs_k = ((x[..., None] * signs.to(x.dtype)).flatten(-2) for x in both)  # [C, N D]
        if parts[0][2] is not None:
            self._betas = torch.cat([betas.repeat_interleave(2) for *_, betas in parts if betas is not None])
            self._freqs = [freqs_q, freqs_k]
            return
        # Queries and keys in one pass: coordinates of both, of which each plane has a speed for one.
        zeros = torch.zeros_like(freqs_q)
        self._freqs = [torch.cat((torch.cat((freqs_q, zeros), dim=1), torch.cat((zeros, freqs_k), dim=1)))]

    def constants(self) -> tuple[list[Tensor], Tensor | None]:
        """Frequencies as `phase` takes them, of queries and keys together, or with betas of each; and the betas."""
        return self._freqs, self._betas

    def place(self, rotary: Rotation) -> int:
        """Of an encoding among the layers."""
        return self._place[rotary]

    def cos_sin(self, coords_CT: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], ...]:
        """cos, and sin with its signs, of queries and keys at their coordinates; for each layer [T, 2, 1, D]."""
        if self._betas is None:
            angles = phase(torch.cat(coords_CT)[:, None], self._freqs[0])
        else:
            sides = zip(coords_CT, self._freqs, strict=True)
            angles = torch.cat([phase(coords[:, None], freqs, self._betas) for coords, freqs in sides], dim=-1)
        angles = angles.to(dtype).view(angles.shape[1], 2, len(self._place), 1, -1)
        return angles.cos().unbind(2), angles.sin().unbind(2)


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
        self._tables: tuple[tuple[Tensor, ...], ...] | None = None
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

    def rotated(self, rotary: Rotation | None, qk_T2HD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, H, D], rotated where there is an encoding."""
        if rotary is not None:
            cos, sin = self._cos_sin(rotary, qk_T2HD.dtype)
            qk_T2HD = _turned(qk_T2HD, cos, sin)
        q_THD, k_THD = qk_T2HD.unbind(1)
        return q_THD, k_THD

    def rotated_keys(self, rotary: Rotation | None, k_THD: Tensor) -> Tensor:
        """Keys alone."""
        if rotary is None:
            return k_THD
        cos, sin = self._cos_sin(rotary, k_THD.dtype)
        return _turned(k_THD, cos[:, 1], sin[:, 1])

    def _cos_sin(self, rotary: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of this layer's queries and keys, [T, 2, 1, D] each; in float64 for float64, else in float32."""
        if self._tables is None:
            B, M, G = self.shape
            where: tuple[Tensor, ...] = self.pending.times_BG, self.moments_BM, self.pending.index_BG
            if M * G > 1:
                where = where[0][:, None], where[1][:, :, None], where[2][:, None]
                where = tuple(x.expand(B, M, G) for x in where)
            coords = rotary.coordinates_at(*(x.reshape(-1) for x in where))
            self._tables = self._speeds.cos_sin(coords, torch.promote_types(dtype, torch.float32))
        place = self._speeds.place(rotary)
        return self._tables[0][place], self._tables[1][place]

    def buckets(self, last: int) -> Tensor:
        """Buckets 0 .. last of the times from keys to moments, [B, M, 1, K], the same for a whole group."""
        if last not in self._buckets:
            self._buckets[last] = time_buckets(self.moments_BM, self.pending.key_times_BK, last)[:, :, None]
        return self._buckets[last]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [.., H, D] with its planes turned; rounded to its own dtype once."""
    wide = x.to(cos.dtype)
    swapped = wide.view(*x.shape[:-1], -1, 2).flip(-1).view(x.shape)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
