"""A training batch as flat tokens in plain PyTorch: the ground truth for the kernels in batch/triton.py.

Shape letters: B rows of a batch, W windows, T tokens, C candidates, L positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trope.kernels.sequence_bounds import SequenceBounds


class Source(NamedTuple):
    """Where batches are cut from: all events one behind the other, and the windows, in the order of an epoch.

    A window is the events starts[w] .. ends[w]; the last of them is a target only. The target of an event is the one
    behind it, or the one that `following` names.
    """

    items: Tensor  # int32
    times: Tensor  # int64
    starts_W: Tensor  # int64
    ends_W: Tensor  # int64
    order_W: Tensor  # int64
    following: Tensor | None = None  # int64, one for each event


class BatchShape(NamedTuple):
    """The fixed shape of a batch.

    rows: B. max_len: L. tokens: T, at least what the rows hold. candidates: C, columns for the loss.
    spare_rows: rows without targets that take up the tokens which the batch leaves over, up to L each, so that every
        token belongs to some row.
    """

    rows: int
    max_len: int
    tokens: int
    candidates: int
    spare_rows: int = 0


class Tokens(NamedTuple):
    """A batch, rows one behind the other. What the batch leaves over has item 0, target 0 and time 0."""

    items_T: Tensor  # int32
    times_T: Tensor  # int64
    query_times_T: Tensor  # int64, the target's
    index_T: Tensor  # int32, place in the row
    candidates_TC: Tensor  # int32; column 0 is the target, the others are not written
    bounds: SequenceBounds
    weight: Tensor  # [1] float32, one over the number of targets


def gather_batch(source: Source, plan: BatchShape, cursor: Tensor) -> Tokens:
    """The batch that begins at window number `cursor` ([1] int64) of the order; moves the cursor on."""
    device = source.items.device
    number_B = cursor + torch.arange(plan.rows, device=device)
    exists_B = number_B < len(source.order_W)
    window_B = source.order_W[number_B.clamp(max=len(source.order_W) - 1)]
    begins_B = source.starts_W[window_B]
    lengths_B = torch.where(exists_B, source.ends_W[window_B] - begins_B - 1, 0)
    cursor += plan.rows
    total = lengths_B.sum()
    spare = torch.arange(plan.spare_rows, device=device) * plan.max_len
    spare_lengths = (plan.tokens - total - spare).clamp(0, plan.max_len)
    lengths = torch.cat((lengths_B, spare_lengths))
    bounds = SequenceBounds(lengths.cumsum(0) - lengths, lengths, plan.max_len, is_complete=True)
    token_T = torch.arange(plan.tokens, device=device)
    row_T = bounds.row_of(token_T)
    index_T = token_T - bounds.starts_B[row_T]
    is_real_T = row_T < plan.rows
    event_T = torch.where(is_real_T, begins_B[row_T.clamp(max=plan.rows - 1)] + index_T, 0)
    following_T = event_T + 1 if source.following is None else source.following[event_T]
    following_T = torch.where(is_real_T, following_T, 0)
    candidates_TC = torch.zeros((plan.tokens, plan.candidates), dtype=torch.int32, device=device)
    candidates_TC[:, 0] = torch.where(is_real_T, source.items[following_T], 0)
    return Tokens(
        torch.where(is_real_T, source.items[event_T], 0).int(),
        torch.where(is_real_T, source.times[event_T], 0),
        torch.where(is_real_T, source.times[following_T], 0),
        index_T.int(),
        candidates_TC,
        bounds,
        (1 / total.float())[None],
    )
