"""The norms of the blocks and the dropout masks, against the float64 reference: values and all gradients."""

import itertools

import pytest
import torch

from trope.kernels.norm import gate, norm
from trope.kernels.norm import reference as norm_reference
from trope.kernels.random import reference as random_reference
from trope.kernels.random import triton as random_triton

SHAPES = [(1, 8), (7, 50), (5, 64), (19, 128), (3, 512), (2, 1024), (2, 6)]  # T, E


def draw(shape: tuple, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """float64 numbers that `dtype` holds exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).double()


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding of the result (the interpreter truncates), and float32 arithmetic before it."""
    assert got.dtype == dtype
    assert torch.allclose(got.detach().double().cpu(), want, rtol=torch.finfo(dtype).eps, atol=5e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple, dtype: torch.dtype, rms: bool, dropout: float, device: str) -> None:
    seed = torch.tensor([2**40 + 5], device=device)
    keep = random_triton.keep_mask(seed, 3, shape, dropout).cpu() if dropout else None
    values = draw(shape, torch.float32, 0) + 3, draw(shape, dtype, 1)
    upstream = draw(shape, torch.float32, 2), draw(shape, dtype, 3)
    exact = [x.clone().requires_grad_() for x in values]
    want = norm_reference.norm(*exact, 1e-6, torch.float64, rms, keep, dropout)
    want_grads = torch.autograd.grad(want, exact, upstream)
    x, delta = (v.to(device, d).requires_grad_() for v, d in zip(values, (torch.float32, dtype), strict=True))
    got = norm(x, delta, 1e-6, dtype, rms, dropout, seed, stream=3, backend="triton")
    got_grads = torch.autograd.grad(
        got, (x, delta), [g.to(device, d) for g, d in zip(upstream, (torch.float32, dtype), strict=True)]
    )
    assert_close(got[0], want[0].detach(), torch.float32)
    assert_close(got[1], want[1].detach(), dtype)
    assert_close(got_grads[0], want_grads[0], torch.float32)
    assert_close(got_grads[1], want_grads[1], dtype)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_norm_with_parts_missing(rms: bool, with_delta: bool, which: tuple, device: str) -> None:
    """No delta: the stream itself comes back. A gradient that nobody sends counts as zero."""
    values = [draw((5, 12), torch.float32, i) for i in range(2)][: 1 + with_delta]
    upstream = [draw((5, 12), torch.float32, 2 + i) for i in which]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        inputs = [x.to(device, dtype).requires_grad_() for x in values]
        out = norm(*inputs, out_dtype=dtype, rms=rms, backend=backend)
        grads = torch.autograd.grad([out[i] for i in which], inputs, [g.to(device, dtype) for g in upstream])
        results.append([x.detach().double().cpu() for x in (*out, *grads)])
    for want, got in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-6, atol=5e-6)


def test_norm_returns_the_stream_without_a_copy(device: str) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    assert norm(x, backend="triton")[0].data_ptr() == x.data_ptr()


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = draw((5, 12), torch.float32, 0) + 2
    new, out = norm(x, out_dtype=torch.float64, rms=True, backend="torch")
    assert new is x
    torch.testing.assert_close(out, x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt())


def test_the_backends_drop_the_same_of_a_branch(device: str) -> None:
    x, delta = (draw((9, 40), torch.float32, i).float().to(device) for i in range(2))
    seed = torch.tensor([7], device=device)
    added = [
        norm(x, delta, out_dtype=torch.float32, rms=True, dropout=0.5, seed=seed, stream=2, backend=backend)[0] - x
        for backend in ("torch", "triton")
    ]
    assert torch.equal(added[0] == 0, added[1] == 0)
    assert 0.3 < (added[0] == 0).float().mean() < 0.7
    torch.testing.assert_close(*added)


