"""The encodings T-RoPE is compared with: TO-RoPE, which turns by index and time together, and index RoPE.

Shape letters: B batch, L positions, T jagged tokens, H heads, D head dim, P planes, C coordinates.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from trope.kernels import Backend
from trope.rotary import checks
from trope.rotary.base import Layout, Rotary, event_index, float64

UNITS = {"seconds": 1.0, "hours": 3_600.0, "days": 86_400.0}
EPOCH = (
    1_420_070_400  # 2015-01-01: only time differences matter; near the data, sums of gradients lose less to rounding
)


class TORoPE(Rotary):
    """Time-and-order RoPE (arXiv 2510.20455): angle_p = (1 - g_p) a_index i w_p + g_p a_time tau v_p, tau = t / unit.

    Query and key share the angle function, so only differences matter: time-translation invariant (Remark 2). The
    original leaves bases, units and gains open; the defaults here are our choices, each an argument. Of its three ways
    to divide planes, this is the split by dimension.

    Args:
        head_dim, rotary_dim, layout, backend, check_values: as in TRoPE.
        time_share: share of the planes that turn by time (g = 1), the first ones; the others turn by index (g = 0).
            Reported best: 0.3 to 0.5.
        unit: of tau.
        index_base, time_base: ladders w_p = index_base^(-p/n), v_p = time_base^(-p/n) over the n planes of each kind.
        learnable: learn the two gains, from 1.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        time_share: float = 0.5,
        unit: Literal["seconds", "hours", "days"] = "days",
        index_base: float = 1e4,
        time_base: float = 1e4,
        learnable: bool = True,
        layout: Layout = "interleaved",
        backend: Backend = "auto",
        check_values: bool = True,
    ) -> None:
        super().__init__(head_dim, rotary_dim, layout, backend, check_values)
        checks.check_choice("unit", unit, tuple(UNITS))
        if not 0 <= time_share <= 1:
            raise ValueError(f"time_share must lie between 0 and 1, got {time_share}")
        self.time_share, self.unit, self.index_base, self.time_base = time_share, unit, index_base, time_base
        self._keep_constants()
        gains = torch.ones(2)  # time, index
        if learnable:
            self.gains = nn.Parameter(gains)
        else:
            self.register_buffer("gains", gains)

    def _form_constants(self) -> Tensor:
        """Turns per second and turns per step with both gains at 1, float64 [2, P]."""
        timed = round(self.time_share * self.planes)
        ladders = torch.zeros(2, self.planes, dtype=torch.float64)
        ladders[0, :timed] = _ladder(self.time_base, timed) / UNITS[self.unit]
        ladders[1, timed:] = _ladder(self.index_base, self.planes - timed)
        return ladders / (2 * math.pi)

    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert times is not None
        return self.coordinates_at(times, times, event_index(shape, offsets, times.device))

    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        since = times - EPOCH
        coords = torch.stack((since, index.to(since.dtype)))
        return coords, coords

    def frequencies(self) -> tuple[Tensor, Tensor]:
        freqs = float64(self.gains)[:, None] * self._constants()  # Remark 2
        return freqs, freqs


class IndexRoPE(Rotary):
    """Standard RoPE by event index (section 2 of the paper): theta_p = base^(-p/P), the same for query and key.

    Args:
        head_dim, rotary_dim, layout, backend: as in TRoPE; `times` may be None in calls, and is not read.
        base: 1e4 as in RoFormer.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 1e4,
        layout: Layout = "interleaved",
        backend: Backend = "auto",
    ) -> None:
        super().__init__(head_dim, rotary_dim, layout, backend, check_values=False)
        self.base = base
        self._keep_constants()

    def _form_constants(self) -> Tensor:
        """Turns per step, float64 [1, P]."""
        return _ladder(self.base, self.planes)[None] / (2 * math.pi)

    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        index = event_index(shape, offsets, self.get_buffer("_constant_bits").device)
        return self.coordinates_at(index, index, index)

    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return index[None], index[None]

    def frequencies(self) -> tuple[Tensor, Tensor]:
        freqs = self._constants()
        return freqs, freqs

    def check_call(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None, allow_past: bool,
    ) -> None:  # fmt: skip
        if times is not None:
            super().check_call(shape, times, lengths, t_now, offsets, allow_past)


def _ladder(base: float, planes: int) -> Tensor:
    """Radians per unit: base^(-p / planes), float64."""
    return base ** -(torch.arange(planes, dtype=torch.float64) / max(planes, 1))
