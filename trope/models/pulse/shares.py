"""Shares of counts. Shapes: K rows of counts, V items; column 0 is padding."""

from __future__ import annotations

from torch import Tensor

# Added to each item's count. An item without events is rare, not impossible; with 0.1 the pulse followed single events.
PRIOR = 1.0


def log_shares(counts_KV: Tensor) -> Tensor:
    """log of each item's share of a row's counts, [K, V + 1]: shares compare between days, counts do not."""
    counts_KV = counts_KV.float()
    total_K1 = counts_KV[:, 1:].sum(1, keepdim=True) + PRIOR * (counts_KV.shape[1] - 1)
    return ((counts_KV + PRIOR) / total_K1).log_()
