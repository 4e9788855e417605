"""The paper's theorems as tests, in float64."""

import math

import pytest
import torch
from conftest import draw_times, scores

from trope import IndexRoPE, TORoPE, TRoPE

MONTH = 30 * 86_400


@pytest.fixture
def qk(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(1, 6, 2, 8, dtype=torch.float64, generator=rng) for _ in range(2))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the rounding of float64 phases at real timestamps (2e7 turns * 2^-53 * 2 pi, with room)."""
    return torch.allclose(a, b, atol=1e-6)


def moved(rope: TRoPE, qk: tuple, times: torch.Tensor, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a history, and of the same history at another time."""
    return scores(rope, *qk, times), scores(rope, *qk, times + shift)


def test_theorem_1_shared_coefficients_are_translation_invariant(qk: tuple, rng: torch.Generator) -> None:
    rope = TRoPE(8, conjugate=False, share_alpha=True)
    assert close(*moved(rope, qk, draw_times((1, 6), rng), MONTH))


@pytest.mark.parametrize("time_share", [0.0, 0.5, 1.0])
def test_remark_torope_is_translation_invariant(time_share: float, qk: tuple, rng: torch.Generator) -> None:
    assert close(*moved(TORoPE(8, time_share=time_share), qk, draw_times((1, 6), rng), MONTH))


def test_index_rope_sees_no_time_at_all(qk: tuple, rng: torch.Generator) -> None:
    rope = IndexRoPE(8)
    assert torch.equal(scores(rope, *qk, draw_times((1, 6), rng)), scores(rope, *qk, None))


def test_index_rope_depends_on_the_offset_only(rng: torch.Generator) -> None:
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=rng).expand(1, 6, 1, 8) for _ in range(2))
    s = scores(IndexRoPE(8), q, k, None)[0, 0]
    for offset in range(-4, 5):
        diagonal = s.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-12)


def test_theorem_2_the_conjugate_key_breaks_invariance(qk: tuple, rng: torch.Generator) -> None:
    """With one shared coefficient, only the key's direction differs from theorem 1."""
    rope = TRoPE(8, conjugate=True, share_alpha=True)
    before, after = moved(rope, qk, draw_times((1, 6), rng), MONTH)
    assert (before - after).abs().max() > 0.1


def test_remark_independent_coefficients_break_it_too(qk: tuple, rng: torch.Generator) -> None:
    rope = TRoPE(8, conjugate=False)
    before, after = moved(rope, qk, draw_times((1, 6), rng), MONTH)
    assert (before - after).abs().max() > 0.1


def test_theorem_2_shifts_where_the_phases_coincide(rng: torch.Generator) -> None:
    """(alpha_q + alpha_k) c / beta in 2 pi Z: that one shift changes nothing, half of it does."""
    rope = TRoPE(2, beta_min=1e4, beta_max=1e4, conditioning="paper")
    torch.nn.init.constant_(rope.alpha_q, 0.75)
    torch.nn.init.constant_(rope.alpha_k, 0.5)
    qk = tuple(torch.randn(1, 6, 1, 2, dtype=torch.float64, generator=rng) for _ in range(2))
    times = draw_times((1, 6), rng).double()
    coincide = 2 * math.pi * 1e4 / (0.75 + 0.5)
    assert close(*moved(rope, qk, times, 7 * coincide))
    before, after = moved(rope, qk, times, coincide / 2)
    assert close(before, -after)  # half a turn


def test_remark_opposite_coefficients_are_the_degenerate_case(qk: tuple, rng: torch.Generator) -> None:
    """alpha_q = -alpha_k makes T-RoPE translation invariant again."""
    rope = TRoPE(8)
    rope.alpha0_k.copy_(-rope.alpha0_q)
    assert close(*moved(rope, qk, draw_times((1, 6), rng), MONTH))


@pytest.mark.parametrize("conditioning", ["span", "paper"])
def test_conjugation_is_a_sign_of_alpha_k(conditioning: str, qk: tuple, rng: torch.Generator) -> None:
    """With independent coefficients the conjugate key is the same family of functions, exactly."""
    conjugate = TRoPE(8, conditioning=conditioning)
    plain = TRoPE(8, conditioning=conditioning, conjugate=False)
    state = conjugate.state_dict()
    plain.load_state_dict({name: -x if name.endswith("_k") else x for name, x in state.items()})
    times = draw_times((1, 6), rng)
    assert torch.equal(scores(conjugate, *qk, times), scores(plain, *qk, times))


