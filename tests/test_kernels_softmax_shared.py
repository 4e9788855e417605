"""The softmax over shared items against trope.loss under autograd, whole and in tiles.

`torch.empty` is filled with NaN here, so an output element that no tile wrote fails the comparison. Plain PyTorch: one
device is as good as another, so this is on the CPU; the captured step is in test_train_fused.py.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trope.config import TrainConfig
from trope.kernels.softmax import sampled_softmax
from trope.kernels.softmax import shared as softmax_shared
from trope.kernels.softmax.shared import SharedResult, shared_softmax
from trope.train.loss import draw_negatives, token_losses

TEMPERATURE = 0.05
WEIGHT = torch.tensor([0.3])
SHAPES = [  # T, E, V, N
    (1, 8, 3, 1),
    (7, 50, 40, 11),
    (63, 64, 30, 128),  # every item comes several times
    (30, 2, 9, 5),
    (2, 128, 500, 37),
]
Source = Literal["uniform", "batch"]


class Problem:
    """A batch with padding, whose shared negatives have targets and duplicates among them."""

    def __init__(self, shape: tuple[int, ...], source: Source, dtype: torch.dtype = torch.float32) -> None:
        T, E, V, N = shape
        rng = torch.Generator().manual_seed(0)
        self.x_TE = 3 * torch.randn(T, E, generator=rng)
        self.targets_T = torch.randint(1, V + 1, (T,), generator=rng)
        if T >= 3:
            self.targets_T[T // 2] = 0
            self.x_TE[1] *= 0.7e-6 / self.x_TE[1].norm()  # shorter than the length that is divided by
        self.unit_VE = F.normalize(torch.randn(V + 1, E, generator=rng), dim=1).to(dtype)
        self.unit_VE[0] = 0
        config = TrainConfig(negatives=N, shared_negatives=True, negative_source=source)
        drawn = draw_negatives(self.targets_T, V, config, rng)
        assert drawn is not None and drawn.shape == (N,)
        self.negatives = drawn
        if N >= 5:
            self.negatives[1:3] = self.targets_T[0]  # a target, twice

    def run(self, dtype: torch.dtype | None = None, **changed: Any) -> SharedResult:
        unit_VE = self.unit_VE if dtype is None else self.unit_VE.to(dtype)
        given = {"x_TE": self.x_TE if dtype is None else self.x_TE.to(dtype), "targets_T": self.targets_T,
                 "items_N": self.negatives, "unit_VE": unit_VE, "weight": WEIGHT,
                 "temperature": TEMPERATURE}  # fmt: skip
        return shared_softmax(**(given | changed))

    def truth(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Losses and gradients by outputs and item vectors, from trope.loss and autograd."""
        x_TE, unit_VE = (tensor.to(dtype).requires_grad_() for tensor in (self.x_TE, self.unit_VE))
        out_TE = F.normalize(x_TE, dim=1, eps=1e-6)
        loss_T = token_losses(out_TE, self.targets_T, unit_VE, self.negatives, TEMPERATURE)
        grads = torch.autograd.grad(WEIGHT[0] * loss_T.sum(), (x_TE, unit_VE))
        return loss_T.detach(), *grads


def item_gradient(problem: Problem, found: SharedResult) -> Tensor:
    """By the item vectors: what the table's update adds up."""
    grad_VE = torch.zeros(problem.unit_VE.shape, dtype=found.grad_NE.dtype)
    grad_VE.index_add_(0, problem.targets_T, found.coefs_T[:, None] * found.out_TE)
    return grad_VE.index_add_(0, problem.negatives, found.grad_NE)


def assert_close_by_row(got: Tensor, want: Tensor, rtol: float, atol: float, name: str) -> None:
    """The gradient of a short output is a million times the others'."""
    off, size = (part.reshape(len(part), -1).norm(dim=1) for part in (got - want, want))
    assert (off <= rtol * size + atol).all(), name


