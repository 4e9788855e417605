"""The Transformer block as language models have it today: RMSNorm before, softmax attention, SwiGLU, no biases.

Shape letters: T tokens, E width, F inner width of the feed-forward.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config, ModelConfig
from trope.kernels.look import KeysValues
from trope.models.block import Block, make_rotary
from trope.models.context import Context, Rotation, Stream
from trope.models.look_context import LookContext
from trope.models.transformer import CausalAttention

EPS = 1e-6  # of the norms; bf16's own would be 0.008
# Two thirds of the usual four times the width: SwiGLU has three matrices where others have two.
EXPANSION, _ROUND = 8 / 3, 16


class ModernBlock(Block):
    """Attention and SwiGLU, each behind an RMSNorm and a residual; rotated where the config has a rotary encoding."""

    can_remember: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, rotary: Rotation | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.width, eps=EPS) for _ in range(2))
        self.attention = CausalAttention(config, rotary, bias=False)
        self.feed_forward = SwiGLU(config.width)
        self.dropout = nn.Dropout(config.dropout)

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        model = config.model
        return [cls(model, make_rotary(config.rotary, model.head_dim, time_span)) for _ in range(model.blocks)]

    @classmethod
    def final_norm(cls, config: Config) -> nn.Module:
        return nn.RMSNorm(config.model.width, eps=EPS)

    def forward(self, stream: Stream, context: Context) -> Stream:
        x_TE = stream.sum()
        return self._behind(x_TE, self.attention(self.norm1(x_TE), context))

    def remember(self, stream: Stream, context: Context) -> tuple[Stream, KeysValues]:
        x_TE = stream.sum()
        attended_TE, kept = self.attention.remember(self.norm1(x_TE), context)
        return self._behind(x_TE, attended_TE), kept

    def look(self, stream: Stream, context: LookContext, past: KeysValues) -> tuple[Stream, KeysValues]:
        x_TE = stream.sum()
        attended_TE, own = self.attention.look(self.norm1(x_TE), context, past)
        return self._behind(context.each_moment(x_TE), attended_TE), own

    def keys_values(self, stream: Stream, context: Context | LookContext) -> KeysValues:
        return self.attention.keys_values(self.norm1(stream.sum()), context)

    def _behind(self, x_TE: Tensor, attended_TE: Tensor) -> Stream:
        """The residual stream from what attention was given, before its norm, and what it gave."""
        x_TE = x_TE + self.dropout(attended_TE)
        return Stream(x_TE + self.dropout(self.feed_forward(self.norm2(x_TE))))


class SwiGLU(nn.Module):
    """silu(x A) * (x B), projected back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = inner_width(width)
        self.inner = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x_TE: Tensor) -> Tensor:
        gate_TF, value_TF = self.inner(x_TE).chunk(2, dim=-1)
        return self.out(F.silu(gate_TF) * value_TF)


def inner_width(width: int) -> int:
    """F of a SwiGLU: a multiple of 16."""
    return -(-int(EXPANSION * width) // _ROUND) * _ROUND
