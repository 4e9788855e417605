"""Softmax over a target and sampled items: loss and gradient in one pass; and the drawing of those items.

Not an autograd operator: a training step always wants the gradient, and the fused kernel has it for the price of the
loss. `x.backward(result.grad_x_TE)` carries it into the network; `coefs_TC` and `out_TE` are what trope.kernels.table
needs for the item vectors. The reference is in softmax/reference.py, the kernels in softmax/triton.py. For items that
all tokens share see softmax/shared.py.

Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.softmax import reference
from trope.kernels.softmax.reference import SoftmaxResult

__all__ = ["SoftmaxResult", "draw_uniform", "sampled_softmax"]


@torch.no_grad()
def sampled_softmax(
    x_TE: Tensor,
    candidates_TC: Tensor,
    unit_VE: Tensor,
    weight: Tensor,
    temperature: float,
    backend: Backend = "auto",
) -> SoftmaxResult:
    """Loss of each token's target among its candidates, and the gradient of weight * sum(loss).

    Scores are cosines over the temperature: out . unit / temperature with out = x / max(|x|, 1e-6), rounded to the
    item vectors' dtype. A negative equal to its target, or 0, is left out.

    Args:
        x_TE: raw outputs of the network, float32 or bfloat16.
        candidates_TC: int32 or int64; column 0 is the target (0: padding, no loss and no gradient), then negatives.
        unit_VE: [V+1, E] L2-normalised item vectors.
        weight: [1] float32 on the device, one over the number of targets of the whole batch.
    """
    if resolve_backend(backend, unit_VE) == "torch":
        return reference.sampled_softmax(x_TE, candidates_TC, unit_VE, weight, temperature)
    from trope.kernels.softmax import triton as fused  # only now: CPU users need no Triton

    return fused.sampled_softmax(x_TE, candidates_TC, unit_VE, weight, temperature)


def draw_uniform(num_items: int, seed: Tensor, candidates_TC: Tensor, backend: Backend = "auto") -> None:
    """Fill columns 1 .. of the candidates with items drawn uniformly from 1 .. num_items, where column 0 has a target.

    Padding tokens get zeros, which the softmax leaves out and the table's update never visits. The draw is a function
    of the seed and the position alone; the two backends draw different numbers. In the fused one an item's probability
    is 1 / num_items up to a factor of 1 +- num_items / 2^32 (0.1 % at 4.8 million items).

    Args:
        seed: [1] int64 on the device.
        candidates_TC: int32 or int64, any strides.
    """
    if resolve_backend(backend, candidates_TC) == "torch":
        return reference.draw_uniform(num_items, seed, candidates_TC)
    from trope.kernels.softmax import triton as fused  # only now: CPU users need no Triton

    return fused.draw_uniform(num_items, seed, candidates_TC)
