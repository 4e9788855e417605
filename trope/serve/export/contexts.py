"""What the blocks of a program ask for, in operations that give the same integers in every format.

A bucket of HSTU's time bias is the integer part of a logarithm. Logarithms of two libraries differ in the last bit, and
near the edge of a bucket that changes the bucket. Here the logarithm only guesses; the gap is then compared with the
edge itself, which `bucket_edges` takes from the model's own formula. TiSASRec's intervals are divided as integers.

Shape letters: B histories, L events, M moments, G pending events, K keys, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from trope.kernels.attention import Gaps
from trope.kernels.attention.reference import BUCKET_WIDTH, time_buckets
from trope.kernels.rotary.reference import rotate_by
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.context import Context, Rotation
from trope.models.look_context import LookContext, Pending, Speeds
from trope.serve.export.frozen import FrozenRotary, Turning

# Of a bucket: what the guess stays below the formula. Far more than logarithms differ by, far less than a bucket.
_BELOW = 1e-3
_LONGEST = 2**62


def bucket_edges(last: int) -> Tensor:
    """The shortest gap of each bucket from 1 to last + 1, whole seconds, int64 [last + 1].

    By bisection of the model's formula, which never falls as the gap grows.
    """
    wanted = torch.arange(1, last + 2)
    low, high = torch.ones_like(wanted), torch.full_like(wanted, _LONGEST)  # edge in (low, high]
    while bool((high - low > 1).any()):
        middle = low + (high - low) // 2
        reached = time_buckets(middle[None], torch.zeros(1, 1, dtype=torch.int64), last + 1)[0, :, 0] >= wanted
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


def exact_buckets(query_times_BL: Tensor, times_BK: Tensor, edges: Tensor) -> Tensor:
    """`time_buckets` of the model, int64 [B, L, K], whatever the logarithm's last bits are. edges: `bucket_edges`."""
    gaps = (query_times_BL[:, :, None] - times_BK[:, None, :]).abs().clamp(min=1)
    last = edges.shape[0] - 1
    guess = (gaps.float().log() / BUCKET_WIDTH - _BELOW).long().clamp(min=0, max=last)  # the bucket or the one below
    return (guess + (gaps >= edges[guess]).long()).clamp(max=last)


def exact_intervals(times_BL: Tensor, most: int) -> Tensor:
    """`trope.models.context.relative_intervals` without floating point, int64 [B, L, L]."""
    gaps = times_BL - torch.cat((times_BL[:, :1], times_BL[:, :-1]), dim=1)
    smallest = torch.where(gaps > 0, gaps, _LONGEST).cummin(dim=1).values[:, :, None]
    apart = (times_BL[:, :, None] - times_BL[:, None, :]).abs()
    whole = apart // smallest
    twice_rest = 2 * (apart - whole * smallest)
    # To the nearest, and halves to the even one, as float64's round has it.
    up = (twice_rest > smallest) | ((twice_rest == smallest) & (whole % 2 == 1))
    return (whole + up.long()).clamp(max=most)


class ProgramContext(Context):
    """`Context` of a padded batch; edges: of the time buckets, for models that have a time bias."""

    def __init__(
        self, lengths_B: Tensor, times_BL: Tensor, query_times_BL: Tensor, index_BL: Tensor, like: Tensor,
        edges: Tensor | None,
    ) -> None:  # fmt: skip
        self._times_BL, self._query_times_BL, self._edges = times_BL, query_times_BL, edges
        bounds = SequenceBounds.padded(lengths_B, times_BL.shape[1])
        super().__init__(bounds, times_BL.flatten(), query_times_BL.flatten(), index_BL.flatten(), like)

    def _make_gaps(self, last: int, heads: tuple[int, int]) -> Gaps:
        assert self._edges is not None
        buckets = exact_buckets(self._query_times_BL, self._times_BL, self._edges)
        return Gaps(self.times_T, self.query_times_T, last, buckets)

    def intervals(self, most: int) -> Tensor:
        if most not in self._intervals:
            self._intervals[most] = exact_intervals(self._times_BL, most)
        return self._intervals[most]

    def rotated_keys(self, rotary: Rotation | None, k_THD: Tensor) -> Tensor:
        if rotary is None:
            return k_THD
        _, coords_CT = self.coordinates(rotary)
        frozen = cast(FrozenRotary, rotary)
        interleaved = frozen.layout == "interleaved"
        return rotate_by(k_THD[None], coords_CT[:, None], frozen.freqs_k, frozen.betas, interleaved)[0]


class ProgramLookContext(LookContext):
    """`LookContext` with constants; turning: of the layers' encodings, None where they have none."""

    def __init__(
        self, pending: Pending, moments_BM: Tensor, like: Tensor, turning: Turning | None, edges: Tensor | None
    ) -> None:
        super().__init__(pending, moments_BM, like, Speeds([]))
        self._turning, self._edges = turning, edges
        self._both: tuple[Tensor, Tensor] | None = None

    def _cos_sin(self, rotary: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._both is None:
            B, M, G = self.shape
            where = self.pending.times_BG[:, None], self.moments_BM[:, :, None], self.pending.index_BG[:, None]
            times_T, looking_from_T, index_T = (x.expand(B, M, G).reshape(-1) for x in where)
            assert self._turning is not None
            self._both = self._turning(*rotary.coordinates_at(times_T, looking_from_T, index_T))
        place = cast(FrozenRotary, rotary).place
        cos, sin = self._both
        return cos[:, :, place], sin[:, :, place]

    def buckets(self, last: int) -> Tensor:
        if last not in self._buckets:
            assert self._edges is not None
            self._buckets[last] = exact_buckets(self.moments_BM, self.pending.key_times_BK, self._edges)[:, :, None]
        return self._buckets[last]
