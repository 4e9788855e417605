"""What the blocks of one forward share. A block asks for what it needs; the first to ask has it computed.

Shape letters: B sequences, L positions, T tokens, E width, C coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trope.kernels.aside import Beside, Late
from trope.kernels.attention import Gaps, time_gaps
from trope.kernels.backend import resolve_backend
from trope.kernels.sequence_bounds import SequenceBounds
from trope.rotary import IndexRoPE, TORoPE, TRoPE

Rotation = TRoPE | TORoPE | IndexRoPE


class Drop(NamedTuple):
    """Dropout that a kernel applies.

    seed: int64 [1] on the device. place: one number per place in the model that drops.
    """

    rate: float
    seed: Tensor
    place: int


class Stream(NamedTuple):
    """The residual stream between blocks: x + delta. The sum is left to the next norm, which fuses it.

    drop: dropout of delta, which that norm applies too.
    """

    x_TE: Tensor
    delta_TE: Tensor | None = None
    drop: Drop | None = None

    def sum(self) -> Tensor:
        """x + delta, [T, E]."""
        assert self.drop is None, "delta is still to be dropped, by the kernel of the next norm"
        return self.x_TE if self.delta_TE is None else self.x_TE + self.delta_TE


class Context:
    """The tokens of one forward, and what can be asked about them.

    Args:
        bounds: where the sequences lie among the tokens.
        times_T, query_times_T: of each event, and the time from which its query looks; int64 seconds.
        index_T: each token's place in its sequence.
        like: a tensor of the device and dtype that blocks compute in.
        seed: int64 [1], of dropout inside kernels; without one torch's generator draws it when it is needed.
        low: gives a parameter's copy in `dtype`, which a trainer keeps current, or None.
        beside: where work may go on beside the blocks' own.
    """

    def __init__(
        self,
        bounds: SequenceBounds,
        times_T: Tensor,
        query_times_T: Tensor,
        index_T: Tensor,
        like: Tensor,
        seed: Tensor | None = None,
        low: Callable[[Tensor], Tensor | None] | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.bounds, self.times_T, self.query_times_T, self.index_T = bounds, times_T, query_times_T, index_T
        self._like, self._seed, self._low, self._beside = like, seed, low, beside or Beside()
        self._gaps: dict[int, Gaps] = {}
        self._coordinates: dict[tuple[type, bool], tuple[Tensor, Tensor]] = {}
        self._intervals: dict[int, Tensor] = {}
        self._slots_T: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the products: autocast's where it is on."""
        return product_dtype(self._like)

    def low(self, parameter: Tensor) -> Tensor | None:
        """A copy of a parameter in `dtype`, or None if nobody keeps one."""
        return None if self._low is None else self._low(parameter)

    @property
    def late(self) -> Late:
        """Where the backward pass forms gradients of parameters."""
        return self._beside.late

    def begin_gaps(self, last: int, heads: tuple[int, int]) -> None:
        """Compute `gaps`, on a GPU beside what the block does until it asks for them.

        heads: how many the block has, and how wide.
        """
        if last not in self._gaps:
            with self._beside.soon.work():
                self._gaps[last] = self._make_gaps(last, heads)

    def gaps(self, last: int) -> Gaps:
        """Time gaps of all pairs, in buckets 0 .. last, for HSTU's time bias; `begin_gaps` has begun them."""
        self._beside.soon.join()
        return self._gaps[last]

    def _make_gaps(self, last: int, heads: tuple[int, int]) -> Gaps:
        times = (self.times_T, self.query_times_T, self.bounds)
        return time_gaps(*times, last, like=self._like.new_empty(0, dtype=self.dtype), heads=heads)

    def coordinates(self, rotary: Rotation, uncentred: bool = False) -> tuple[Tensor, Tensor]:
        """Where queries and keys stand for a rotary encoding, two of [C, T].

        All encodings of one kind in a model stand at the same coordinates, so they are formed once.

        uncentred: without the origin, for a kernel that subtracts it itself (`TRoPE.is_linear`).
        """
        key = (type(rotary), uncentred)
        if key not in self._coordinates:
            where = (self.times_T, self.query_times_T, self.index_T)
            if uncentred:
                assert isinstance(rotary, TRoPE)
                self._coordinates[key] = rotary.uncentred_at(*where)
            else:
                self._coordinates[key] = rotary.coordinates_at(*where)
        return self._coordinates[key]

    def intervals(self, most: int) -> Tensor:
        """TiSASRec's personalised intervals between events, clipped at `most`, int64 [B, L, L]."""
        if most not in self._intervals:
            places_BL, _ = self.bounds.places()
            self._intervals[most] = relative_intervals(self.times_T[places_BL], most)
        return self._intervals[most]

    def kernel_seed(self) -> Tensor | None:
        """Seed of dropout inside kernels, int64 [1]; None where modules drop because no kernel runs."""
        if resolve_backend("auto", self._like) == "torch":
            return None
        if self._seed is None:
            self._seed = torch.randint(2**62, (1,), device=self._like.device)
        return self._seed

    def padded(self, x_T: Tensor) -> Tensor:
        """Flat tokens [T, ..] as a batch [B, L, ..]; zero behind a row's last token where tokens were jagged."""
        slots_T = self.slots()
        if slots_T is not None:
            # Each token has a slot of its own, so the gradient is a selection too, with nothing to add up.
            x_T = x_T.new_zeros((math.prod(self.padded_shape), *x_T.shape[1:])).index_copy(0, slots_T, x_T)
        return x_T.unflatten(0, self.padded_shape)

    def rotated_keys(self, rotary: Rotation | None, k_THD: Tensor) -> Tensor:
        """Keys without their queries, rotated where there is an encoding."""
        if rotary is None:
            return k_THD
        coords_q, coords_k = (coords_CT[:, None] for coords_CT in self.coordinates(rotary))
        return rotary.rotate(k_THD[None, :, :0], k_THD[None], coords_q, coords_k)[1][0]

    def flat(self, x_BL: Tensor) -> Tensor:
        """The tokens [T, ..] of a batch [B, L, ..]."""
        x_T, slots_T = x_BL.flatten(0, 1), self.slots()
        if slots_T is None:
            return x_T
        return _Select.apply(x_T, slots_T) if x_T.requires_grad else x_T.index_select(0, slots_T)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """B and L of the padded batch."""
        return len(self.bounds.starts_B), self.bounds.max_len

    def slots(self) -> Tensor | None:
        """Where each token lies in the padded batch, flattened, [T]; None where token t lies at t."""
        # As many tokens as the padded batch has places: every sequence fills its row.
        is_full = self.bounds.is_complete and len(self.times_T) == math.prod(self.padded_shape)
        if self.bounds.is_padded or is_full:
            return None
        if self._slots_T is None:
            token_T = torch.arange(len(self.times_T), device=self.times_T.device)
            self._slots_T = self.bounds.row_of(token_T) * self.bounds.max_len + self.index_T
        return self._slots_T


