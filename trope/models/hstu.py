"""The HSTU block, after Meta's public research code: SiLU attention without softmax, gated, no feed-forward.

Shape letters: T tokens, H heads, D head dim, E width, F = 4 * H * D.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config, ModelConfig
from trope.kernels.attention import hstu_attention
from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.look import KeysValues, look_silu, step_silu
from trope.kernels.norm import EPS, gate, norm
from trope.kernels.project import project
from trope.kernels.silu_rotate import silu_rotate
from trope.models.block import Block, make_rotary, turning
from trope.models.context import Context, Rotation, Stream
from trope.models.look_context import LookContext

LAST_BUCKET = 128  # of the time bias, for every gap that is longer than the buckets before it


class HSTUBlock(Block):
    """LayerNorm, one projection to u, v, q, k, SiLU, rotation, attention with bias, norm, gate by u, projection.

    n, which divides the attention, is the constant `max_len`, as in Meta's public code: an output must not depend on
    how long the other sequences of a batch are. Tokens may be padded or jagged.

    Args:
        config: sizes, biases, dropout and the gate's floor.
        rotary: the encoding of this layer, or None.
        number: of the block, from 1; dropout draws from a stream of this number.
    """

    can_remember: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, rotary: Rotation | None, number: int) -> None:
        super().__init__()
        self.heads, self.max_len, self.number = config.heads, config.max_len, number
        self.head_dim = config.head_dim
        # The floor is that of the sum, which attention divides by n.
        self.gate_eps = EPS if config.floor is None else (config.floor / config.max_len) ** 2
        inner = config.heads * config.head_dim
        self.uvqk = nn.Parameter(torch.empty(config.width, 4 * inner).normal_(0, 0.02))
        self.bias = RelativeBias(config)
        self.rotary = rotary
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(inner, config.width)
        nn.init.xavier_uniform_(self.out.weight)

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        model = config.model
        rotaries = [make_rotary(config.rotary, model.head_dim, time_span) for _ in range(model.blocks)]
        return [cls(model, rotary, number) for number, rotary in enumerate(rotaries, start=1)]

    def forward(self, stream: Stream, context: Context) -> Stream:
        """Returns (x + delta, new delta); the next norm fuses the sum."""
        return self.remember(stream, context)[0]

    def remember(self, stream: Stream, context: Context) -> tuple[Stream, KeysValues]:
        if self.bias.time is not None:
            context.begin_gaps(LAST_BUCKET, (self.heads, self.head_dim))
        x_TE, normed_TE = norm(stream.x_TE, stream.delta_TE, out_dtype=context.dtype)
        pre_TF = project(normed_TE, self.uvqk, low_IO=context.low(self.uvqk), late=context.late)
        buffer = GradientBuffer(pre_TF.shape[1])
        u, v, q, k = self.split(pre_TF, context, buffer)
        gaps = None if self.bias.time is None else context.gaps(LAST_BUCKET)
        bias = (self.bias.position, self.bias.time, gaps)
        y_THD = hstu_attention(q, k, v, context.bounds, self.max_len, *bias, late=context.late)
        dropout = self.dropout.p if self.training else 0.0
        seed = context.kernel_seed() if dropout else None
        gated_TF = gate(y_THD.flatten(1), u.flatten(1), dropout, seed, self.number, self.gate_eps, buffer)
        if seed is None:  # the kernel did not drop
            gated_TF = self.dropout(gated_TF)
        low, low_bias = context.low(self.out.weight), context.low(self.out.bias)
        low = None if low is None else low.t()
        delta_TE = project(
            gated_TF, self.out.weight.t(), self.out.bias, low_IO=low, low_bias_O=low_bias, late=context.late
        )
        return Stream(x_TE, delta_TE), KeysValues(k, v)

    def look(self, stream: Stream, context: LookContext, past: KeysValues) -> tuple[Stream, KeysValues]:
        x_TE, u_TF, q, own = self._pending(stream, context)
        bias = self.bias.of_look(context)
        y_THD = look_silu(q, own, past, context.shape, context.pending.seen_BGK, self.max_len, bias)
        return self._gated(x_TE, y_THD, u_TF), own

    def step(self, stream: Stream, context: LookContext, kept: KeysValues) -> Stream:
        x_TE, u_TF, q, own = self._pending(stream, context)
        kept.keys[:, :, -1], kept.values[:, :, -1] = own
        bias = self.bias.of_look(context)
        y_THD = step_silu(q, kept, self.max_len, None if bias is None else bias.view(len(q), -1))
        return self._gated(x_TE, y_THD, u_TF)

    def _pending(self, stream: Stream, context: LookContext) -> tuple[Tensor, Tensor, Tensor, KeysValues]:
        """Of each pending token: the stream's sum, u as it was projected, the query, and its key and value."""
        x_TE, normed_TE = norm(stream.x_TE, stream.delta_TE, out_dtype=context.dtype)
        pre_TF = context.each_moment(project(normed_TE, self.uvqk))
        inner = pre_TF.shape[1] // 4
        vqk_T3HD = F.silu(pre_TF[:, inner:]).view(len(pre_TF), 3, self.heads, -1)
        q, k = context.rotated(self.rotary, vqk_T3HD[:, 1:])
        return context.each_moment(x_TE), pre_TF[:, :inner], q, KeysValues(k, vqk_T3HD[:, 0])

    def _gated(self, x_TE: Tensor, y_THD: Tensor, u_TF: Tensor) -> Stream:
        gated_TF = gate(y_THD.flatten(1), u_TF, eps=self.gate_eps)
        return Stream(x_TE, project(gated_TF, self.out.weight.t(), self.out.bias))

    def keys_values(self, stream: Stream, context: Context | LookContext) -> KeysValues:
        _, normed_TE = norm(stream.x_TE, stream.delta_TE, out_dtype=context.dtype)
        _, weight_v, _, weight_k = self.uvqk.chunk(4, dim=1)
        v, k = (F.silu(project(normed_TE, weight)) for weight in (weight_v, weight_k))
        v, k = (x.view(len(x), self.heads, -1) for x in (v, k))
        return KeysValues(context.rotated_keys(self.rotary, k), v)

    def split(
        self, pre_TF: Tensor, context: Context, buffer: GradientBuffer | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u as it was projected, and v, q, k after SiLU, q and k rotated.

        buffer: where the backward of gate and SiLU put their gradients side by side.
        """
        return silu_rotate(pre_TF, self.heads, *turning(self.rotary, context), buffer, late=context.late)


class RelativeBias(nn.Module):
    """A learned number for each distance in positions and each bucket of time, per layer, shared by heads.

    The query's moment is the next event's time, as everywhere here: the bias was shifted before T-RoPE was.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        distances = 2 * config.max_len - 1
        self.position = nn.Parameter(torch.empty(distances).normal_(0, 0.02)) if config.position_bias else None
        self.time = nn.Parameter(torch.empty(LAST_BUCKET + 1).normal_(0, 0.02)) if config.time_bias else None

    def of_look(self, context: LookContext) -> Tensor | None:
        """What is added to the scores of pending tokens, [B, M, G, K]; M or G is 1 where all have the same."""
        by_place = by_time = None
        if self.position is not None:
            by_place = self.position.take((len(self.position) - 1) // 2 + context.pending.distances_BGK)[:, None]
        if self.time is not None:
            by_time = self.time.take(context.buckets(LAST_BUCKET))
        if by_place is None or by_time is None:
            return by_time if by_place is None else by_place
        return by_place + by_time
