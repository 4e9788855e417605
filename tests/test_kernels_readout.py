"""The fused end of the network with a readout by time, against the reference."""

from __future__ import annotations

import pytest
import torch
from conftest import draw_times

from trope.kernels import Backend
from trope.kernels.readout import add_turned

MIDDLE = 1_550_000_000


@pytest.mark.parametrize(("tokens", "width", "planes", "dtype"), [
    (1, 4, 1, torch.float32), (13, 24, 5, torch.float32), (9, 300, 70, torch.bfloat16), (40, 128, 64, torch.float32),
    (0, 8, 2, torch.float32),
])  # fmt: skip
def test_values_and_gradients(
    tokens: int, width: int, planes: int, dtype: torch.dtype, device: str, rng: torch.Generator
) -> None:
    """Values and gradients; what the last block adds is bf16 under autocast."""
    x, delta, start, up = (torch.randn(tokens, width, generator=rng) for _ in range(4))
    coords, freqs = draw_times((tokens,), rng) - MIDDLE, torch.rand(planes, generator=rng).double() / 1e7

    def run(backend: Backend) -> list[torch.Tensor]:
        given = [x, delta.to(dtype), start, freqs]
        x_, delta_, start_, freqs_ = (each.to(device).clone().requires_grad_() for each in given)
        y = add_turned(x_, delta_, start_, coords.to(device), freqs_, backend)
        grads = torch.autograd.grad(y, (x_, delta_, start_, freqs_), up.to(device))
        return [each.detach().double().cpu() for each in (y, *grads)]

    # The interpreter truncates to bf16, a GPU rounds. A frequency gradient is a sum of differences, small beside them.
    sizes = (1e-6, 1e-6, 2**-7 if dtype == torch.bfloat16 else 1e-6, 1e-6, 1e-6 * coords.abs().sum().item())
    for want, got, size in zip(run("torch"), run("triton"), sizes, strict=True):
        assert want.shape == got.shape and torch.allclose(got, want, rtol=1e-6, atol=4 * size)


@pytest.mark.parametrize("present", [(), ("delta",), ("start",)], ids=str)
def test_without_a_delta_or_a_start(present: tuple[str, ...], device: str, rng: torch.Generator) -> None:
    """As with zeros in their place; there is no gradient for what is not there."""
    coords, freqs = (draw_times((6,), rng) - MIDDLE).to(device), torch.rand(3, generator=rng).double().to(device) / 1e7
    x, delta, start, up = (torch.randn(6, 20, generator=rng).to(device) for _ in range(4))
    found = []
    for backend, absent in (("torch", torch.zeros_like(x)), ("torch", None), ("triton", None)):
        x_, freqs_ = x.clone().requires_grad_(), freqs.clone().requires_grad_()
        given = (delta if "delta" in present else absent, start if "start" in present else absent)
        y = add_turned(x_, *given, coords, freqs_, backend)  # type: ignore[arg-type]
        found.append((y, *torch.autograd.grad(y, (x_, freqs_), up)))
    for want, *others in zip(*found, strict=True):
        for got in others:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every second", "one row for all"])
def test_gradients_and_inputs_of_any_strides(layout: str, device: str, rng: torch.Generator) -> None:
    coords, freqs = (draw_times((6,), rng) - MIDDLE).to(device), torch.rand(2, generator=rng).double().to(device) / 1e7
    strange = {
        "transposed": torch.randn(10, 6, generator=rng).T, "expanded": torch.randn(6, 1, generator=rng).expand(6, 10),
        "every second": torch.randn(6, 20, generator=rng)[:, ::2], "one row for all": torch.ones(10).expand(6, 10),
    }[layout].to(device)  # fmt: skip
    plain = torch.randn(6, 10, generator=rng).to(device)
    found = []
    for backend in ("torch", "triton"):
        x, start = (each.detach().requires_grad_() for each in (strange, plain))
        y = add_turned(x, strange, start, coords, freqs, backend)
        found.append((y, *torch.autograd.grad(y, (x, start), strange)))
    for want, got in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_a_stream_in_bf16_stays_bf16(device: str, rng: torch.Generator) -> None:
    coords, freqs = (draw_times((6,), rng) - MIDDLE).to(device), torch.rand(2, generator=rng).double().to(device) / 1e7
    x, delta = (torch.randn(6, 10, generator=rng).to(device) for _ in range(2))
    want, got = (add_turned(x.bfloat16(), delta, delta, coords, freqs, backend) for backend in ("torch", "triton"))
    assert want.dtype == got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want.float(), atol=2**-5)


def test_the_reference_by_differences(rng: torch.Generator) -> None:
    """In float64, with coordinates and frequencies of order 1, so that differences mean something."""
    x, delta, start = (torch.randn(4, 6, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3))
    coords = torch.tensor([-2, 0, 1, 3])
    freqs = torch.rand(2, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *given: add_turned(*given[:3], coords, given[3], "torch"), (x, delta, start, freqs)
    )


def test_a_second_derivative_is_refused(device: str, rng: torch.Generator) -> None:
    """Not silently zero."""
    x = torch.randn(3, 4, generator=rng).to(device).requires_grad_()
    coords, freqs = torch.tensor([1, 2, 3]).to(device), torch.full((1,), 0.1, dtype=torch.float64, device=device)
    (grad,) = torch.autograd.grad(add_turned(x, x, x, coords, freqs, "triton").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_many_tiles_per_program(device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than programs: each sums up several tiles."""
    from trope.kernels.readout import triton as readout_triton

    monkeypatch.setattr(readout_triton, "ROWS", 2)
    test_values_and_gradients(100, 6, 2, torch.float32, device, rng)
