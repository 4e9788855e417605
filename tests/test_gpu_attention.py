"""Both attentions on a GPU: the reference's values, and the same bits every time, whatever memory held before.

An interpreter cannot show this. A kernel that passed every other test gave NaN here, with narrow heads in memory that
others had used.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trope.kernels.attention import hstu_attention, time_gaps
from trope.kernels.backend import Backend
from trope.kernels.causal_attention import causal_attention
from trope.kernels.sequence_bounds import SequenceBounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
B, REPEATS = 64, 200


def hstu(joint: Tensor, weights: list[Tensor], backend: Backend) -> Tensor:
    L = len(joint) // B
    offsets = torch.arange(0, (B + 1) * L, L, device="cuda")
    bounds = SequenceBounds.jagged(offsets, L)
    times = torch.arange(B * L, device="cuda") * 1000
    gaps = time_gaps(times, times, bounds, 128, joint, backend=backend)
    return hstu_attention(*joint.unbind(1), bounds, L, *weights, gaps, backend=backend)


def causal(joint: Tensor, weights: list[Tensor], backend: Backend) -> Tensor:
    q, k, v = (x.unflatten(0, (B, -1)) for x in joint.unbind(1))
    y = causal_attention(q, k, v, 0.2, torch.tensor([3], device="cuda"), backend=backend)
    return y.flatten(0, 1) + 0 * sum(weight.sum() for weight in weights)


@pytest.mark.parametrize(
    ("attention", "L", "H", "D"),
    [
        *((attention, 50, 2, D) for attention in (hstu, causal) for D in (16, 32, 64, 128)),
        (hstu, 200, 8, 32),  # several tiles, in CUDA C++
        (hstu, 200, 4, 64),  # dq with the sum over heads
        (hstu, 200, 4, 128),
    ],
)
def test_values_are_the_references_every_time(
    attention: Callable[[Tensor, list[Tensor], Backend], Tensor], L: int, H: int, D: int
) -> None:
    rng = torch.Generator("cuda").manual_seed(D)
    joint, g = (torch.randn(shape, generator=rng, device="cuda") for shape in ((B * L, 3, H, D), (B * L, H, D)))
    weights = [torch.randn(size, generator=rng, device="cuda") for size in (2 * L - 1, 129)]

    def run(backend: Backend, dtype: torch.dtype) -> list[Tensor]:
        inputs = [joint.bfloat16().to(dtype).requires_grad_(), *(w.clone().requires_grad_() for w in weights)]
        y = attention(inputs[0], inputs[1:], backend)
        return [y.detach(), *torch.autograd.grad(y, inputs, g.bfloat16().to(dtype))]

    want, first = run("torch", torch.float32), run("triton", torch.bfloat16)
    for ours, theirs in zip(first, want, strict=True):
        assert float((ours.float() - theirs).norm()) <= 0.02 * max(float(theirs.norm()), 1e-3)
    for repeat in range(REPEATS):
        dirty = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23)]
        del dirty
        assert all(map(torch.equal, run("triton", torch.bfloat16), first)), repeat
