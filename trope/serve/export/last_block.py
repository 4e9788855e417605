"""The last block of `encode`, at the last event of each history: no other output of that block is read.

Keys and values are needed of all events. The other events' queries, gates, projections back and feed-forwards are left
out; they are at least half of a block's products.

Shape letters: B histories, L events, T = B L tokens, E width.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.look import KeysValues
from trope.models.block import Block
from trope.models.context import Stream
from trope.models.transformer import TiSASRecBlock
from trope.serve.export.contexts import ProgramContext, ProgramLookContext
from trope.serve.export.intervals import FrozenIntervals


def look_from_last(
    block: Block, stream: Stream, last_B: Tensor, context: ProgramContext, look: ProgramLookContext
) -> Stream:
    """The stream behind a block that can remember, at the tokens last_B. look: of these tokens."""
    keys, values = (x.unflatten(0, context.padded_shape).transpose(1, 2) for x in block.keys_values(stream, context))
    return block.look(rows_of(stream, last_B), look, KeysValues(keys, values))[0]


def intervals_from_last(block: TiSASRecBlock, stream: Stream, last_B: Tensor, context: ProgramContext) -> Stream:
    """The stream behind TiSASRec's block, at the tokens last_B."""
    assert isinstance(block.attention, FrozenIntervals)
    x_TE = stream.sum()
    x_BE = x_TE[last_B] + block.attention.of_last(block.norm1(x_TE), last_B, context)
    return Stream(x_BE + block.feed_forward(block.norm2(x_BE)))


def rows_of(stream: Stream, rows: Tensor) -> Stream:
    """Some tokens of a residual stream."""
    return Stream(stream.x_TE[rows], None if stream.delta_TE is None else stream.delta_TE[rows])
