"""A training batch as flat tokens: two launches from the cursor to everything that the network and the loss read.

Names of the kernel arguments:

- p_items, p_times, p_following: item, time and index of the target of every event (p_following is read if IS_NAMED).
- p_order, p_starts, p_ends: the windows [W], in the order of an epoch, and their first and past-the-last event.
- p_cursor: int64 [1], the number of the batch's first window; moved on by B.
- p_begins, p_first, p_lengths: first event, first token and length of each of ROWS rows; rows past B are spare.
- p_out_items, p_out_times, p_query_times, p_index, p_candidates: the tokens, [T] and [T, C]. p_weight: float32 [1].

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask.
Shape letters: B rows of a batch, W windows, T tokens, C candidates, L positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.batch.reference import BatchShape, Source, Tokens
from trope.kernels.sequence_bounds import SequenceBounds


@triton.jit
def _rows_kernel(
    p_order, p_starts, p_ends, p_cursor, p_begins, p_first, p_lengths, p_weight, W, B, ROWS, T, L, BLOCK: tl.constexpr
):
    """Grid (1,): which events each row holds and which tokens they become."""
    cursor = tl.load(p_cursor)
    o_b = tl.arange(0, BLOCK)
    m_b = (o_b < B) & (cursor + o_b < W)
    b_window = tl.load(p_order + cursor + o_b, mask=m_b, other=0)
    b_begin = tl.load(p_starts + b_window, mask=m_b, other=0)
    b_end = tl.load(p_ends + b_window, mask=m_b, other=1)
    b_length = tl.where(m_b, b_end - b_begin - 1, 0).to(tl.int32)
    total = tl.sum(b_length, axis=0)
    # The rows past the batch share the tokens that are left.
    b_left = T - total - (o_b - B) * L
    b_length = tl.where(o_b < B, b_length, tl.minimum(tl.maximum(b_left, 0), L))
    b_first = tl.cumsum(b_length, axis=0) - b_length
    m_row = o_b < ROWS
    tl.store(p_begins + o_b, b_begin, mask=m_row)
    tl.store(p_first + o_b, b_first.to(tl.int64), mask=m_row)
    tl.store(p_lengths + o_b, b_length.to(tl.int64), mask=m_row)
    tl.store(p_weight, 1.0 / total.to(tl.float32))
    tl.store(p_cursor, cursor + B)


@triton.jit
def _tokens_kernel(
    p_items, p_times, p_following, p_begins, p_first, p_lengths,
    p_out_items, p_out_times, p_query_times, p_index, p_candidates,
    B, C, IS_NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of positions): the tokens of one row."""
    i_b = tl.program_id(0)
    o_l = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, length = tl.load(p_begins + i_b), tl.load(p_lengths + i_b)
    m_write = o_l < length
    m_real = m_write & (i_b < B)
    o_event = begin + o_l
    b_item = tl.load(p_items + o_event, mask=m_real, other=0)
    o_target = tl.load(p_following + o_event, mask=m_real, other=0) if IS_NAMED else o_event + 1
    b_target = tl.load(p_items + o_target, mask=m_real, other=0)
    b_time = tl.load(p_times + o_event, mask=m_real, other=0)
    b_query_time = tl.load(p_times + o_target, mask=m_real, other=0)
    o_t = tl.load(p_first + i_b) + o_l
    tl.store(p_out_items + o_t, b_item, mask=m_write)
    tl.store(p_out_times + o_t, b_time, mask=m_write)
    tl.store(p_query_times + o_t, b_query_time, mask=m_write)
    tl.store(p_index + o_t, o_l, mask=m_write)
    tl.store(p_candidates + o_t * C, b_target, mask=m_write)


def gather_batch(source: Source, plan: BatchShape, cursor: Tensor) -> Tokens:
    """See `trope.kernels.batch.gather_batch`."""
    device = source.items.device
    rows = plan.rows + plan.spare_rows

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    begins, first, lengths = (new(rows, dtype=torch.int64) for _ in range(3))
    weight = new(1, dtype=torch.float32)
    _rows_kernel[(1,)](
        p_order=source.order_W,
        p_starts=source.starts_W,
        p_ends=source.ends_W,
        p_cursor=cursor,
        p_begins=begins,
        p_first=first,
        p_lengths=lengths,
        p_weight=weight,
        W=len(source.order_W),
        B=plan.rows,
        ROWS=rows,
        T=plan.tokens,
        L=plan.max_len,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=4,
    )
    items, index = (new(plan.tokens, dtype=torch.int32) for _ in range(2))
    times, query_times = (new(plan.tokens, dtype=torch.int64) for _ in range(2))
    candidates = new(plan.tokens, plan.candidates, dtype=torch.int32)
    # Tiles were not tuned: both launches together move a few megabytes.
    block = min(256, triton.next_power_of_2(plan.max_len))
    _tokens_kernel[(rows, triton.cdiv(plan.max_len, block))](
        p_items=source.items,
        p_times=source.times,
        p_following=source.times if source.following is None else source.following,
        p_begins=begins,
        p_first=first,
        p_lengths=lengths,
        p_out_items=items,
        p_out_times=times,
        p_query_times=query_times,
        p_index=index,
        p_candidates=candidates,
        B=plan.rows,
        C=plan.candidates,
        IS_NAMED=source.following is not None,
        BLOCK=block,
        num_warps=2,
    )
    bounds = SequenceBounds(first, lengths, plan.max_len, is_complete=True)
    return Tokens(items, times, query_times, index, candidates, bounds, weight)
