"""What a block is, and the rotary encoding it may have.

To add a block: subclass `Block` in a file of its own, name it in `trope/models/blocks.py`, and say in
`trope/config.py` what it allows (`BLOCKS`) and which preset uses it. Nothing else knows a block by name, but for
`trope/models/cost.py`, which may say what it costs. A block with keys and values can also have `remember`, `look` and
`keys_values`, and say so (`can_remember`): one encode then serves many moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor, nn

from trope.config import Config, RotaryConfig
from trope.kernels.look import KeysValues, look_softmax
from trope.kernels.silu_rotate import Turns
from trope.models.context import Context, Rotation, Stream
from trope.models.look_context import LookContext
from trope.rotary import IndexRoPE, TORoPE, TRoPE


class Block(nn.Module, ABC):
    """One layer over flat tokens [T, E]. It is causal, and asks the `Context` for what it needs.

    Padding needs no mask: a valid position only looks at earlier ones, and what padding computes is never read.
    """

    adds_positions: ClassVar[bool] = True
    """Whether learned positions are added to the network's input."""
    can_remember: ClassVar[bool] = False
    """Whether the block has `remember`, `look` and `keys_values`, which `trope.models.memory` needs."""

    @classmethod
    @abstractmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        """All blocks of a model, the first one first; they may share tables."""

    @classmethod
    def final_norm(cls, config: Config) -> nn.Module | None:
        """The norm after the last block, if there is one: from the residual `Stream` to outputs [T, E]."""
        return None

    @abstractmethod
    def forward(self, stream: Stream, context: Context) -> Stream:
        """The residual stream behind this block."""

    def remember(self, stream: Stream, context: Context) -> tuple[Stream, KeysValues]:
        """What `forward` returns, and the keys and values [T, H, D] that it attended to."""
        raise ValueError(self.refusal())

    def look(self, stream: Stream, context: LookContext, past: KeysValues) -> tuple[Stream, KeysValues]:
        """`remember` for tokens that follow remembered ones.

        stream: of each token, or once for all moments of a history (`LookContext.each_moment`).
        past: keys and values of the history's earlier tokens, [B, H, S, D].
        """
        raise ValueError(self.refusal())

    def step(self, stream: Stream, context: LookContext, kept: KeysValues) -> Stream:
        """`look` for one pending event of each history at one moment; its key and value become the last of `kept`.

        kept: [B, H, S + 1, D], the settled events' and a place for the new one.
        """
        past = KeysValues(kept.keys[:, :, :-1], kept.values[:, :, :-1])
        stream, own = self.look(stream, context, past)
        kept.keys[:, :, -1], kept.values[:, :, -1] = own
        return stream

    def keys_values(self, stream: Stream, context: Context | LookContext) -> KeysValues:
        """The keys and values of `remember` or `look` alone: all that is kept of the last block."""
        raise ValueError(self.refusal())

    def refusal(self) -> str:
        """Why it cannot remember, and what to do."""
        return (
            f"{type(self).__name__} cannot remember: it has no keys and values that later moments could reuse; use "
            "encode_last, and ask can_remember beforehand"
        )

    def __call__(self, stream: Stream, context: Context) -> Stream:
        return super().__call__(stream, context)


def make_rotary(config: RotaryConfig, head_dim: int, time_span: tuple[int, int]) -> Rotation | None:
    """The rotary encoding of one layer. Values are not checked again: the data were, when they were prepared."""
    if config.kind == "trope":
        return TRoPE(
            head_dim, time_span=time_span if config.conditioning == "span" and config.position == "times" else None,
            position=config.position, learnable=config.learnable, multiscale=config.multiscale, shifted=config.shifted,
            conjugate=config.conjugate, rotate_query=config.rotate_query, rotate_key=config.rotate_key,
            share_alpha=config.share_alpha, bank=config.bank, conditioning=config.conditioning, phase=config.phase,
            check_values=False,
        )  # fmt: skip
    if config.kind == "torope":
        return TORoPE(head_dim, learnable=config.learnable, check_values=False)
    return IndexRoPE(head_dim) if config.kind == "index" else None


def turning(rotary: Rotation | None, context: Context) -> tuple[Tensor | None, Tensor | None, Turns | None, bool]:
    """Coordinates of q and k, how fast planes turn, and whether they are interleaved; for kernels that rotate."""
    if rotary is None:
        return None, None, None, True
    # These kernels subtract the origin of T-RoPE's time themselves.
    uncentred = isinstance(rotary, TRoPE) and rotary.is_linear
    return *context.coordinates(rotary, uncentred), rotary.turns(), rotary.layout == "interleaved"


def rotated(rotary: Rotation | None, q_BLHD: Tensor, k_BLHD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """q and k of padded sequences, rotated where there is an encoding."""
    if rotary is None:
        return q_BLHD, k_BLHD
    coords_q, coords_k = (context.padded(coords.T).movedim(-1, 0) for coords in context.coordinates(rotary))
    return rotary.rotate(q_BLHD, k_BLHD, coords_q, coords_k)


def look_from(
    qkv_TF: Tensor, heads: int, rotary: Rotation | None, context: LookContext, past: KeysValues
) -> tuple[Tensor, KeysValues]:
    """Softmax attention of pending tokens: its output [T, E], and their keys and values [T, H, D].

    qkv_TF: the projections q, k and v side by side, of each token or once for all moments. past: [B, H, S, D].
    """
    qkv_T3HD = context.each_moment(qkv_TF).unflatten(1, (3, heads, -1))
    q, k = context.rotated(rotary, qkv_T3HD[:, :2])
    own = KeysValues(k, qkv_T3HD[:, 2])
    return look_softmax(q, own, past, context.shape, context.pending.seen_BGK).flatten(1), own
