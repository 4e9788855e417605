"""q, k and v of a Transformer's projection, rotated and padded, against the float64 reference: values and gradients."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import draw_times

from trope.kernels.rotary import rotate_qk
from trope.kernels.silu_rotate import Turns
from trope.kernels.split_rotate import split_rotate

SHAPES = [(1, 1, 2, 2), (7, 3, 30, 30), (9, 1, 50, 50), (37, 8, 32, 32), (10, 4, 128, 128), (5, 3, 7, 4)]
# T, H, D, rotary_dim
KINDS = ["none", "frequencies", "linear", "paper", "two coordinates"]


class Problem:
    """Random inputs in float64 that are exactly representable in `dtype`."""

    def __init__(self, shape: tuple, kind: str, device: str, dtype: torch.dtype, padded: bool = False) -> None:
        T, self.heads, D, rotary_dim = shape
        rng, P, C = torch.Generator().manual_seed(0), rotary_dim // 2, 2 if kind == "two coordinates" else 1
        self.kind, self.device, self.dtype = kind, device, dtype
        self.slots, self.rows = None, None
        rows = T
        if padded:  # rows without a token between, before and behind the others
            self.rows = rows = 2 * T + 3
            self.slots = (torch.randperm(rows, generator=rng)[:T]).to(device)
        self.pre = torch.randn(T, 3 * self.heads * D, generator=rng).to(dtype).double()
        self.grads = torch.randn(3, rows, self.heads, D, generator=rng).to(dtype).double()
        self.coords = [torch.stack([draw_times((T,), rng) for _ in range(C)]).to(device) for _ in range(2)]
        betas = torch.logspace(2, 8, P, dtype=torch.float64)
        self.alphas = [torch.randn(C, P, generator=rng).to(device) for _ in range(2)]
        self.betas, self.periods = betas.float().to(device), (2 * math.pi * betas).to(device)

    def turns(self) -> tuple[list[torch.Tensor], Turns | None]:
        """What is learned, and how planes turn by it."""
        if self.kind == "none":
            return [], None
        if self.kind == "linear":
            learned = [alpha[0].clone().requires_grad_() for alpha in self.alphas]
            base, slope = (1 / self.periods)[None], (0.5 / self.periods)[None]
            return learned, Turns(base, -base, slope, -slope, *learned, origin=torch.tensor(10**9, device=self.device))
        if self.kind == "paper":
            learned = [alpha.clone().requires_grad_() for alpha in self.alphas]
            return learned, Turns(*learned, betas=self.betas)
        learned = [(alpha.double() / self.periods).requires_grad_() for alpha in self.alphas]
        return learned, Turns(*learned)

    def run(
        self, backend: str, dtype: torch.dtype | None = None, interleaved: bool = True, which: tuple = (0, 1, 2)
    ) -> list[torch.Tensor]:
        """q, k, v and the gradients of the projection and of what is learned; gradients from `which`."""
        dtype = dtype or self.dtype
        pre = self.pre.to(self.device, dtype).requires_grad_()
        learned, turns = self.turns()
        where = (None, None) if turns is None else self.coords
        out = split_rotate(pre, self.heads, *where, turns, interleaved, self.slots, self.rows, backend)  # type: ignore
        assert all(y.dtype == dtype for y in out)
        upstream = [self.grads[i].to(self.device, dtype) for i in which]
        inputs = [pre, *learned]
        grads = torch.autograd.grad([out[i] for i in which], inputs, upstream, materialize_grads=True)
        return [x.detach().double().cpu() for x in (*out, *grads)]


def assert_as_good_as_reference(problem: Problem, **options) -> None:
    exact, reference = problem.run("torch", torch.float64, **options), problem.run("torch", **options)
    kernel = problem.run("triton", **options)
    for name, want, ref, got in zip(("q", "k", "v", "dpre"), exact, reference, kernel, strict=False):
        # The paper's float32 phases differ from float64's by design: there the reference in float32 is the truth.
        want = ref if problem.kind == "paper" else want
        assert torch.allclose(got, want, rtol=torch.finfo(problem.dtype).eps, atol=4e-6), name
    for want, ref, got in zip(exact[4:], reference[4:], kernel[4:], strict=True):
        slack = 2e-6
        if problem.kind == "paper":
            # Two sums in float32 in different orders. For each token and head: times the moment, over beta, added.
            want, slack = ref, 3 * len(problem.pre) * problem.heads * torch.finfo(torch.float32).eps
        assert (got - want).norm() <= 3 * (ref - want).norm() + slack * want.norm()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "linear"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple, kind: str, dtype: torch.dtype, padded: bool, device: str) -> None:
    assert_as_good_as_reference(Problem(shape, kind, device, dtype, padded))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_frequency(kind: str, interleaved: bool, padded: bool, device: str) -> None:
    assert_as_good_as_reference(Problem((7, 3, 12, 10), kind, device, torch.float32, padded), interleaved=interleaved)


@pytest.mark.parametrize("which", [(0,), (1, 2), (2,)], ids=str)
def test_missing_gradients_are_zero(which: tuple, device: str) -> None:
    problem = Problem((7, 2, 8, 8), "linear", device, torch.float32)
    assert_as_good_as_reference(problem, which=which)
    dpre = problem.run("triton", which=which)[3].view(7, 3, -1)
    assert [bool(dpre[:, i].any()) for i in range(3)] == [i in which for i in range(3)]


def test_many_tiles_per_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward loops over tiles once there are more of them than partial rows; the last program has fewer."""
    from trope.kernels.split_rotate import triton as fused

    monkeypatch.setattr(fused, "ROWS", 3)
    assert_as_good_as_reference(Problem((126, 2, 64, 64), "linear", device, torch.float32))


