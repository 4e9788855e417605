"""Exact phases: against rational arithmetic, and the paper's FP32 arithmetic beside them."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trope import TRoPE
from trope.kernels import rotate_qk
from trope.kernels.rotary import reference as rotary_reference
from trope.rotary.checks import LATEST_TIME
from trope.rotary.trope import STEP

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
PLANES = 64


def circular_error(angle: float, exact_turns: Fraction) -> float:
    """Distance on the circle between an angle in radians and a rational number of turns."""
    off = (Fraction(angle) / (2 * PI) - exact_turns) % 1
    return float(min(off, 1 - off) * 2 * PI)


def exact_turns(alpha: float, beta: float, t: int) -> Fraction:
    return Fraction(alpha) * t / (Fraction(beta) * 2 * PI)


def paper_rope(alpha: float, **arguments: object) -> TRoPE:
    rope = TRoPE(2 * PLANES, conditioning="paper", shifted=False, **arguments)
    torch.nn.init.constant_(rope.alpha_q, alpha)
    torch.nn.init.constant_(rope.alpha_k, alpha)
    return rope


def angles(rope: TRoPE, t: int, backend: str, device: str) -> torch.Tensor:
    """The angle each plane really turned by: rotate the unit vector (1, 0) and look where it points, float64 [P]."""
    x = torch.zeros(1, 1, 1, 2 * PLANES, device=device)
    x[..., 0::2] = 1
    freqs_q, freqs_k = rope.to(device).frequencies()
    coords = torch.tensor([[[t]]], device=device)
    y, _ = rotate_qk(x, x, coords, coords, freqs_q, freqs_k, backend=backend)
    y = y.double().cpu()[0, 0, 0]
    return torch.atan2(y[1::2], y[0::2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings(max_examples=100)
@given(t=st.integers(0, LATEST_TIME), alpha=st.floats(-4, 4, width=32))
def test_circular_phase_error_against_rationals(backend: str, t: int, alpha: float) -> None:
    rope = paper_rope(alpha)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got = angles(rope, t, backend, device)
    for angle, beta in zip(got.tolist(), rope.betas.tolist(), strict=True):
        assert circular_error(angle, exact_turns(alpha, beta, t)) <= 1e-6


@settings(max_examples=100)
@given(t=st.integers(0, LATEST_TIME), delta=st.floats(-1, 1, width=32))
def test_conditioned_phase_against_rationals(t: int, delta: float) -> None:
    """phi(t) = (alpha0 / beta + s * delta / T) * (t - t0)."""
    rope = TRoPE(2 * PLANES, shifted=False, time_span=(1_400_000_000, 1_600_000_001))
    torch.nn.init.constant_(rope.delta_q, delta)
    coords, _ = rope.coordinates(torch.Size([1, 1]), torch.tensor([[t]]), None, None, None)
    got = rotary_reference.phase(coords, rope.frequencies()[0])[0, 0]
    t0, span = rope.t0.item(), rope.span.item()
    assert (t0, span) == (1_500_000_000, 200_000_001)
    for angle, beta, alpha0 in zip(got.tolist(), rope.betas.tolist(), rope.alpha0_q.tolist(), strict=True):
        exact = (Fraction(alpha0) / Fraction(beta) + Fraction(STEP) * Fraction(delta) / span) * (t - t0) / (2 * PI)
        assert circular_error(angle, exact) <= 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fp32_is_the_papers_arithmetic(backend: str, device: str) -> None:
    """FP32(alpha) * t / beta, rounded to float32 after each operation, then cos and sin of that float32 angle."""
    rope = TRoPE(2 * PLANES, conditioning="paper", phase="fp32", shifted=False, backend=backend).to(device)
    t = 1_589_043_217
    x = torch.zeros(1, 1, 1, 2 * PLANES, device=device)
    x[..., 0::2] = 1
    q, k = rope(x, x, torch.tensor([[t]], device=device))
    for y, alpha, sign in ((q, rope.alpha_q, 1), (k, rope.alpha_k, -1)):
        alpha32, beta32 = alpha.detach().cpu().numpy(), rope.betas.cpu().numpy().astype(np.float32)
        angle = (alpha32 * np.float32(t)) / beta32
        assert angle.dtype == np.float32
        y = y.detach().cpu().numpy()[0, 0, 0]
        np.testing.assert_allclose(y[0::2], np.cos(angle.astype(np.float64)), atol=2e-7)
        np.testing.assert_allclose(y[1::2], sign * np.sin(angle.astype(np.float64)), atol=2e-7)


def test_fp32_phases_are_noise_on_the_fast_planes() -> None:
    """The measured reason for exact phases: the paper's arithmetic is off by about a radian where beta = 100."""
    rope = paper_rope(1.0)
    times = torch.randint(1_500_000_000, 1_600_000_000, (1, 1, 2000), generator=torch.Generator().manual_seed(0))
    exact = rotary_reference.phase(times, rope.frequencies()[0])
    paper = rotary_reference.phase(times, torch.ones(1, PLANES), rope.betas.float()).double()
    error = torch.atan2((paper - exact).sin(), (paper - exact).cos()).abs().mean(dim=(0, 1))
    assert error[0] > 0.3
    assert error[-1] < 1e-3


def test_float64_times_keep_fractions_of_a_second() -> None:
    rope = paper_rope(1.0)
    whole = torch.tensor([[[1_589_043_217.0]]], dtype=torch.float64)
    freqs = rope.frequencies()[0]
    moved = rotary_reference.phase(whole + 0.5, freqs) - rotary_reference.phase(whole, freqs)
    expected = 0.5 / rope.betas
    assert torch.allclose(torch.atan2(moved.sin(), moved.cos())[0, 0], expected, atol=1e-7)
