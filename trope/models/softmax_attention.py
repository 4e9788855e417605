"""Causal softmax attention between two projections: what SASRec's block and the modern one share.

Shape letters: B batch, L positions, T tokens, S settled events, H heads, D head dim, E width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from trope.kernels.causal_attention import causal_attention
from trope.kernels.look import KeysValues
from trope.models.block import look_from
from trope.models.context import Context, Rotation
from trope.models.look_context import LookContext

_STREAM = 1 << 16  # of dropout: the blocks' own come before


class SoftmaxAttention(nn.Module, ABC):
    """Attention between two projections; a subclass says how q, k and v are split and rotated.

    Args:
        number: of the block, from 1; the kernel's dropout draws from a stream of its own.
        qkv, out: the projections, to three times the width and back.
    """

    def __init__(
        self, heads: int, dropout: float, rotary: Rotation | None, number: int, qkv: nn.Module, out: nn.Module
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.stream = heads, dropout, _STREAM + number
        self.qkv, self.out, self.rotary = qkv, out, rotary

    @abstractmethod
    def split(self, x_TE: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of padded sequences, [B, L, H, D], q and k rotated."""

    @abstractmethod
    def keys_values(self, x_TE: Tensor, context: Context | LookContext) -> KeysValues:
        """Keys and values alone, [T, H, D]."""

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        return self._attend(*self.split(x_TE, context), context)

    def remember(self, x_TE: Tensor, context: Context) -> tuple[Tensor, KeysValues]:
        """What `forward` returns, and keys and values, [T, H, D]."""
        q, k, v = self.split(x_TE, context)
        return self._attend(q, k, v, context), KeysValues(context.flat(k), context.flat(v))

    def look(self, x_TE: Tensor, context: LookContext, past: KeysValues) -> tuple[Tensor, KeysValues]:
        """`remember` for pending tokens. past: [B, H, S, D]."""
        y_TE, own = look_from(self.qkv(x_TE), self.heads, self.rotary, context, past)
        return self.out(y_TE), own

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        seed = context.kernel_seed() if dropout else None
        y_BLHD = causal_attention(q, k, v, dropout, seed, self.stream)
        return self.project_out(context.flat(y_BLHD.flatten(2)), context)

    def project_out(self, y_TE: Tensor, context: Context) -> Tensor:
        """The projection back."""
        return self.out(y_TE)