def test_gradients_are_deterministic(device: str) -> None:
    problem = Problem((80, 3, 16, 16), "linear", device, torch.bfloat16, padded=True)
    for first, second in itertools.pairwise(problem.run("triton") for _ in range(3)):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_reference_is_rotate_qk() -> None:
    problem = Problem((7, 3, 12, 10), "frequencies", "cpu", torch.float64)
    q, k, v = problem.pre.unflatten(1, (3, 3, 12)).unbind(1)
    freqs = [alpha.double() / problem.periods for alpha in problem.alphas]
    want = rotate_qk(q[None], k[None], *(c[:, None] for c in problem.coords), *freqs, backend="torch")
    got = problem.run("torch")
    assert all(torch.equal(a, b) for a, b in zip(got, (want[0][0], want[1][0], v), strict=False))


def test_full_rows_that_do_not_turn_are_views(device: str) -> None:
    pre = torch.randn(6, 3 * 2 * 4, device=device, requires_grad=True)
    for i, part in enumerate(split_rotate(pre, 2, backend="triton")):
        assert part.data_ptr() == pre.data_ptr() + i * 8 * pre.element_size() and part.stride() == (24, 4, 1)


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_between_the_projection_and_torchs_attention(kind: str, device: str) -> None:
    """Gradients come from attention as its backward leaves them, through views."""
    problem = Problem((12, 2, 8, 8), kind, device, torch.float32)
    results = []
    for backend in ("torch", "triton"):
        pre = problem.pre.float().to(device).requires_grad_()
        learned, turns = problem.turns()
        where = (None, None) if turns is None else problem.coords
        parts = split_rotate(pre, 2, *where, turns, backend=backend)  # type: ignore[arg-type]
        q, k, v = (x.unflatten(0, (3, 4)).transpose(1, 2) for x in parts)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
        results.append([x.grad for x in (pre, *learned)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_no_tokens(padded: bool, device: str) -> None:
    pre = torch.empty(0, 12, device=device, requires_grad=True)
    slots = (torch.empty(0, dtype=torch.int64, device=device), 4) if padded else (None, None)
    q, _, v = split_rotate(pre, 2, slots_T=slots[0], rows=slots[1], backend="triton")
    (q + v).sum().backward()
    assert pre.grad is not None and pre.grad.shape == (0, 12) and len(q) == (4 if padded else 0)
