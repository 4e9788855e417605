"""Causal softmax attention by torch: the ground truth for the kernel, the CPU path, and the path of long sequences.

Shape letters: B batch, L positions, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.random.reference import keep_mask


def by_torch(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, dropout: float = 0.0) -> Tensor:
    """torch's fused attention, [B, L, H, D]."""
    # Transposed views, which torch's kernels take as they are; their output is a transposed view as well.
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)


def causal_attention(
    q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, dropout: float = 0.0, seed: Tensor | None = None, stream: int = 0
) -> Tensor:
    """See `trope.kernels.causal_attention.causal_attention`."""
    if dropout == 0 or seed is None:
        return by_torch(q_BLHD, k_BLHD, v_BLHD, dropout)
    B, L, H, D = q_BLHD.shape
    causal_LL = torch.ones(L, L, dtype=torch.bool, device=q_BLHD.device).tril()
    scores_BHLL = torch.einsum("blhd,bmhd->bhlm", q_BLHD, k_BLHD) / math.sqrt(D)
    weights_BHLL = scores_BHLL.masked_fill(~causal_LL, -torch.inf).softmax(dim=-1)
    kept_BHLL = keep_mask(seed, stream, (B * H * L, L), dropout).view(B, H, L, L)
    return torch.einsum("bhlm,bmhd->blhd", weights_BHLL * kept_BHLL / (1 - dropout), v_BLHD)
