"""AdamW in one pass: the reference against torch.optim.AdamW, the kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from trope.kernels.adamw import Moved, factors_of, move
from trope.kernels.backend import Backend

HYPER = (1e-2, 0.9, 0.98, 1e-8, 0.1)
SHAPES = [(1,), (7, 30), (2048,), (63, 65), (3, 4096)]  # of tensors that move together: programs that are not full


def draw(device: str, low: torch.dtype | None) -> list[Moved]:
    rng = torch.Generator().manual_seed(0)
    tensors = []
    for shape in SHAPES:
        weight, first, second, grad = (torch.randn(shape, generator=rng).to(device) for _ in range(4))
        copy = None if low is None else torch.empty(shape, dtype=low, device=device)
        tensors.append(Moved(weight, first, second.square(), grad, copy))
    return tensors


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 250])
def test_a_step_is_torchs(step: int, low: torch.dtype | None, backend: Backend, device: str) -> None:
    lr, beta1, beta2, eps, decay = HYPER
    tensors = draw(device, low)
    wanted, norms = [], []
    for each in tensors:
        parameter = torch.nn.Parameter(each.weight.double())
        parameter.grad = each.grad.double()
        optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        moments = {"exp_avg": each.exp_avg.double(), "exp_avg_sq": each.exp_avg_sq.double()}
        optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), **moments}
        optimizer.step()
        wanted.append((parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]))
        norms.append(parameter.grad.norm())
    factors = factors_of(torch.tensor([*HYPER, step], dtype=torch.float64, device=device), backend)
    got = move(tensors, factors, backend)
    torch.testing.assert_close(got.double(), torch.stack(norms), rtol=1e-5, atol=0)
    for each, exact in zip(tensors, wanted, strict=True):
        for ours, theirs in zip(each, exact, strict=False):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        if each.low is not None:  # Triton's interpreter cuts bits off where a GPU rounds
            apart = 2**-7 if backend == "triton" and device == "cpu" else 0
            torch.testing.assert_close(each.low.float(), each.weight.to(each.low.dtype).float(), rtol=apart, atol=0)


def test_nothing_moves_nothing() -> None:
    assert move([], factors_of(torch.ones(6))).shape == (0,)


@pytest.mark.parametrize("step", [1, 5000])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_bias_corrections_are_those_of_float64(step: int, beta1: float, device: str) -> None:
    hyper = torch.tensor([1e-3, beta1, 0.9999, 1e-8, 0.1, step], device=device)
    factors = factors_of(hyper, "triton")
    lr, beta1, beta2, eps, weight_decay, _ = hyper.tolist()
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    want = [1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / correction1, correction2**-0.5, eps]
    assert factors.tolist() == pytest.approx(want, rel=1e-7)