@pytest.mark.parametrize("tile", [None, 3, 1], ids=["whole", "tiles of 3", "tiles of 1"])
@pytest.mark.parametrize("source", ["uniform", "batch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_are_those_of_trope_loss(
    shape: tuple[int, ...], source: Source, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(softmax_shared, "_TILE", tile * shape[3] + shape[3] // 2)
    problem = Problem(shape, source)
    found = problem.run()
    assert all(part.dtype == torch.float32 and not part.requires_grad for part in found)
    ours = (found.loss_T, found.grad_x_TE, item_gradient(problem, found))
    for name, got, want in zip(("loss", "x", "items"), ours, problem.truth(torch.float32), strict=True):
        assert_close_by_row(got, want, 2e-5, 2e-6, name)
    is_padding_T = problem.targets_T == 0
    for part in (found.loss_T, found.grad_x_TE, found.coefs_T):
        assert not part[is_padding_T].any()


def test_in_float64_it_is_the_gathered_softmax() -> None:
    """With the shared items as every token's own; trope.loss sums in float32."""
    problem = Problem((7, 50, 40, 11), "batch")
    found = problem.run(torch.float64)
    candidates_TC = torch.cat((problem.targets_T[:, None], problem.negatives.expand(7, 11)), dim=1)
    x_TE, unit_VE = problem.x_TE.double(), problem.unit_VE.double()
    want = sampled_softmax(x_TE, candidates_TC, unit_VE, WEIGHT, TEMPERATURE, backend="torch")
    tolerance = {"rtol": 1e-10, "atol": 1e-13}
    torch.testing.assert_close(found.loss_T, want.loss_T, **tolerance)
    torch.testing.assert_close(found.grad_x_TE, want.grad_x_TE, **tolerance)
    torch.testing.assert_close(found.out_TE, want.out_TE, **tolerance)
    torch.testing.assert_close(found.coefs_T, want.coefs_TC[:, 0], **tolerance)
    torch.testing.assert_close(found.grad_NE, want.coefs_TC[:, 1:].T @ want.out_TE, **tolerance)


def test_bf16_vectors_round_the_outputs_and_nothing_else() -> None:
    problem = Problem((7, 50, 40, 11), "uniform", dtype=torch.bfloat16)
    found = problem.run()
    assert torch.equal(found.out_TE, F.normalize(problem.x_TE, dim=1, eps=1e-6).bfloat16().float())
    loss_T = token_losses(found.out_TE, problem.targets_T, problem.unit_VE.float(), problem.negatives, TEMPERATURE)
    torch.testing.assert_close(found.loss_T, loss_T, rtol=1e-5, atol=1e-5)
    assert found.grad_NE.dtype == torch.float32


def test_int32_items_and_targets() -> None:
    problem = Problem((7, 50, 40, 11), "batch")
    short = problem.run(targets_T=problem.targets_T.int(), items_N=problem.negatives.int())
    for got, want in zip(short, problem.run(), strict=True):
        assert torch.equal(got, want)


def test_where_every_item_is_the_target_nothing_is_left() -> None:
    problem = Problem((2, 64, 5, 7), "uniform")
    found = problem.run(items_N=problem.targets_T[0].expand(7))
    assert found.loss_T[0] == 0 and found.coefs_T[0] == 0 and not found.grad_x_TE[0].any()
    assert found.loss_T[1] > 0 and all(part.isfinite().all() for part in found)


def test_far_scores() -> None:
    """A small temperature puts scores far from zero: the softmax must neither overflow nor lose a small loss."""
    problem = Problem((7, 50, 40, 11), "batch")
    for temperature in (0.01, 0.003):
        found = problem.run(temperature=temperature)
        exact = problem.run(torch.float64, temperature=temperature)
        for name, got, want in zip(SharedResult._fields, found, exact, strict=True):
            assert_close_by_row(got.double(), want, 1e-3, 1e-37, f"{name} at {temperature}")


def test_memory_does_not_grow_with_tokens_times_items() -> None:
    """Of the shop's size: the largest tensor of scores is a tile."""
    T, N = 65_536, 8_192
    rows = softmax_shared._TILE // N
    assert rows * N * 4 <= 1 << 26 and math.ceil(T / rows) == 32
    seen: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.extend(part.numel() for part in (result if isinstance(result, tuple) else (result,))
                        if isinstance(part, Tensor))  # fmt: skip
            return result

    with Largest(), torch.device("meta"):
        unit_VE, x_TE = torch.empty(1_000, 16), torch.empty(T, 16)
        targets_T, items_N = torch.empty(T, dtype=torch.int32), torch.empty(N, dtype=torch.int64)
        shared_softmax(x_TE, targets_T, items_N, unit_VE, torch.empty(1), TEMPERATURE)
    assert max(seen) == rows * N
