"""The rotation itself: sign, layouts, formula, gradients, dtypes."""

import math

import pytest
import torch
from conftest import draw_times, scores

from trope import IndexRoPE, TORoPE, TRoPE
from trope.kernels import rotate_qk

LAYOUTS = ("interleaved", "halves")


def plane(x: torch.Tensor, p: int, planes: int, layout: str) -> torch.Tensor:
    """The two components of plane p, [..., 2]."""
    return x[..., [2 * p, 2 * p + 1]] if layout == "interleaved" else x[..., [p, planes + p]]


def matrix(phi: float) -> torch.Tensor:
    """R(phi), equation 1 of the paper, written out."""
    return torch.tensor([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]], dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_the_papers_formula(layout: str, rng: torch.Generator) -> None:
    """a_mn = sum_d q_m,d^T R(-(alpha_q t_(m+1) + alpha_k t_n) / beta_d) k_n,d (eq. attention), to 1e-12."""
    rope = TRoPE(6, conditioning="paper", layout=layout, check_values=False)
    L = 4
    q, k = (torch.randn(1, L, 1, 6, dtype=torch.float64, generator=rng) for _ in range(2))
    times, t_now = torch.tensor([[3, 50, 707, 9001]]), torch.tensor([12345])
    got = scores(rope, q, k, times, t_now)[0, 0]
    t_query = [*times[0, 1:].tolist(), 12345]
    alpha_q, alpha_k, betas = rope.alpha("q").tolist(), rope.alpha("k").tolist(), rope.betas.tolist()
    for m in range(L):
        for n in range(L):
            want = torch.zeros((), dtype=torch.float64)
            for d in range(3):
                angle = (alpha_q[d] * t_query[m] + alpha_k[d] * times[0, n].item()) / betas[d]
                q_d, k_d = plane(q[0, m, 0], d, 3, layout), plane(k[0, n, 0], d, 3, layout)
                want += q_d @ matrix(-angle) @ k_d
            assert abs(got[m, n] - want) <= 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sign_is_pinned(layout: str) -> None:
    """The query turns by +phi, the conjugate key by -phi: (1, 0) goes to (cos, sin) and (cos, -sin)."""
    rope = TRoPE(2, alpha_init="ones", learnable=False, conditioning="paper", shifted=False, layout=layout)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    q, k = rope(x, x, torch.tensor([[30]]))
    phi = 30 / 100
    assert torch.allclose(q.flatten(), torch.tensor([math.cos(phi), math.sin(phi)], dtype=torch.float64))
    assert torch.allclose(k.flatten(), torch.tensor([math.cos(phi), -math.sin(phi)], dtype=torch.float64))


def test_layouts_are_permutations_of_each_other(rng: torch.Generator) -> None:
    torch.manual_seed(1)
    first = TRoPE(8, layout="interleaved")
    second = TRoPE(8, layout="halves")
    second.load_state_dict(first.state_dict())
    q, k = (torch.randn(2, 5, 3, 8, generator=rng) for _ in range(2))
    times = draw_times((2, 5), rng)
    to_halves = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    y_q, y_k = first(q, k, times)
    z_q, z_k = second(q[..., to_halves], k[..., to_halves], times)
    assert torch.equal(y_q[..., to_halves], z_q)
    assert torch.equal(y_k[..., to_halves], z_k)


@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_dims_past_rotary_dim_pass_through(rotary_dim: int, rng: torch.Generator) -> None:
    rope = TRoPE(9, rotary_dim=rotary_dim)
    q, k = (torch.randn(2, 5, 3, 9, generator=rng) for _ in range(2))
    y_q, y_k = rope(q, k, draw_times((2, 5), rng))
    assert torch.equal(y_q[..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(y_k[..., rotary_dim:], k[..., rotary_dim:])
    assert not torch.isclose(y_q[..., :rotary_dim], q[..., :rotary_dim]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
def test_norms_are_preserved(encoding: type, layout: str, rng: torch.Generator) -> None:
    q, k = (torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    y_q, y_k = encoding(8, layout=layout)(q, k, draw_times((2, 5), rng))
    assert torch.allclose(y_q.norm(dim=-1), q.norm(dim=-1), atol=1e-14)
    assert torch.allclose(y_k.norm(dim=-1), k.norm(dim=-1), atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_of_the_reference(layout: str, rng: torch.Generator) -> None:
    """Numerical gradients in x and in the frequencies, at small coordinates: the latter are proportional to them."""
    q = torch.randn(2, 3, 2, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    k = torch.randn(2, 3, 1, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    freqs = [torch.randn(1, 2, dtype=torch.float64, generator=rng, requires_grad=True) for _ in range(2)]
    coords = torch.randint(-5, 6, (1, 2, 3), generator=rng)

    def rotated(q, k, freq_q, freq_k):
        return rotate_qk(q, k, coords, coords + 1, freq_q, freq_k, interleaved=layout == "interleaved", backend="torch")

    assert torch.autograd.gradcheck(rotated, (q, k, *freqs))


@pytest.mark.parametrize("options", [{}, {"conditioning": "paper"}, {"bank": "calendar"}, {"share_alpha": True}])
def test_gradcheck_of_the_coefficients(options: dict, rng: torch.Generator) -> None:
    """Through the whole module in float64, the coefficients perturbed one by one; real timestamps of one hour.

    The paper's own conditioning is checked on small times: at 1.6e9 s a perturbed alpha turns fast planes many times.
    """
    rope = TRoPE(8, **options, check_values=False).double()
    base = 1_000 if options.get("conditioning") == "paper" else 1_500_000_000
    times = base + torch.randint(0, 3600, (2, 4), generator=rng).sort(dim=1).values
    q, k = (torch.randn(2, 4, 2, 8, dtype=torch.float64, generator=rng) for _ in range(2))
    weight = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=rng)

    def loss() -> torch.Tensor:
        return (scores(rope, q, k, times) * weight).sum()

    step = 2.0**-12  # coefficients are float32: a power of two is exact there
    for parameter in rope.parameters():
        (gradient,) = torch.autograd.grad(loss(), parameter)
        for p in range(parameter.numel()):
            with torch.no_grad():
                kept = parameter[p].item()
                parameter[p] = kept + step
                above, high = loss(), parameter[p].item()
                parameter[p] = kept - step
                below, low = loss(), parameter[p].item()
                parameter[p] = kept
            assert gradient[p].item() == pytest.approx((above - below).item() / (high - low), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
def test_every_dtype_comes_back_as_itself(dtype: torch.dtype, encoding: type, rng: torch.Generator) -> None:
    """Turned in float32 (float64 for float64) and rounded once: within one rounding of the float64 result."""
    rope = encoding(16)
    q, k = (torch.randn(2, 5, 3, 16, generator=rng).to(dtype) for _ in range(2))
    times = draw_times((2, 5), rng)
    exact = rope(q.double(), k.double(), times)
    for y, want in zip(rope(q, k, times), exact, strict=True):
        assert y.dtype == dtype
        assert torch.allclose(y.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_key_heads_may_differ_from_query_heads(rng: torch.Generator) -> None:
    """Grouped-query attention: k has fewer heads."""
    rope = TRoPE(8)
    q, k = torch.randn(2, 5, 4, 8, generator=rng), torch.randn(2, 5, 2, 8, generator=rng)
    times = draw_times((2, 5), rng)
    y_q, y_k = rope(q, k, times)
    assert torch.equal(y_k, rope(q[:, :, :2], k, times)[1])
    assert torch.equal(y_q[:, :, :2], rope(q[:, :, :2], k, times)[0])
