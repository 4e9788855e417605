"""HSTU's attention over flat tokens: the one place that decides which implementation runs.

reference.py is the ground truth. triton.py is the fused forward and backward.py its backward, of which kept.py is the
part that reads kept score gradients; bias_gradient.py and runs.py sum the gradients of the bias weights. arguments.py
names every kernel argument, tiles.py holds the shared device functions.

Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.attention import reference
from trope.kernels.attention.gaps import Gaps
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.limits import AMPERE, HOPPER, shared_memory
from trope.kernels.sequence_bounds import SequenceBounds

__all__ = ["Gaps", "hstu_attention", "time_gaps"]

# Buckets of all pairs (a byte each, for all blocks) and the bias of all pairs (for all heads of a block) are kept where
# they fit in this many bytes; large GPUs keep a larger bias (attention/op.py, KEPT_SHARE). A bias that is not kept is
# written again for the backward pass. Beyond that the kernels form both tile by tile, so memory is linear in the
# length, and short sequences do not pay for it. 256 MiB keeps the buckets of 16 sequences of 4,096 positions, and an
# eighth more those of the rows that a batch has for padding. The budget itself was not tuned.
CACHE_BYTES = (1 << 28) + (1 << 25)
MOST_SEQUENCES = 65_535  # the third axis of a launch has no more programs

logger = logging.getLogger("trope")


def time_gaps(
    times_T: Tensor, query_times_T: Tensor, bounds: SequenceBounds, last: int, like: Tensor, backend: Backend = "auto",
    heads: tuple[int, int] | None = None,
) -> Gaps:  # fmt: skip
    """Prepare the time bias of one forward.

    Args:
        like: a tensor of the device and dtype that attention will compute in.
        heads: how many there will be, and how wide, if known: some need less prepared.
    """
    if resolve_backend(backend, like) == "torch":
        if bounds.is_padded:
            times, looking_from = (t.view(-1, bounds.max_len) for t in (times_T, query_times_T))
        else:
            places_BL, _ = bounds.places()
            times, looking_from = times_T[places_BL], query_times_T[places_BL]
        return Gaps(times_T, query_times_T, last, reference.time_buckets(looking_from, times, last))
    from trope.kernels.attention import narrow  # only now: CPU users need no Triton
    from trope.kernels.attention.arguments import kept_bytes, passing_bytes
    from trope.kernels.attention.runs import cache_runs
    from trope.kernels.attention.triton import cache_buckets

    _check_number(bounds)
    # Kernels read times one behind the other, but a column of a table of events is strided.
    times_T, query_times_T = times_T.contiguous(), query_times_T.contiguous()
    if last > 255 or len(bounds.lengths_B) * bounds.max_len**2 > CACHE_BYTES:
        return Gaps(times_T, query_times_T, last, None)
    buckets = cache_buckets(times_T, query_times_T, bounds, last)
    needs_runs = torch.is_grad_enabled()
    if needs_runs and heads is not None and narrow.is_made_for(*heads, like.dtype, like.device, bounds, last):
        needs_runs = kept_bytes(heads[0], like, bounds) > passing_bytes(CACHE_BYTES, like.device)  # as in op.py
    runs = cache_runs(buckets, bounds) if needs_runs else None
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
    late: Late = IN_PLACE,
) -> Tensor:
    """SiLU attention with relative bias, causal, [T, H, D]; differentiable in q, k, v and both bias weights.

    Args:
        q_THD, k_THD, v_THD: flat tokens, any strides but the last.
        n: what attention is divided by; HSTU takes the longest length.
        position: w[2 * max_len - 1] by distance, w[centre + j - i]; or None.
        time: w[last + 1] by bucket of `gaps`; or None.
        late: where the backward pass may add up the gradients of both.
    """
    if (time is None) != (gaps is None):
        raise ValueError("the time bias needs both its weights and the gaps between times, or neither")
    chosen = resolve_backend(backend, q_THD)
    learns = torch.is_grad_enabled()
    if chosen == "triton" and backend == "auto" and _is_too_wide(q_THD.shape[2], q_THD.dtype, q_THD.device, learns):
        chosen = "torch"
        if gaps is not None:  # the kernels keep buckets in another form
            gaps = time_gaps(gaps.times_T, gaps.query_times_T, bounds, gaps.last, like=q_THD, backend="torch")
    if chosen == "torch":
        buckets = None if gaps is None else gaps.buckets
        return reference.attention(q_THD, k_THD, v_THD, bounds, n, position, time, buckets)
    from trope.kernels.attention.op import FusedAttention

    _check_number(bounds)
    late = late.to(position, time)
    return FusedAttention.apply(q_THD, k_THD, v_THD, bounds, n, position, time, gaps, CACHE_BYTES, learns, late)


def _check_number(bounds: SequenceBounds) -> None:
    """Refuse more sequences than a launch takes; CUDA would only say "invalid argument"."""
    if len(bounds.lengths_B) > MOST_SEQUENCES:
        raise ValueError(
            f"attention on a GPU takes at most {MOST_SEQUENCES:,} histories at a time, got {len(bounds.lengths_B):,}; "
            "encode fewer at a time, or lower train.batch"
        )


def widest_head(shared: int, dtype: torch.dtype, learns: bool) -> int:
    """Bytes of the widest head that the kernels take, its numbers rounded up to a power of two; 0: none.

    shared: bytes of shared memory that a program may have. learns: whether there will be a backward pass.
    """
    if shared >= HOPPER or (shared >= AMPERE and not learns):
        return 512
    is_wide = dtype.itemsize > 2 and shared < AMPERE
    return 0 if is_wide and learns else 256


@functools.cache
def _is_too_wide(head_dim: int, dtype: torch.dtype, device: torch.device, learns: bool) -> bool:
    """Whether heads do not fit the kernels on this GPU; says so once."""
    most = widest_head(shared_memory(device), dtype, learns)
    is_too_wide = (1 << (head_dim - 1).bit_length()) * dtype.itemsize > most
    if is_too_wide:
        logger.warning("heads of %d numbers in %s%s are wider than the attention kernels take on this GPU, %d: plain "
                       "PyTorch computes them, slower and in memory that grows with the square of the length", head_dim,
                       dtype, " with a gradient" if learns else "", most // dtype.itemsize)  # fmt: skip
    return is_too_wide
