"""The gate of a SwiGLU against the float64 reference: values and gradients."""

import pytest
import torch

from trope.kernels.swiglu import swiglu

SHAPES = [(1, 1), (7, 30), (3, 64), (19, 63), (10, 272), (70, 43)]  # T, F


def run(pre: torch.Tensor, g: torch.Tensor, device: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
    inputs = pre.to(device, dtype).requires_grad_()
    out = swiglu(inputs, backend=backend)  # type: ignore[arg-type]
    assert out.dtype == dtype and out.is_contiguous()
    (grad,) = torch.autograd.grad(out, inputs, g.to(device, dtype))
    return [out.detach().double().cpu(), grad.double().cpu()]


def draw(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection and an upstream gradient that `dtype` holds exactly; SiLU's far ends among them."""
    T, F = shape
    rng = torch.Generator().manual_seed(0)
    pre, g = 3 * torch.randn(T, 2 * F, generator=rng), torch.randn(T, F, generator=rng)
    pre[0, 0], pre[-1, F - 1] = -80.0, 90.0
    return pre.to(dtype).double(), g.to(dtype).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    pre, g = draw(shape, dtype)
    want, got = run(pre, g, "cpu", torch.float64, "torch"), run(pre, g, device, dtype, "triton")
    for name, a, b in zip(("out", "dpre"), got, want, strict=True):
        assert torch.allclose(a, b, rtol=max(torch.finfo(dtype).eps, 2e-6), atol=3e-6), name


def test_the_reference_is_silu_of_the_first_half_times_the_second() -> None:
    pre, _ = draw((5, 8), torch.float64)
    gate, value = pre[:, :8], pre[:, 8:]
    torch.testing.assert_close(swiglu(pre, backend="torch"), gate / (1 + (-gate).exp()) * value)
    torch.autograd.gradcheck(lambda x: swiglu(x, backend="torch"), pre.clamp(-9, 9).requires_grad_())


def test_strided_inputs_and_no_tokens(device: str) -> None:
    pre, g = draw((6, 10), torch.float32)
    wide = torch.cat((pre, pre), dim=1).float().to(device)
    assert torch.equal(swiglu(wide[:, :20], backend="triton"), swiglu(pre.float().to(device), backend="triton"))
    transposed = run(pre, g.t().contiguous().t(), device, torch.float32, "triton")[1]
    assert torch.equal(transposed, run(pre, g, device, torch.float32, "triton")[1])
    empty = torch.empty(0, 6, device=device, requires_grad=True)
    swiglu(empty, backend="triton").sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 6)
