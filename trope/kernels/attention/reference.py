"""HSTU's attention in plain PyTorch: the ground truth for the fused kernel, and the path that CPUs take.

y_i = 1/n * sum over j <= i of silu(q_i . k_j + w_position[j - i] + w_time[bucket(t_query_i - t_j)]) v_j: no softmax, no
1/sqrt(d). Memory is quadratic in the length here; the kernel's is not.

Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.sequence_bounds import SequenceBounds

BUCKET_WIDTH = 0.301  # of ln(seconds), as in the public code; 128 buckets of it reach far past any log


def time_buckets(query_times_BL: Tensor, times_BL: Tensor, last: int) -> Tensor:
    """Bucket of the time from each key to each query, int64 [B, L, L]: int(ln(max(|dt|, 1)) / 0.301), at most `last`.

    The gap is formed from int64 seconds, so neither it nor its logarithm suffers from the size of a timestamp.
    """
    gaps = (query_times_BL[:, :, None] - times_BL[:, None, :]).abs().clamp(min=1)
    return (gaps.float().log() / BUCKET_WIDTH).long().clamp(max=last)


def bias(length: int, position: Tensor | None, time: Tensor | None, buckets_BLL: Tensor | None) -> Tensor | None:
    """[L, L] or [B, L, L] from the position weights [2 * max_len - 1] and the time weights [K + 1]; None of neither."""
    total: Tensor | None = None
    if position is not None:
        index = torch.arange(length, device=position.device)
        total = position[(len(position) - 1) // 2 + index[None, :] - index[:, None]]
    if time is not None:
        assert buckets_BLL is not None
        # A gather from one copy of the weights per query: its gradient adds up within a row and then over rows, where
        # indexing would sort millions of entries into 129 sums.
        rows = buckets_BLL.flatten(0, 1)
        by_time = time.expand(len(rows), -1).gather(1, rows).view_as(buckets_BLL)
        total = by_time if total is None else total + by_time
    return total


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    bounds: SequenceBounds,
    n: int,
    position: Tensor | None = None,
    time: Tensor | None = None,
    buckets_BLL: Tensor | None = None,
) -> Tensor:
    """y [T, H, D]; zero for tokens outside any sequence."""
    B, L = len(bounds.lengths_B), bounds.max_len
    if bounds.is_padded:
        q, k, v = (x.view(B, L, *x.shape[1:]) for x in (q_THD, k_THD, v_THD))
    else:
        places_BL, exists_BL = bounds.places()
        q, k, v = (x[places_BL] for x in (q_THD, k_THD, v_THD))
    scores_BHLL = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    added = bias(L, position, time, buckets_BLL)
    if added is not None:
        scores_BHLL = scores_BHLL + (added if added.dim() == 2 else added[:, None])
    causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
    attention_BHLL = (F.silu(scores_BHLL) / n).masked_fill(~causal, 0.0)
    y_BLHD = (attention_BHLL.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)
    if bounds.is_padded:
        return y_BLHD.reshape(B * L, *q_THD.shape[1:])
    return torch.zeros_like(q_THD).index_put((places_BL[exists_BL],), y_BLHD[exists_BL])
