# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""AdamW of many tensors in one launch, and the device functions that the item table's update shares with it.

A program finds out which tensor is its own by comparing its number with the programs that tensors need. Each pointer is
then chosen out of COUNT, and the code that moves numbers is there once.

Names of the kernel arguments:

- p_hyper: lr, beta1, beta2, eps, weight decay, step. p_factors: float32 [8], what they become (`_factors_kernel`).
- weights, avgs, sqs, grads: COUNT tensors each, float32 [N]; the first three are written. lows: the new weights once
  more where has_lows is 1. sizes: N of each tensor. places, decays: see `Moved`.
- p_squares, p_places: the squared gradient of each program's numbers, and the place of its tensor.

Prefixes: o_ offset, p_ pointer, b_ block in registers, m_ mask.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.adamw.reference import Moved, Parts

BLOCK = 2048  # numbers of a program, 16 a thread; not tuned
MOST = 32  # tensors of a launch: their pointers and sizes are 1.8 of the 4 KB that a launch's arguments may have


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
def moved(b_weight, b_avg, b_sq, b_grad, b_square, decay, p_factors):
    """New weights and both new moments. b_square: what the second moment is the mean of. decay: `p_factors`' first."""
    beta1, rest1, beta2, rest2 = (
        tl.load(p_factors + 1), tl.load(p_factors + 2), tl.load(p_factors + 3), tl.load(p_factors + 4),
    )  # fmt: skip
    step_size, inv_root2, eps = tl.load(p_factors + 5), tl.load(p_factors + 6), tl.load(p_factors + 7)
    b_avg = b_avg * beta1 + b_grad * rest1
    b_sq = b_sq * beta2 + b_square * rest2
    b_weight = b_weight * decay - b_avg * (step_size / (tl.sqrt(b_sq) * inv_root2 + eps))
    return b_weight, b_avg, b_sq


@triton.jit
def _move_block(p_weight, p_avg, p_sq, p_grad, p_low, has_low, decay, p_factors, o, m, other):
    """Move the numbers at o where m, all without m; returns the sum of their squared gradients. other: for loads."""
    b_weight, b_avg = tl.load(p_weight + o, mask=m, other=other), tl.load(p_avg + o, mask=m, other=other)
    b_sq, b_grad = tl.load(p_sq + o, mask=m, other=other), tl.load(p_grad + o, mask=m, other=other)
    b_square = b_grad * b_grad
    b_weight, b_avg, b_sq = moved(b_weight, b_avg, b_sq, b_grad, b_square, decay, p_factors)
    tl.store(p_weight + o, b_weight, mask=m)
    tl.store(p_avg + o, b_avg, mask=m)
    tl.store(p_sq + o, b_sq, mask=m)
    if has_low != 0:
        tl.store(p_low + o, b_weight.to(p_low.dtype.element_ty), mask=m)
    return tl.sum(b_square, axis=0)


@triton.jit
def _adamw_kernel(
    weights, avgs, sqs, grads, lows, sizes, places, decays, has_lows, p_squares, p_places, p_factors,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (programs of all tensors, one tensor after the other,)."""
    program = tl.program_id(0)
    p_weight, p_avg, p_sq, p_grad, p_low = weights[0], avgs[0], sqs[0], grads[0], lows[0]
    N, place, is_decayed, has_low, first = sizes[0], places[0], decays[0], has_lows[0], 0
    following = tl.cdiv(sizes[0], BLOCK)
    for i in tl.static_range(1, COUNT):
        is_here = program >= following
        p_weight, p_avg = tl.where(is_here, weights[i], p_weight), tl.where(is_here, avgs[i], p_avg)
        p_sq, p_grad = tl.where(is_here, sqs[i], p_sq), tl.where(is_here, grads[i], p_grad)
        p_low, N = tl.where(is_here, lows[i], p_low), tl.where(is_here, sizes[i], N)
        place, first = tl.where(is_here, places[i], place), tl.where(is_here, following, first)
        is_decayed, has_low = tl.where(is_here, decays[i], is_decayed), tl.where(is_here, has_lows[i], has_low)
        following += tl.cdiv(sizes[i], BLOCK)
    o = (program - first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    decay = tl.where(is_decayed != 0, tl.load(p_factors), 1.0)
    if (program - first + 1) * BLOCK <= N:  # without a mask, which would forbid to load several numbers at once
        square = _move_block(p_weight, p_avg, p_sq, p_grad, p_low, has_low, decay, p_factors, o, None, None)
    else:
        square = _move_block(p_weight, p_avg, p_sq, p_grad, p_low, has_low, decay, p_factors, o, o < N, 0.0)
    tl.store(p_squares + program, square)
    tl.store(p_places + program, place)


def factors_of(hyper: Tensor) -> Tensor:
    """See `trope.kernels.adamw.factors_of`; float32 [8]."""
    assert hyper.shape == (6,)
    factors = torch.empty(8, dtype=torch.float32, device=hyper.device)
    _factors_kernel[(1,)](p_hyper=hyper.contiguous(), p_factors=factors, num_warps=1)
    return factors


def move(tensors: Sequence[Moved], factors: Tensor) -> Parts:
    """See `trope.kernels.adamw.move`."""
    programs = [triton.cdiv(each.weight.numel(), BLOCK) for each in tensors]
    squares = torch.empty(sum(programs), dtype=torch.float32, device=factors.device)
    places = torch.empty_like(squares, dtype=torch.int32)
    begin = 0
    for at in range(0, len(tensors), MOST):
        end = begin + sum(programs[at : at + MOST])
        _launch(tensors[at : at + MOST], factors, squares[begin:end], places[begin:end])
        begin = end
    return Parts(squares, places)


def _launch(tensors: Sequence[Moved], factors: Tensor, squares: Tensor, places: Tensor) -> None:
    """Move some tensors; squares and places are written, one of each for a program."""
    for each in tensors:
        for x in each[:4]:
            assert x.dtype == torch.float32 and x.is_contiguous() and x.shape == each.weight.shape
        assert each.low is None or (each.low.is_contiguous() and each.low.shape == each.weight.shape)
    copied = [each.low for each in tensors if each.low is not None]
    absent = copied[0] if copied else tensors[0].weight
    assert len({low.dtype for low in copied}) <= 1
    if not len(squares):
        return
    _adamw_kernel[(len(squares),)](
        weights=tuple(each.weight for each in tensors),
        avgs=tuple(each.exp_avg for each in tensors),
        sqs=tuple(each.exp_avg_sq for each in tensors),
        grads=tuple(each.grad for each in tensors),
        lows=tuple(absent if each.low is None else each.low for each in tensors),
        sizes=tuple(each.weight.numel() for each in tensors),
        places=tuple(each.place for each in tensors),
        decays=tuple(int(each.decays) for each in tensors),
        has_lows=tuple(int(each.low is not None) for each in tensors),
        p_squares=squares,
        p_places=places,
        p_factors=factors,
        COUNT=len(tensors),
        BLOCK=BLOCK,
        num_warps=4,
    )
