"""Sampled softmax in plain PyTorch: the ground truth for the fused kernel, and the path of CPUs and float64.

Notable: the gradient is written out, because the caller hands it to the network's backward pass; the [T, C, E] tensor
of gathered candidates exists for a piece of the tokens only.

Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6  # shorter vectors are divided by this instead of by their length
_PIECE = 1 << 26  # most gathered numbers at once: 256 MiB in float32; a bound on memory, not tuned


class SoftmaxResult(NamedTuple):
    """What one pass over the candidates gives."""

    loss_T: Tensor  # -log softmax of the target, unweighted; 0 for padding
    grad_x_TE: Tensor  # gradient of weight * sum(loss) by the raw outputs
    out_TE: Tensor  # the normalised outputs, in the item vectors' dtype
    coefs_TC: Tensor  # gradient of weight * sum(loss) by each cosine out . unit; 0 for candidates left out


def sampled_softmax(
    x_TE: Tensor,
    candidates_TC: Tensor,
    unit_VE: Tensor,
    weight: Tensor,
    temperature: float,
) -> SoftmaxResult:
    """See `trope.kernels.softmax.sampled_softmax`. Everything is float32, or float64 where the item vectors are."""
    tokens = max(1, _PIECE // (candidates_TC.shape[1] * x_TE.shape[1]))
    pieces = [
        _tokens(x, candidates, unit_VE, weight, temperature)
        for x, candidates in zip(x_TE.split(tokens), candidates_TC.split(tokens), strict=True)
    ]
    return SoftmaxResult(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _tokens(
    x_TE: Tensor,
    candidates_TC: Tensor,
    unit_VE: Tensor,
    weight: Tensor,
    temperature: float,
) -> SoftmaxResult:
    dtype = torch.float64 if unit_VE.dtype == torch.float64 else torch.float32
    x_TE = x_TE.to(dtype)
    length_T1 = x_TE.norm(dim=1, keepdim=True)
    safe_T1 = length_T1.clamp_min(EPS)
    direction_TE = x_TE / safe_T1
    out_TE = direction_TE.to(unit_VE.dtype)

    candidates_TC = candidates_TC.long()
    target_T1 = candidates_TC[:, :1]
    rows_TCE = unit_VE[candidates_TC].to(dtype)
    score_TC = torch.einsum("te,tce->tc", out_TE.to(dtype), rows_TCE) / temperature
    is_out_TC = (candidates_TC == target_T1) | (candidates_TC == 0)
    is_out_TC[:, 0] = False
    score_TC = score_TC.masked_fill(is_out_TC, -math.inf)

    is_padding_T1 = target_T1 == 0
    loss_T = (score_TC.logsumexp(dim=1) - score_TC[:, 0]).masked_fill(is_padding_T1[:, 0], 0.0)
    share_TC = score_TC.softmax(dim=1)
    share_TC[:, 0] -= 1
    coefs_TC = (share_TC * (weight.to(dtype) / temperature)).masked_fill(is_padding_T1, 0.0)
    grad_out_TE = torch.einsum("tc,tce->te", coefs_TC, rows_TCE)
    return SoftmaxResult(loss_T, through_length(grad_out_TE, direction_TE, length_T1), out_TE, coefs_TC)


def through_length(grad: Tensor, direction: Tensor, length: Tensor) -> Tensor:
    """Gradient by x of x / max(|x|, EPS), from the gradient by the quotient: the radial part goes, the rest scales."""
    radial = (grad * direction).sum(dim=-1, keepdim=True)
    return (grad - torch.where(length > EPS, direction * radial, 0.0)) / length.clamp_min(EPS)


def draw_uniform(num_items: int, seed: Tensor, candidates_TC: Tensor) -> None:
    """See `trope.kernels.softmax.draw_uniform`. Reads the seed on the host: for CPUs, where that waits for nothing."""
    generator = torch.Generator(candidates_TC.device).manual_seed(int(seed))
    negatives_TN = candidates_TC[:, 1:]
    items_TN = torch.randint(1, num_items + 1, negatives_TN.shape, generator=generator, device=candidates_TC.device)
    negatives_TN.copy_(items_TN * (candidates_TC[:, :1] != 0))