@pytest.mark.parametrize("harmonic", [1, 3])
def test_corollary_seasonality(harmonic: int, rng: torch.Generator) -> None:
    """omega_q = 2 pi r / period makes the score periodic in the prediction time, and not constant in between."""
    period = 365 * 86_400
    rope = TRoPE(2, beta_min=1e6, beta_max=1e6, conditioning="paper")
    # alpha is float32: take the period it stands for exactly.
    torch.nn.init.constant_(rope.alpha_q, 2 * math.pi * harmonic * 1e6 / period)
    exact_period = 2 * math.pi * harmonic * 1e6 / rope.alpha_q.item()
    q, k = (torch.randn(1, 6, 1, 2, dtype=torch.float64, generator=rng) for _ in range(2))
    times = draw_times((1, 6), rng).double()
    t_now = times[:, -1] + 86_400.0
    last = [
        scores(rope, q, k, times, t_now + years * exact_period / harmonic)[0, 0, -1]
        for years in (0, harmonic, 2 * harmonic, harmonic / 2)
    ]
    assert torch.allclose(last[0], last[1], atol=1e-6)
    assert torch.allclose(last[0], last[2], atol=1e-6)
    assert (last[0] - last[3]).abs().max() > 0.1


def test_corollary_expansion_has_a_plus_on_the_other_cross_term(rng: torch.Generator) -> None:
    """q^T R(-theta) k = (q1 k1 + q2 k2) cos theta + (q1 k2 - q2 k1) sin theta; the paper prints q2 k1 - q1 k2."""
    rope = TRoPE(2, alpha_init="ones", learnable=False, conditioning="paper", shifted=False)
    q, k = (torch.randn(1, 1, 1, 2, dtype=torch.float64, generator=rng) for _ in range(2))
    theta = (30 + 30) / 100
    (q1, q2), (k1, k2) = q.flatten().tolist(), k.flatten().tolist()
    got = scores(rope, q, k, torch.tensor([[30]])).item()
    assert got == pytest.approx((q1 * k1 + q2 * k2) * math.cos(theta) + (q1 * k2 - q2 * k1) * math.sin(theta))
    assert got != pytest.approx((q1 * k1 + q2 * k2) * math.cos(theta) + (q2 * k1 - q1 * k2) * math.sin(theta))


@pytest.mark.parametrize("conjugate", [False, True])
def test_algorithm_3_gradients(conjugate: bool, rng: torch.Generator) -> None:
    """dX and dPhi as Algorithm 3 writes them, and the coefficient gradients that follow."""
    rope = TRoPE(8, conditioning="paper", conjugate=conjugate, shifted=False, check_values=False)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, generator=rng, requires_grad=True)
    g = torch.randn(2, 3, 2, 8, dtype=torch.float64, generator=rng)
    times = torch.randint(1, 500, (2, 3), generator=rng)
    _, y = rope(torch.zeros_like(x), x, times)
    dx, dalpha = torch.autograd.grad(y, (x, rope.alpha_k), g)
    phi = rope.alpha("k") * times[..., None] / rope.betas
    c, s = phi.cos()[:, :, None], phi.sin()[:, :, None]
    (x0, x1), (g0, g1) = (x[..., 0::2], x[..., 1::2]), (g[..., 0::2], g[..., 1::2])
    if conjugate:
        dx0, dx1 = g0 * c - g1 * s, g0 * s + g1 * c
        dphi = g0 * (-x0 * s + x1 * c) + g1 * (-x1 * s - x0 * c)
    else:
        dx0, dx1 = g0 * c + g1 * s, -g0 * s + g1 * c
        dphi = g0 * (-x0 * s - x1 * c) + g1 * (x0 * c - x1 * s)
    assert torch.allclose(dx, torch.stack((dx0, dx1), -1).flatten(-2), atol=1e-12)
    want = (dphi.sum(2) * times[..., None] / rope.betas).sum((0, 1))
    assert torch.allclose(dalpha.double(), want, rtol=1e-6)


def test_the_query_alone_is_sensitive_to_absolute_time(qk: tuple, rng: torch.Generator) -> None:
    """Removing the key rotation leaves absolute-time sensitivity through the query alone (ablation row 7)."""
    rope = TRoPE(8, rotate_key=False)
    before, after = moved(rope, qk, draw_times((1, 6), rng), MONTH)
    assert (before - after).abs().max() > 0.1
