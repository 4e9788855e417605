"""The table's update on multiprocessors of its own against the reference: a CPU plays the GPU (tests/emulator)."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import on_gpu
from test_kernels_table import HYPER, Problem

from trope.kernels.table import own, unit_vectors

NAMES = ("table", "exp_avg", "exp_avg_sq", "unit", "norm_sq")
# T, E, V, C: rows without entries, rows with more than a warp asks for at once, more rows than warps and fewer.
SHAPES = [(7, 128, 83, 3), (40, 128, 5, 12), (9, 256, 61, 5), (6, 512, 10, 6)]


def others(problem: Problem, multiprocessors: int) -> list[torch.Tensor]:
    """As `Problem.update` of the part "others", by own.cu."""
    table = problem.table.to(problem.device, torch.float32)
    moments = [moment.to(problem.device, torch.float32) for moment in problem.moments]
    unit = torch.full_like(table, 7, dtype=problem.dtype)
    scores, inputs = problem.entries("torch", torch.float32)
    factors = factors_at(3).to(problem.device)
    inputs = inputs._replace(grad_TE=None)
    found = own.update_others(table, *moments, unit, scores, inputs, factors, multiprocessors)
    return [tensor.double().cpu() for tensor in (table, *moments, unit, found)]


def factors_at(step: int) -> torch.Tensor:
    """What `trope.kernels.adamw.factors_of` has the GPU form from the hyperparameters."""
    lr, beta1, beta2, eps, decay = HYPER
    rates = (lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, eps)
    return torch.tensor([1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, *rates])


def check(problem: Problem, multiprocessors: int) -> None:
    exact = problem.update("torch", torch.float64, parts=("others",))
    reference = problem.update("torch", torch.float32, parts=("others",))
    for name, want, ref, got in zip(NAMES, exact, reference, others(problem, multiprocessors), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 2.5 * (ref - want).norm() + 1e-6 * want.norm() + 1e-7, name


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("state", ["full", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_other_rows_move_as_in_the_reference(shape: tuple, dtype: torch.dtype, state: str) -> None:
    check(Problem(shape, "cpu", dtype, state=state), 2)


@pytest.mark.usefixtures("emulated")
def test_rows_of_the_batch_and_row_0_stay() -> None:
    problem = Problem(SHAPES[0], "cpu")
    stays = torch.zeros(len(problem.table), dtype=torch.bool)
    stays[problem.items.long()] = stays[0] = True
    table, exp_avg, exp_avg_sq, unit, _ = others(problem, 1)
    before = [problem.table, *problem.moments, torch.full_like(problem.table, 7)]
    for new, old in zip((table, exp_avg, exp_avg_sq, unit), before, strict=True):
        assert torch.equal((new != old.float().double()).any(dim=1), ~stays)
    expected = unit_vectors(table.float(), torch.float32)[~stays].double()
    torch.testing.assert_close(unit[~stays], expected, rtol=1e-6, atol=0)


def test_without_triton_a_gpu_has_no_multiprocessors_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class TableOnGPU:
        is_cuda, dtype, device, shape = True, torch.float32, torch.device("cuda", 0), (100, 128)

        def __len__(self) -> int:
            return 100

    monkeypatch.setattr("trope.kernels.backend.HAS_TRITON", False)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)  # an import of it fails
    assert own.own_multiprocessors(TableOnGPU(), 0.5) == 0


@on_gpu
@pytest.mark.parametrize("state", ["full", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (900, 512, 20_000, 33), (900, 128, 300, 33)], ids=str)
def test_on_a_gpu_and_the_same_bits_again(shape: tuple, dtype: torch.dtype, state: str) -> None:
    problem = Problem(shape, "cuda", dtype, state=state)
    check(problem, 5)
    first = others(problem, 5)
    for _ in range(20):
        assert all(map(torch.equal, others(problem, 5), first))