def test_norm_of_a_stream_far_from_zero(device: str) -> None:
    """Two-pass moments: a mean of 1000 deviations costs digits of the input, not of the variance."""
    values = (draw((3, 64), torch.float32, 0) + 1000).float()
    want = norm_reference.norm(values.double(), None, 1e-6, torch.float64)[1]
    got = norm(values.to(device), out_dtype=torch.float32, backend="triton")[1]
    assert (got.double().cpu() - want).abs().max() < 2e-4


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: tuple, dtype: torch.dtype, dropout: float, device: str) -> None:
    values, upstream = (draw(shape, dtype, 0), draw(shape, dtype, 1)), draw(shape, dtype, 2)
    seed = torch.tensor([2**40 + 5], device=device)
    keep = random_triton.keep_mask(seed, 3, shape, dropout).cpu() if dropout else None
    exact = [x.clone().requires_grad_() for x in values]
    want = norm_reference.gate(*exact, keep, dropout, 1e-6)
    want_grads = torch.autograd.grad(want, exact, upstream)
    inputs = [x.to(device, dtype).requires_grad_() for x in values]
    got = gate(*inputs, dropout, seed, stream=3, backend="triton")
    got_grads = torch.autograd.grad(got, inputs, upstream.to(device, dtype))
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert_close(a, b.detach(), dtype)


def test_gate_of_strided_rows(device: str) -> None:
    """u as silu_rotate leaves it, one of four; y as a slice; and the backends drop the same elements."""
    joint, wide = draw((6, 4, 2, 8), torch.float32, 0), draw((6, 20), torch.float32, 1)
    seed, results = torch.tensor([7], device=device), []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        parts, y = (x.to(device, dtype).clone().requires_grad_() for x in (joint, wide))
        out = gate(y[:, 4:], parts[:, 0].flatten(1), 0.5, seed, 1, backend=backend)
        out.square().sum().backward()
        results.append([x.detach().double().cpu() for x in (out, y.grad, parts.grad)])
    for want, got in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=2e-5)


def test_without_a_seed_nothing_drops(device: str) -> None:
    y, u = (draw((4, 32), torch.float32, i).float().to(device) for i in range(2))
    assert torch.equal(gate(y, u, 0.5, None, backend="triton"), gate(y, u, 0.0, backend="triton"))
    assert (gate(y, u, 0.5, torch.tensor([1], device=device), backend="triton") == 0).any()


def test_empty(device: str) -> None:
    x = torch.empty(0, 8, device=device, requires_grad=True)
    norm(x, x, backend="triton")[1].sum().backward()
    gate(x, x, backend="triton").sum().backward()
    assert x.grad.shape == (0, 8)


def test_philox_is_the_published_one() -> None:
    """Known answers of the Random123 distribution for Philox4x32-10."""
    for counter, seed, want in (
        ([0] * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([0xFFFFFFFF] * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        words = random_reference.philox(tuple(torch.tensor([c]) for c in counter), torch.tensor([seed]))
        assert tuple(int(w) for w in words) == want


@pytest.mark.parametrize("shape", [(1, 1), (13, 50), (9, 128)], ids=str)
@pytest.mark.parametrize("seed", [0, -3, 2**40 + 5])
def test_masks_are_the_same_in_torch_and_triton(seed: int, shape: tuple, device: str) -> None:
    seed_tensor = torch.tensor([seed], device=device)
    want = random_reference.keep_mask(seed_tensor, 11, shape, 0.3)
    assert torch.equal(random_triton.keep_mask(seed_tensor, 11, shape, 0.3), want)


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_masks_keep_their_rate_and_do_not_repeat(p: float, device: str) -> None:
    """Rates within 4 standard errors, overall and by column; masks of two places or steps agree as chance has it."""
    n, columns = 65536, 64
    low, high = torch.tensor([5], device=device), torch.tensor([5 + 2**32], device=device)
    masks = [
        random_reference.keep_mask(seed, stream, (n // columns, columns), p).double()
        for seed, stream in ((low, 0), (low, 1), (low + 1, 0), (high, 0))
    ]
    error = (p * (1 - p)) ** 0.5
    for mask in masks:
        assert abs(mask.mean() - (1 - p)) < 4 * error / n**0.5
        assert (mask.mean(0) - (1 - p)).abs().max() < 5 * error / (n / columns) ** 0.5
        assert abs((mask[:, 1:] * mask[:, :-1]).mean() - (1 - p) ** 2) < 5 * error / n**0.5  # neighbours independent
    for a, b in itertools.combinations(masks, 2):
        assert abs((a == b).double().mean() - (p**2 + (1 - p) ** 2)) < 4 * 0.5 / n**0.5
