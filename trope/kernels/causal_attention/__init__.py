"""Causal softmax attention of padded sequences. Decides what runs.

Long sequences take torch's fused kernels. Their backward is three launches, made for sequences of thousands of
positions; up to 64 positions a head of a sequence is one tile, and one launch each way does all of it.

Shape letters: B batch, L positions, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.causal_attention import reference

# A tile's positions and numbers of a head. Larger ones would spill registers.
MOST_POSITIONS, MOST_DIMS = 64, 128


def causal_attention(
    q_BLHD: Tensor,
    k_BLHD: Tensor,
    v_BLHD: Tensor,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the positions up to each query's own, [B, L, H, D]; differentiable.

    Args:
        dropout: rate at which weights of the softmax are dropped.
        seed, stream: int64 [1] and a number, which decide what is dropped in short sequences; torch's generator does in
            long ones, and without a seed.
        backend: "auto" takes the kernel for short sequences in 16 bits, the others for short sequences of any dtype.
    """
    L, D = q_BLHD.shape[1], q_BLHD.shape[3]
    is_short = L <= MOST_POSITIONS and D <= MOST_DIMS and (dropout == 0 or seed is not None)
    if not is_short or (backend == "auto" and q_BLHD.dtype not in (torch.bfloat16, torch.float16)):
        return reference.by_torch(q_BLHD, k_BLHD, v_BLHD, dropout)
    if resolve_backend(backend, q_BLHD) == "torch":
        return reference.causal_attention(q_BLHD, k_BLHD, v_BLHD, dropout, seed, stream)
    from trope.kernels.causal_attention import triton as fused  # only now: CPU users need no Triton

    return fused.causal_attention(q_BLHD, k_BLHD, v_BLHD, dropout, seed, stream)
