"""The model's input and its gradients against autograd through the float64 reference."""

import math

import pytest
import torch

from trope.kernels.embed import embed, embed_backward
from trope.kernels.embed import reference as embed_reference
from trope.kernels.random import reference as random_reference

SHAPES = [([1], 8), ([3, 0, 4], 50), ([5, 1, 2, 6], 64), ([2] * 40, 16), ([3, 9], 512)]  # lengths of sequences, E


class Batch:
    """Sequences one behind the other, then tokens that belong to none. Every token has an item of its own, so that the
    table's dense gradient tells the tokens apart."""

    def __init__(self, lengths: list[int], width: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(0)
        tokens, spare = sum(lengths), 3
        self.max_len, self.device, self.dtype, self.scale = 10, device, dtype, math.sqrt(width)
        self.lengths = torch.tensor(lengths)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.items = torch.cat((torch.randperm(tokens, generator=rng) + 1, torch.zeros(spare, dtype=torch.int64)))
        self.index = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(spare, dtype=torch.int64)])
        self.table = torch.randn(tokens + 1, width, generator=rng).to(dtype).double()
        self.positions = torch.randn(self.max_len, width, generator=rng).double()
        self.grad = torch.randn(tokens + spare, width, generator=rng).double()

    def exact(self, dropout: float) -> tuple[torch.Tensor, ...]:
        """x and the gradients of the scaled rows and of the positions, by autograd in float64."""
        keep = random_reference.keep_mask(torch.tensor([99]), 2, tuple(self.grad.shape), dropout) if dropout else None
        table, positions = (x.clone().requires_grad_() for x in (self.table, self.positions))
        x = embed_reference.embed(self.items, self.index, table, positions, self.scale, keep, dropout)
        dtable, dpositions = torch.autograd.grad(x, (table, positions), self.grad)
        rows = dtable[self.items] / self.scale
        rows[self.items == 0] = 0
        return x.detach(), rows, dpositions

    def run(
        self, dropout: float, backend: str, integers: torch.dtype = torch.int64, grad_first: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        items, index, starts, lengths = (
            x.to(self.device, integers) for x in (self.items, self.index, self.starts, self.lengths)
        )
        seed = torch.tensor([99], device=self.device)
        table = self.table.to(self.device, self.dtype)
        positions, grad = (x.float().to(self.device) for x in (self.positions, self.grad))
        x = embed(items, index, table, positions, self.scale, dropout, seed, 2, backend=backend)
        how = (self.max_len, dropout, seed, 2, backend)
        grads = embed_backward(grad, items, starts, lengths, *how, grad_first_TF=grad_first)
        return x, *grads


def assert_close(batch: Batch, dropout: float, backend: str, integers: torch.dtype = torch.int64) -> None:
    for name, got, want in zip(
        ("x", "rows", "positions"), batch.run(dropout, backend, integers), batch.exact(dropout), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.allclose(got.double().cpu(), want, rtol=1e-6, atol=1e-5), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize(("shape", "first"), [(([3, 0, 4], 50), 13), (([3, 9], 512), 128), (([1], 8), 8)], ids=str)
def test_a_further_gradient_of_the_first_dims(
    shape: tuple, first: int, dropout: float, backend: str, device: str
) -> None:
    """The same as added before, also where dropout or padding leave nothing of it."""
    batch = Batch(*shape, device)
    want = batch.exact(dropout)
    grad_first = torch.randn(len(batch.grad), first, generator=torch.Generator().manual_seed(1))
    batch.grad[:, :first] -= grad_first
    got = batch.run(dropout, backend, grad_first=grad_first.to(device))
    for name, ours, theirs in zip(("x", "rows", "positions"), got, want, strict=True):
        assert torch.allclose(ours.double().cpu(), theirs, rtol=1e-6, atol=1e-5), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple, dropout: float, backend: str, device: str) -> None:
    assert_close(Batch(*shape, device), dropout, backend)


def test_other_types(device: str) -> None:
    """A table in bf16, and 32-bit integers."""
    assert_close(Batch([3, 4], 50, device, torch.bfloat16), 0.25, "triton", torch.int32)


def test_repeated_items_padding_and_right_padded_batches(device: str) -> None:
    """A batch padded to 4 tokens a row: padding is zero whatever its index says, and adds nothing to the positions."""
    items = torch.tensor([5, 5, 2, 0, 7, 0, 0, 0], device=device)
    index = torch.tensor([0, 1, 2, 2**40, 0, -7, 2**40, 3], device=device)
    table, positions = torch.randn(8, 12, device=device), torch.randn(3, 12, device=device)
    x = embed(items, index, table, positions, 2.0, backend="triton")
    want = torch.cat((table[[5, 5, 2]] * 2 + positions, table[7:] * 2 + positions[:1]))
    assert torch.allclose(x[[0, 1, 2, 4]], want, atol=1e-6) and not x[items == 0].any()
    assert torch.allclose(x, embed(items, index, table, positions, 2.0, backend="torch"), atol=1e-6)
    starts = torch.tensor([0, 4], device=device)
    for lengths in ([3, 1], [4, 4]):  # the rows' own lengths, or the padded ones: padding's gradient is zero
        rows, dpositions = embed_backward(
            torch.ones_like(x), items, starts, torch.tensor(lengths, device=device), 4, backend="triton"
        )
        assert torch.equal(rows[:, 0].cpu(), torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0]))
        assert torch.equal(dpositions[:, 0].cpu(), torch.tensor([2.0, 1, 1, 0]))


def test_deterministic(device: str) -> None:
    batch = Batch([7] * 40, 16, device)
    first, second = (batch.run(0.2, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tokens(device: str) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert embed(empty, empty, torch.ones(2, 8, device=device), torch.ones(3, 8, device=device), 1.0).shape == (0, 8)
    rows, positions = embed_backward(torch.ones(0, 8, device=device), empty, empty, empty, 3, backend="triton")
    assert rows.shape == (0, 8) and not positions.any() and positions.shape == (3, 8)
