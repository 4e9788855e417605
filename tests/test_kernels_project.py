"""The linear map against torch's own: values and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trope.kernels.project import project

project_triton = pytest.importorskip("trope.kernels.project.triton", reason="needs the package triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 3, 2), (37, 16, 50), (600, 8, 130)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_values_and_gradients(
    backend: str, with_bias: bool, tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, g = (
        torch.randn(size, generator=generator).to(dtype).float().to(device)
        for size in ((tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs))
    )
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = F.linear(*exact[:2], exact[2] if with_bias else None)
    want.backward(g.double())
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = project(ours[0].to(dtype), ours[1].t(), ours[2] if with_bias else None, backend=backend)  # type: ignore[arg-type]
    assert y.dtype == dtype
    y.backward(g.to(dtype))
    relative = 1e-5 if dtype == torch.float32 else 2e-2
    pairs = [(y, want), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True) if b.grad is not None)]
    assert len(pairs) == (4 if with_bias else 3)
    for got, expected in pairs:
        error = (got.double() - expected).norm() / expected.norm()
        assert error < relative


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (513, 7), (2000, 300)])
def test_sums_of_rows(shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(project_triton.sum_rows(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
