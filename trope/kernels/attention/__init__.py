"""HSTU's attention over flat tokens: the one place that decides which implementation runs.

reference.py is the ground truth. triton.py is the fused forward and backward.py its backward; bias_gradient.py and
runs.py sum the gradients of the bias weights. arguments.py names every kernel argument, tiles.py holds the shared
device functions.

Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.attention import reference
from trope.kernels.attention.gaps import Gaps
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.sequence_bounds import SequenceBounds

__all__ = ["Gaps", "hstu_attention", "time_gaps"]

# Buckets of all pairs (a byte each, for all blocks) and the bias of all pairs (for all heads of a block) are kept where
# they fit in this many bytes. Elsewhere the kernels form them tile by tile, so memory is linear in the length, and
# short sequences do not pay for that. 256 MiB keeps both at batch 128 and 512 positions; the budget itself was not
# tuned.
CACHE_BYTES = 1 << 28


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
        return Gaps(times_T, query_times_T, last, reference.time_buckets(looking_from, times, last))
    from trope.kernels.attention.runs import cache_runs  # only now: CPU users need no Triton
    from trope.kernels.attention.triton import cache_buckets

    if last > 255 or len(bounds.lengths_B) * bounds.max_len**2 > CACHE_BYTES:
        return Gaps(times_T, query_times_T, last, None)
    buckets = cache_buckets(times_T, query_times_T, bounds, last)
    runs = cache_runs(buckets, bounds) if torch.is_grad_enabled() else None
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
        return reference.attention(q_THD, k_THD, v_THD, bounds, n, position, time, buckets)
    from trope.kernels.attention.op import FusedAttention

    return FusedAttention.apply(q_THD, k_THD, v_THD, bounds, n, position, time, gaps, CACHE_BYTES)
