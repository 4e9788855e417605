"""HSTU's attention over flat tokens: the one place that decides which implementation runs.

The reference is in attention/reference.py, the kernels in attention/triton.py (forward) and attention/backward.py.

Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trope.kernels.attention import reference as attention_reference
from trope.kernels.attention.reference import time_buckets
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.sequence_bounds import SequenceBounds

# Buckets of all pairs (a byte each, for all blocks) and the bias of all pairs (for all heads of a block) are kept where
# they fit in this many bytes, and formed tile by tile inside the kernels where they do not: memory is linear in the
# length, and short sequences do not pay for that.
CACHE_BYTES = 1 << 28


class Gaps(NamedTuple):
    """Times between queries and keys, shared by all blocks of a forward.

    times_T, query_times_T: int64 seconds. last: the last bucket, for everything longer.
    buckets: of every pair, if kept: int64 [B, L, L] for the reference, uint8 for the kernel.
    runs: of the kernel's buckets, if there will be a backward (attention/runs.py).
    """

    times_T: Tensor
    query_times_T: Tensor
    last: int
    buckets: Tensor | None
    runs: Any = None


def time_gaps(
    times_T: Tensor, query_times_T: Tensor, bounds: SequenceBounds, last: int, like: Tensor, backend: Backend = "auto"
) -> Gaps:
    """Prepare the time bias of one forward. `like`: a tensor of the device and dtype that attention will compute in."""
    if resolve_backend(backend, like) == "torch":
        if bounds.is_padded:
            times, looking_from = (t.view(-1, bounds.max_len) for t in (times_T, query_times_T))
        else:
            places_BL, _ = bounds.places()
            times, looking_from = times_T[places_BL], query_times_T[places_BL]
        return Gaps(times_T, query_times_T, last, time_buckets(looking_from, times, last))
    from trope.kernels.attention import runs as attention_runs
    from trope.kernels.attention import triton as attention_triton

    if last > 255 or len(bounds.lengths_B) * bounds.max_len**2 > CACHE_BYTES:
        return Gaps(times_T, query_times_T, last, None)
    buckets = attention_triton.cache_buckets(times_T, query_times_T, bounds, last)
    runs = attention_runs.cache_runs(buckets, bounds) if torch.is_grad_enabled() else None
    return Gaps(times_T, query_times_T, last, buckets, runs)


def hstu_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    bounds: SequenceBounds,
    n: int,
    position: Tensor | None = None,
    time: Tensor | None = None,
    gaps: Gaps | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """SiLU attention with relative bias, causal, [T, H, D]; differentiable in q, k, v and both bias weights.

    Args:
        q_THD, k_THD, v_THD: flat tokens, any strides but the last.
        n: what attention is divided by; HSTU takes the longest length.
        position: w[2 * max_len - 1] by distance, w[centre + j - i]; or None.
        time: w[last + 1] by bucket of `gaps`; or None.
    """
    if (time is None) != (gaps is None):
        raise ValueError("the time bias needs both its weights and the gaps between times, or neither")
    if resolve_backend(backend, q_THD) == "torch":
        buckets = None if gaps is None else gaps.buckets
        return attention_reference.attention(q_THD, k_THD, v_THD, bounds, n, position, time, buckets)
    from trope.kernels.attention.op import FusedAttention

    return FusedAttention.apply(q_THD, k_THD, v_THD, bounds, n, position, time, gaps, CACHE_BYTES)
