"""AdamW in one pass: the reference against torch.optim.AdamW, the kernel against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from trope.kernels.adamw import Moved, factors_of, move
from trope.kernels.backend import Backend

adamw_triton = pytest.importorskip("trope.kernels.adamw.triton", reason="needs the package triton")

HYPER = (1e-2, 0.9, 0.98, 1e-8, 0.1)
# Of tensors that move together: programs that are not full, one tensor that is empty.
SHAPES = [(1,), (7, 30), (2048,), (0, 4), (63, 65), (3, 4096), (1, 1)]


def draw(device: str, low: torch.dtype | None) -> list[Moved]:
    """Tensors at places in falling order. Every second has a copy, every third no decay."""
    rng = torch.Generator().manual_seed(0)
    tensors = []
    for i, shape in enumerate(SHAPES):
        weight, first, second, grad = (torch.randn(shape, generator=rng).to(device) for _ in range(4))
        copy = None if low is None or i % 2 else torch.empty(shape, dtype=low, device=device)
        tensors.append(Moved(weight, first, second.square(), grad, copy, len(SHAPES) - i, i % 3 > 0))
    return tensors


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 250])
@pytest.mark.parametrize("most", [32, 3])
def test_a_step_is_torchs(
    most: int, step: int, low: torch.dtype | None, backend: Backend, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """most: tensors of a launch."""
    monkeypatch.setattr(adamw_triton, "MOST", most)
    lr, beta1, beta2, eps, decay = HYPER
    tensors = draw(device, low)
    wanted, norms = [], []
    for each in tensors:
        parameter = torch.nn.Parameter(each.weight.double())
        parameter.grad = each.grad.double()
        own_decay = decay if each.decays else 0.0
        optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=own_decay)
        moments = {"exp_avg": each.exp_avg.double(), "exp_avg_sq": each.exp_avg_sq.double()}
        optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), **moments}
        optimizer.step()
        wanted.append((parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]))
        norms.append(parameter.grad.square().sum())
    factors = factors_of(torch.tensor([*HYPER, step], dtype=torch.float64, device=device), backend)
    got = move(tensors, factors, backend)
    assert got.places_S.dtype == torch.int32 and len(got.places_S) == len(got.squares_S)
    of_place = torch.zeros(len(SHAPES) + 1, dtype=torch.float64, device=device)
    of_place.index_add_(0, got.places_S, got.squares_S.double())
    torch.testing.assert_close(of_place[1:].flip(0), torch.stack(norms), rtol=1e-5, atol=0)
    for each, exact in zip(tensors, wanted, strict=True):
        for ours, theirs in zip(each, exact, strict=False):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        if each.low is not None:  # Triton's interpreter cuts bits off where a GPU rounds
            apart = 2**-7 if backend == "triton" and device == "cpu" else 0
            torch.testing.assert_close(each.low.float(), each.weight.to(each.low.dtype).float(), rtol=apart, atol=0)


def test_nothing_moves_nothing() -> None:
    assert [len(each) for each in move([], factors_of(torch.ones(6)))] == [0, 0]


def test_tensors_keep_to_their_own_numbers(device: str) -> None:
    """Between others' in memory, at addresses that no vector begins at, and the same bits twice."""
    results = []
    for _ in range(2):
        rng, guard = torch.Generator().manual_seed(1), 7.5
        room = torch.full((5, 9000), guard, device=device)
        tensors, begin = [], 1
        for size in (5, 2049, 64, 4096):
            end = begin + size
            room[:4, begin:end] = torch.rand((4, size), generator=rng).to(device)
            tensors.append(Moved(*(row[begin:end] for row in room)))
            begin = end + 3
        parts = move(
            tensors, factors_of(torch.tensor([*HYPER, 3], dtype=torch.float64, device=device), "triton"), "triton"
        )
        written = torch.zeros(9000, dtype=torch.bool, device=device)
        begin = 1
        for each in tensors:
            written[begin : begin + len(each.weight)] = True
            begin += len(each.weight) + 3
            assert each.low is not None and torch.equal(each.low, each.weight)
        assert (room[:, ~written] == guard).all() and (room[:3, written] != guard).all()
        results.append([room, *parts])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("step", [1, 5000])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_bias_corrections_are_those_of_float64(step: int, beta1: float, device: str) -> None:
    hyper = torch.tensor([1e-3, beta1, 0.9999, 1e-8, 0.1, step], device=device)
    factors = factors_of(hyper, "triton")
    lr, beta1, beta2, eps, weight_decay, _ = hyper.tolist()
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    want = [1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / correction1, correction2**-0.5, eps]
    assert factors.tolist() == pytest.approx(want, rel=1e-7)
