"""Causal softmax attention: the kernel of short sequences against float64, values and gradients, with dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trope.kernels.backend import Backend
from trope.kernels.causal_attention import causal_attention, reference

pytest.importorskip("trope.kernels.causal_attention.triton", reason="needs the package triton")

SHAPES = [(1, 1, 1, 2), (2, 7, 3, 30), (3, 17, 2, 16), (2, 50, 2, 64), (1, 63, 1, 128), (2, 64, 1, 32)]  # B, L, H, D
DTYPES = [torch.float32, torch.bfloat16]
NAMES = ("y", "dq", "dk", "dv")


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and an upstream gradient that `dtype` holds exactly; scores up to about 10."""
    rng = torch.Generator().manual_seed(0)
    return [(2 * torch.randn(shape, generator=rng)).to(dtype).double() for _ in range(4)]


def run(drawn: list[Tensor], device: str, dtype: torch.dtype, backend: Backend, dropout: float) -> list[Tensor]:
    *inputs, g = (x.to(device, dtype) for x in drawn)
    inputs = [x.requires_grad_() for x in inputs]
    seed = torch.tensor([5], device=device) if dropout else None
    y = causal_attention(*inputs, dropout=dropout, seed=seed, stream=3, backend=backend)
    assert y.dtype == dtype and y.shape == g.shape
    return [x.double().cpu() for x in (y.detach(), *torch.autograd.grad(y, inputs, g))]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, dropout: float, device: str) -> None:
    drawn = draw(shape, dtype)
    want = run(drawn, "cpu", torch.float64, "torch", dropout)
    got = run(drawn, device, dtype, "triton", dropout)
    most = 2e-5 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(NAMES, got, want, strict=True):
        # A single position has a weight of one, whatever its score, so q and k have no gradient.
        assert float((a - b).norm()) <= most * max(float(b.norm()), 1e-2), name


def test_the_reference_drops_weights_of_torchs_attention() -> None:
    """Without dropout torch's own; with it, what is kept grows, and what is dropped counts for nothing."""
    q, k, v, _ = draw((2, 9, 2, 8), torch.float64)
    plain = causal_attention(q, k, v, backend="torch")
    torch.testing.assert_close(plain, reference.by_torch(q, k, v))
    seeds = [torch.tensor([number]) for number in range(400)]
    many = torch.stack([causal_attention(q, k, v, 0.3, seed, backend="torch") for seed in seeds])
    torch.testing.assert_close(many.mean(0), plain, atol=0.35, rtol=0)
    assert not torch.equal(many[0], many[1])
    again = causal_attention(q, k, v, 0.3, seeds[0], backend="torch")
    assert torch.equal(again, many[0])
    assert not torch.equal(again, causal_attention(q, k, v, 0.3, seeds[0], stream=1, backend="torch"))


def test_gradients_of_the_reference() -> None:
    inputs = [x.requires_grad_() for x in draw((1, 5, 2, 4), torch.float64)[:3]]
    seed = torch.tensor([1])
    assert torch.autograd.gradcheck(lambda *qkv: causal_attention(*qkv, 0.3, seed, backend="torch"), inputs)


def test_strided_inputs_and_no_sequences(device: str) -> None:
    """Views of one projection, as blocks have them, and a part of longer sequences, whose tokens are not one stride."""
    joint = torch.randn((2, 9, 3, 2, 8), generator=torch.Generator().manual_seed(1)).to(device)
    for q, k, v in (joint.unbind(2), joint[:, :5].unbind(2)):
        want = causal_attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="triton")
        assert torch.equal(causal_attention(q, k, v, backend="triton"), want)
    q = torch.empty((0, 9, 2, 8), device=device, requires_grad=True)
    causal_attention(q, q, q, backend="triton").sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


def test_nothing_of_later_positions_is_seen(device: str) -> None:
    q, k, v, _ = (x.float().to(device) for x in draw((1, 20, 1, 16), torch.float32))
    y = causal_attention(q, k, v, backend="triton")
    k[:, 10:], v[:, 10:] = 7.0, 9.0
    changed = causal_attention(q, k, v, backend="triton")
    assert torch.equal(changed[:, :10], y[:, :10])
    assert not torch.equal(changed[:, 10:], y[:, 10:])


def test_long_sequences_take_torchs_attention(device: str) -> None:
    q, k, v, _ = (x.float().to(device) for x in draw((1, 65, 1, 16), torch.float32))
    assert torch.equal(causal_attention(q, k, v, backend="triton"), reference.by_torch(q, k, v))