def product_dtype(like: Tensor) -> torch.dtype:
    """The dtype of products with such a tensor: autocast's where it is on."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


class _Select(torch.autograd.Function):
    """`index_select` of different rows: the gradient is a copy, where torch's adds up with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_T: Tensor) -> Tensor:
        ctx.save_for_backward(rows_T)
        ctx.rows = len(x)
        return x.index_select(0, rows_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,), (rows_T,) = gradients, ctx.saved_tensors
        return g.new_zeros((ctx.rows, *g.shape[1:])).index_copy_(0, rows_T, g), None


def relative_intervals(times_BL: Tensor, most: int) -> Tensor:
    """TiSASRec's personalised intervals |t_i - t_j| / r_min, rounded and clipped at `most`, int64 [B, L, L].

    r_min is the smallest gap above zero between consecutive events *up to position i*; the original takes it from
    the user's whole sequence, which tells every position about later ones.
    """
    gaps = times_BL.diff(dim=1)
    unknown = torch.iinfo(torch.int64).max
    gaps = torch.where(gaps > 0, gaps, unknown)
    smallest = F.pad(gaps.cummin(dim=1).values, (1, 0), value=unknown) if gaps.shape[1] else times_BL * 0 + unknown
    apart = (times_BL[:, :, None] - times_BL[:, None, :]).abs().double()
    return (apart / smallest[:, :, None]).round().clamp(max=most).long()
