"""Rotary encodings with their frequencies as float64 constants, for export.

The encodings keep float64 constants in int64 buffers (`trope.rotary.base.set_constant`). ONNX has no such view, and a
trained frequency no longer changes, so a program holds the frequencies themselves.

Shape letters: T tokens, P planes, C coordinates, N layers, D head dim.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from trope.kernels.rotary.reference import phase
from trope.models.context import Rotation
from trope.models.look_context import Speeds
from trope.models.recommender import SequentialRecommender
from trope.models.transformer import IntervalAttention
from trope.rotary import IndexRoPE, TORoPE, TRoPE
from trope.rotary.base import Rotary
from trope.serve.export.intervals import FrozenIntervals


class FrozenRotary(Rotary):
    """What a trained encoding does to queries and keys, with constants alone.

    Args:
        rotary: the trained encoding.
        place: of its layer among those with an encoding.
    """

    freqs_q: Tensor
    freqs_k: Tensor
    betas: Tensor | None
    t0: Tensor

    def __init__(self, rotary: Rotation, place: int = 0) -> None:
        super().__init__(rotary.head_dim, rotary.rotary_dim, rotary.layout, "torch", check_values=False)
        self.place, self.kind = place, type(rotary)
        self.by_index = isinstance(rotary, TRoPE) and rotary.position == "index"
        self.shifted = isinstance(rotary, TRoPE) and rotary.shifted
        turns = rotary.turns()
        freqs_q, freqs_k = turns.frequencies()
        self.register_buffer("freqs_q", freqs_q.detach().clone())
        self.register_buffer("freqs_k", freqs_k.detach().clone())
        self.register_buffer("betas", None if turns.betas is None else turns.betas.detach().clone())
        centred = isinstance(rotary, TRoPE) and rotary.conditioning == "span"
        self.register_buffer("t0", rotary.get_buffer("t0").clone() if centred else torch.zeros((), dtype=torch.int64))

    def coordinates_at(self, times: Tensor, query_times: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        if not issubclass(self.kind, TRoPE):
            return self.kind.coordinates_at(cast(Any, self), times, query_times, index)  # they read nothing of self
        keys = index if self.by_index else times
        queries = keys
        if self.shifted:
            queries = index + 1 if self.by_index else query_times
        return (queries - self.t0)[None], (keys - self.t0)[None]

    def coordinates(
        self, shape: torch.Size, times: Tensor | None, lengths: Tensor | None, t_now: Tensor | None,
        offsets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError("a program knows where its tokens stand: coordinates_at")

    def frequencies(self) -> tuple[Tensor, Tensor]:
        return self.freqs_q, self.freqs_k

    def paper_phase(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if self.betas is None else (self.freqs_q, self.freqs_k, self.betas)


class Turning(nn.Module):
    """cos and sin of all layers' queries and keys in one pass: `trope.models.look_context.Speeds` as constants.

    rotaries: of the layers, in their order; at least one.
    """

    freqs0: Tensor
    freqs1: Tensor
    betas: Tensor | None

    def __init__(self, rotaries: list[FrozenRotary]) -> None:
        super().__init__()
        freqs, betas = Speeds(cast("list[Rotation]", rotaries)).constants()
        self.layers = len(rotaries)
        for place, x in enumerate(freqs):
            self.register_buffer(f"freqs{place}", x.clone())
        self.register_buffer("betas", None if betas is None else betas.clone())

    def forward(self, coords_q_CT: Tensor, coords_k_CT: Tensor) -> tuple[Tensor, Tensor]:
        """cos, and sin with its signs, float32 [T, 2, N, 1, D]."""
        if self.betas is None:
            angles = phase(torch.cat((coords_q_CT, coords_k_CT))[:, None], self.freqs0)
        else:
            sides = ((coords_q_CT, self.freqs0), (coords_k_CT, self.freqs1))
            angles = torch.cat([phase(coords[:, None], freqs, self.betas) for coords, freqs in sides], dim=-1)
        angles = angles.float().view(angles.shape[1], 2, self.layers, 1, -1)
        return angles.cos(), angles.sin()


def freeze(model: SequentialRecommender) -> SequentialRecommender:
    """A copy of the model on the CPU, in eval mode, with frozen encodings and intervals; the model stays as it is."""
    frozen = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    place = 0
    for module in list(frozen.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, TRoPE | TORoPE | IndexRoPE):
                setattr(module, name, FrozenRotary(child, place))
                place += 1
            elif isinstance(child, IntervalAttention):
                setattr(module, name, FrozenIntervals(child))
    return frozen


def rotaries_of(model: SequentialRecommender) -> list[FrozenRotary]:
    """The frozen encodings of the layers, without the readout's."""
    return [part for part in model.blocks.modules() if isinstance(part, FrozenRotary)]
