"""Softmax over a target and items that all tokens share: loss and both gradients from matrix products.

The dense sibling of `softmax.sampled_softmax`, plain PyTorch on every device; its ground truth is `trope.train.loss`.
Notable:
- scores exist for a tile of tokens at a time, so memory does not grow with T x N; the loop over tiles is the same for
  every batch of a size, and sums over it have a fixed order;
- the items' gradient comes out dense, [N, E]: nothing has to sort T x N entries to find them, nor is there an item with
  T entries for one program to gather;
- the target stays out of the sums: softmax - 1 has no cancellation, and shares are divided by their total in [T, E]
  and not in [T, N];
- products are of float32, because bf16 scores would be too coarse: they reach 1 / temperature. Training in bf16 allows
  TF32 for them, which holds bf16 outputs and vectors exactly; so the temperature is applied after the product.

Shape letters: T tokens, R tokens of a tile, E model width, V catalogue (rows 1 .. V, row 0 is padding), N shared items.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.softmax.reference import EPS, through_length

_TILE = 1 << 24  # most scores at once: 64 MiB; a bound on memory, not tuned


class SharedResult(NamedTuple):
    """What the products give; float32, or float64 where the item vectors are."""

    loss_T: Tensor  # -log softmax of the target, unweighted; 0 for padding
    grad_x_TE: Tensor  # gradient of weight * sum(loss) by the raw outputs
    out_TE: Tensor  # the normalised outputs, rounded to the item vectors' dtype
    coefs_T: Tensor  # gradient of weight * sum(loss) by the cosine of each target
    grad_NE: Tensor  # and by the unit vector of each shared item; an item that comes twice has two rows


@torch.no_grad()
def shared_softmax(
    x_TE: Tensor,
    targets_T: Tensor,
    items_N: Tensor,
    unit_VE: Tensor,
    weight: Tensor,
    temperature: float,
) -> SharedResult:
    """Loss of each token's target among itself and the shared items, and the gradient of weight * sum(loss).

    Scores are cosines over the temperature: out . unit / temperature with out = x / max(|x|, 1e-6), rounded to the
    item vectors' dtype. A shared item equal to a token's target is left out for that token.

    Args:
        x_TE: raw outputs of the network, float32 or bfloat16.
        targets_T: int32 or int64; 0 is padding: no loss and no gradient.
        items_N: int32 or int64, values 1 .. V.
        unit_VE: [V+1, E] L2-normalised item vectors.
        weight: [1] float32 on the device, one over the number of targets of the whole batch.
    """
    dtype = torch.promote_types(unit_VE.dtype, torch.float32)
    x_TE = x_TE.to(dtype)
    length_T1 = x_TE.norm(dim=1, keepdim=True)
    direction_TE = x_TE / length_T1.clamp_min(EPS)
    out_TE = direction_TE.to(unit_VE.dtype).to(dtype)
    target_TE, item_NE = (unit_VE.index_select(0, items).to(dtype) for items in (targets_T, items_N))
    target_score_T = (out_TE * target_TE).sum(dim=1) / temperature
    scale_T = (targets_T != 0) * (weight.to(dtype) / temperature)

    loss_T, coefs_T = torch.empty_like(target_score_T), torch.empty_like(target_score_T)
    grad_out_TE, grad_NE = torch.empty_like(out_TE), torch.zeros_like(item_NE)
    rows = max(1, _TILE // len(items_N))
    nothing = item_NE.new_zeros(1)  # the product and its scale in one launch
    for first in range(0, len(x_TE), rows):
        tile = slice(first, first + rows)
        score_RN = torch.addmm(nothing, out_TE[tile], item_NE.T, beta=0, alpha=1 / temperature)
        score_RN.masked_fill_(targets_T[tile, None] == items_N, -math.inf)
        target_score_R = target_score_T[tile]
        largest_R = torch.maximum(score_RN.amax(dim=1), target_score_R)
        share_RN = score_RN.sub_(largest_R[:, None]).exp_()  # not yet divided by their total
        total_R = share_RN.sum(dim=1)
        factor_R = scale_T[tile] / (total_R + torch.exp(target_score_R - largest_R))
        loss_T[tile] = F.softplus(total_R.log() + largest_R - target_score_R)
        coefs_T[tile] = -factor_R * total_R
        grad_out_TE[tile] = factor_R[:, None] * (share_RN @ item_NE)
        grad_NE.addmm_(share_RN.T, factor_R[:, None] * out_TE[tile])
    loss_T.masked_fill_(targets_T == 0, 0.0)
    grad_out_TE += coefs_T[:, None] * target_TE
    return SharedResult(loss_T, through_length(grad_out_TE, direction_TE, length_T1), out_TE, coefs_T, grad_NE)
