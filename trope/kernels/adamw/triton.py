# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""AdamW of one tensor in one launch, and the device functions that the item table's update shares with it.

Names of the kernel arguments:

- p_hyper: lr, beta1, beta2, eps, weight decay, step. p_factors: float32 [8], what they become (`_factors_kernel`).
- p_weight, p_avg, p_sq, p_grad: float32 [N]; the first three are written. p_low: the new weights once more if HAS_LOW.
- p_partial: the squared gradient of each program's numbers.

Prefixes: o_ offset, p_ pointer, b_ block in registers, m_ mask.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.adamw.reference import Moved

BLOCK = 2048  # numbers of a program, 16 a thread; not tuned


@triton.jit
def _factors_kernel(p_hyper, p_factors):
    """Grid (1,): what every number is multiplied by, formed in float64 from the hyperparameters."""
    lr, beta1 = tl.load(p_hyper).to(tl.float64), tl.load(p_hyper + 1).to(tl.float64)
    beta2, eps = tl.load(p_hyper + 2).to(tl.float64), tl.load(p_hyper + 3).to(tl.float64)
    weight_decay, step = tl.load(p_hyper + 4).to(tl.float64), tl.load(p_hyper + 5).to(tl.float64)
    # A beta of 0 has no logarithm, and a power of 0.
    power1 = tl.where(beta1 > 0, tl.exp(step * tl.log(tl.where(beta1 > 0, beta1, 1.0))), 0.0)
    power2 = tl.where(beta2 > 0, tl.exp(step * tl.log(tl.where(beta2 > 0, beta2, 1.0))), 0.0)
    tl.store(p_factors, (1 - lr * weight_decay).to(tl.float32))
    tl.store(p_factors + 1, beta1.to(tl.float32))
    tl.store(p_factors + 2, (1 - beta1).to(tl.float32))
    tl.store(p_factors + 3, beta2.to(tl.float32))
    tl.store(p_factors + 4, (1 - beta2).to(tl.float32))
    tl.store(p_factors + 5, (lr / (1 - power1)).to(tl.float32))
    tl.store(p_factors + 6, (1 / tl.sqrt(1 - power2)).to(tl.float32))
    tl.store(p_factors + 7, eps.to(tl.float32))


@triton.jit
def moved(b_weight, b_avg, b_sq, b_grad, b_square, p_factors):
    """New weights and both new moments. b_square: what the second moment is the mean of."""
    decay, beta1, rest1, beta2, rest2 = (
        tl.load(p_factors), tl.load(p_factors + 1), tl.load(p_factors + 2),
        tl.load(p_factors + 3), tl.load(p_factors + 4),
    )  # fmt: skip
    step_size, inv_root2, eps = tl.load(p_factors + 5), tl.load(p_factors + 6), tl.load(p_factors + 7)
    b_avg = b_avg * beta1 + b_grad * rest1
    b_sq = b_sq * beta2 + b_square * rest2
    b_weight = b_weight * decay - b_avg * (step_size / (tl.sqrt(b_sq) * inv_root2 + eps))
    return b_weight, b_avg, b_sq


@triton.jit
def _adamw_kernel(
    p_weight, p_avg, p_sq, p_grad, p_low, p_partial, p_factors, N, HAS_LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (programs of the largest tensor,): those beyond N write a partial sum of 0."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_weight = tl.load(p_weight + o, mask=m, other=0.0)
    b_avg = tl.load(p_avg + o, mask=m, other=0.0)
    b_sq = tl.load(p_sq + o, mask=m, other=0.0)
    b_grad = tl.load(p_grad + o, mask=m, other=0.0)
    b_square = b_grad * b_grad
    tl.store(p_partial + tl.program_id(0), tl.sum(b_square, axis=0))
    b_weight, b_avg, b_sq = moved(b_weight, b_avg, b_sq, b_grad, b_square, p_factors)
    tl.store(p_weight + o, b_weight, mask=m)
    tl.store(p_avg + o, b_avg, mask=m)
    tl.store(p_sq + o, b_sq, mask=m)
    if HAS_LOW:
        tl.store(p_low + o, b_weight.to(p_low.dtype.element_ty), mask=m)


def factors_of(hyper: Tensor) -> Tensor:
    """See `trope.kernels.adamw.factors_of`; float32 [8]."""
    assert hyper.shape == (6,)
    factors = torch.empty(8, dtype=torch.float32, device=hyper.device)
    _factors_kernel[(1,)](p_hyper=hyper.contiguous(), p_factors=factors, num_warps=1)
    return factors


def move(tensors: Sequence[Moved], factors: Tensor) -> Tensor:
    """See `trope.kernels.adamw.move`."""
    programs = triton.cdiv(max(each.weight.numel() for each in tensors), BLOCK)
    partial = torch.empty((len(tensors), programs), dtype=torch.float32, device=factors.device)
    for each, sums in zip(tensors, partial, strict=True):
        for x in each[:4]:
            assert x is not None and x.dtype == torch.float32 and x.is_contiguous() and x.shape == each.weight.shape
        low = each.weight if each.low is None else each.low
        assert low.is_contiguous() and low.shape == each.weight.shape
        _adamw_kernel[(programs,)](
            p_weight=each.weight,
            p_avg=each.exp_avg,
            p_sq=each.exp_avg_sq,
            p_grad=each.grad,
            p_low=low,
            p_partial=sums,
            p_factors=factors,
            N=each.weight.numel(),
            HAS_LOW=each.low is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return partial.sum(dim=1).sqrt()
