"""The Transformer block as language models have it today: RMSNorm before, softmax attention, SwiGLU, no biases.

Norms have no gain. A gain is a factor for each input of the projection behind the norm, so the projection's weights can
hold it and the block expresses the same. The final norm's gain would not be redundant in this way; outputs become unit
vectors, and HSTU, which has no final norm, does without one too.

What is between the products is fused (trope.kernels): residual sum, dropout and norm; rotation and padding of q, k and
v; SiLU and product of the feed-forward; attention of short histories, while torch's own has the long ones.

Shape letters: B batch, L positions, T tokens, H heads, D head dim, E width, F inner width of the feed-forward.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from trope.config import Config, ModelConfig
from trope.kernels.look import KeysValues
from trope.kernels.norm import norm
from trope.kernels.project import project
from trope.kernels.split_rotate import split_rotate
from trope.kernels.swiglu import swiglu
from trope.models.block import Block, make_rotary, turning
from trope.models.context import Context, Drop, Rotation, Stream
from trope.models.look_context import LookContext
from trope.models.softmax_attention import SoftmaxAttention

# Two thirds of the usual four times the width: SwiGLU has three matrices where others have two.
EXPANSION, _ROUND = 8 / 3, 16


class ModernBlock(Block):
    """Attention and SwiGLU, each behind an RMSNorm and a residual; rotated where the config has a rotary encoding.

    Args:
        config: sizes and dropout.
        rotary: the encoding of this layer, or None.
        number: of the block, from 1; the dropout of its two branches draws from streams of their own.
    """

    can_remember: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, rotary: Rotation | None, number: int) -> None:
        super().__init__()
        self.number = number
        self.attention = ModernAttention(config, rotary, number)
        self.feed_forward = SwiGLU(config.width)
        self.dropout = nn.Dropout(config.dropout)

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        model = config.model
        rotaries = [make_rotary(config.rotary, model.head_dim, time_span) for _ in range(model.blocks)]
        return [cls(model, rotary, number) for number, rotary in enumerate(rotaries, start=1)]

    @classmethod
    def final_norm(cls, config: Config) -> nn.Module:
        return FinalRMSNorm()

    def forward(self, stream: Stream, context: Context) -> Stream:
        """Returns (x + delta, new delta) and how delta is dropped; the next norm fuses all of it."""
        x_TE, normed_TE = sum_and_norm(stream, context.dtype)
        return self._behind(x_TE, self.attention(normed_TE, context), context)

    def remember(self, stream: Stream, context: Context) -> tuple[Stream, KeysValues]:
        x_TE, normed_TE = sum_and_norm(stream, context.dtype)
        attended_TE, kept = self.attention.remember(normed_TE, context)
        return self._behind(x_TE, attended_TE, context), kept

    def look(self, stream: Stream, context: LookContext, past: KeysValues) -> tuple[Stream, KeysValues]:
        x_TE, normed_TE = sum_and_norm(stream, context.dtype)
        attended_TE, own = self.attention.look(normed_TE, context, past)
        x_TE, normed_TE = sum_and_norm(Stream(context.each_moment(x_TE), attended_TE), context.dtype)
        return Stream(x_TE, self.feed_forward(normed_TE)), own

    def keys_values(self, stream: Stream, context: Context | LookContext) -> KeysValues:
        return self.attention.keys_values(sum_and_norm(stream, context.dtype)[1], context)

    def _behind(self, x_TE: Tensor, attended_TE: Tensor, context: Context) -> Stream:
        """The stream behind the feed-forward, from what attention was given, before its norm, and what it gave."""
        stream = self._stream(x_TE, attended_TE, context, 2 * self.number - 1)
        x_TE, normed_TE = sum_and_norm(stream, context.dtype)
        return self._stream(x_TE, self.feed_forward(normed_TE, context), context, 2 * self.number)

    def _stream(self, x_TE: Tensor, delta_TE: Tensor, context: Context, place: int) -> Stream:
        """The stream with a branch's output, dropped here where no kernel will."""
        if not (self.training and self.dropout.p):
            return Stream(x_TE, delta_TE)
        seed = context.kernel_seed()
        if seed is None:
            return Stream(x_TE, self.dropout(delta_TE))
        return Stream(x_TE, delta_TE, Drop(self.dropout.p, seed, place))


def sum_and_norm(stream: Stream, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of a residual stream in its own dtype, and its RMS norm in `out_dtype`; both [T, E]."""
    rate, seed, place = stream.drop or (0.0, None, 0)
    return norm(stream.x_TE, stream.delta_TE, out_dtype=out_dtype, rms=True, dropout=rate, seed=seed, stream=place)


class FinalRMSNorm(nn.Module):
    """The RMS norm of a residual stream's sum."""

    def forward(self, stream: Stream) -> Tensor:
        return sum_and_norm(stream, stream.x_TE.dtype)[1]


class Projection(nn.Module):
    """x W without a bias, in the dtype of x. W is [inputs, outputs]: its gradient then needs no transposition."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        most = 1 / math.sqrt(inputs)  # nn.Linear's
        self.weight = nn.Parameter(torch.empty(inputs, outputs).uniform_(-most, most))

    def forward(self, x_TI: Tensor, context: Context | None = None) -> Tensor:
        """context: may have a copy of the weights in the dtype of x."""
        if context is None:
            return project(x_TI, self.weight)
        return project(x_TI, self.weight, low_IO=context.low(self.weight), late=context.late)


class ModernAttention(SoftmaxAttention):
    """Without biases; q and k are rotated in the kernel that splits. Jagged tokens are padded only where rows are not
    full."""

    qkv: Projection
    out: Projection

    def __init__(self, config: ModelConfig, rotary: Rotation | None, number: int) -> None:
        qkv, out = Projection(config.width, 3 * config.width), Projection(config.width, config.width)
        super().__init__(config.heads, config.dropout, rotary, number, qkv, out)

    def split(self, x_TE: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        slots_T, shape = context.slots(), context.padded_shape
        rows = None if slots_T is None else math.prod(shape)
        turned = turning(self.rotary, context)
        parts = split_rotate(self.qkv(x_TE, context), self.heads, *turned, slots_T, rows, late=context.late)
        q, k, v = (part.unflatten(0, shape) for part in parts)
        return q, k, v

    def project_out(self, y_TE: Tensor, context: Context) -> Tensor:
        return self.out(y_TE, context)

    def keys_values(self, x_TE: Tensor, context: Context | LookContext) -> KeysValues:
        _, weight_k, weight_v = self.qkv.weight.chunk(3, dim=1)
        k, v = (project(x_TE, weight).unflatten(1, (self.heads, -1)) for weight in (weight_k, weight_v))
        return KeysValues(context.rotated_keys(self.rotary, k), v)


class SwiGLU(nn.Module):
    """silu(x A) * (x B), projected back. `inner` is A and B side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = inner_width(width)
        self.inner = Projection(width, 2 * inner)
        self.out = Projection(inner, width)

    def forward(self, x_TE: Tensor, context: Context | None = None) -> Tensor:
        return self.out(swiglu(self.inner(x_TE, context)), context)


def inner_width(width: int) -> int:
    """F of a SwiGLU: a multiple of 16."""
    return -(-int(EXPANSION * width) // _ROUND) * _ROUND
