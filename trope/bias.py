"""HSTU's relative attention bias: by position, and by the bucketed time between the query's moment and a key.

The query's moment is the next event's time, as everywhere here (`query_times`): the bias was shifted before T-RoPE was.

Shape letters: B batch, L positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BUCKET_WIDTH = 0.301  # of ln(seconds); 128 buckets of it reach far past any log


def time_buckets(query_times_BL: Tensor, times_BL: Tensor, last: int) -> Tensor:
    """Bucket of the time from each key to each query, int64 [B, L, L]: int(ln(max(|dt|, 1)) / 0.301), at most `last`.

    The gap is formed from int64 seconds, so neither it nor its logarithm suffers from the size of a timestamp.
    """
    gaps = (query_times_BL[:, :, None] - times_BL[:, None, :]).abs().clamp(min=1)
    return (gaps.float().log() / BUCKET_WIDTH).long().clamp(max=last)


class RelativeBias(nn.Module):
    """A learned number for each distance in positions and each bucket of time, per layer, shared by heads.

    Args:
        max_len: L; positions have 2L - 1 distances.
        buckets: of time; one weight more, for everything longer.
        position, time: which of the two there is.
    """

    def __init__(self, max_len: int, buckets: int, *, position: bool, time: bool) -> None:
        super().__init__()
        self.max_len = max_len
        self.position = nn.Parameter(torch.empty(2 * max_len - 1).normal_(0, 0.02)) if position else None
        self.time = nn.Parameter(torch.empty(buckets + 1).normal_(0, 0.02)) if time else None

    def forward(self, length: int, buckets_BLL: Tensor | None) -> Tensor | None:
        """Bias [L, L] or [B, L, L], or None if there is neither part."""
        bias: Tensor | None = None
        if self.position is not None:
            index = torch.arange(length, device=self.position.device)
            bias = self.position[self.max_len - 1 + index[None, :] - index[:, None]]
        if self.time is not None:
            assert buckets_BLL is not None
            # A gather from one copy of the weights per query: its gradient adds up within a row and then over rows,
            # where indexing would sort millions of entries into 129 sums, most of a training step on a GPU.
            rows = buckets_BLL.flatten(0, 1)
            by_time = self.time.expand(len(rows), -1).gather(1, rows).view_as(buckets_BLL)
            bias = by_time if bias is None else bias + by_time
        return bias
