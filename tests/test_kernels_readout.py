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


def test_many_tiles_per_program(device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than programs: each sums up several tiles."""
    from trope.kernels import readout_triton

    monkeypatch.setattr(readout_triton, "ROWS", 2)
    test_values_and_gradients(100, 6, 2, torch.float32, device, rng)
