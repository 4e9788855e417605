"""The fused SiLU and rotation of HSTU's projection against the float64 reference: values and all gradients.

Tolerances come from the float64 run, as in test_kernels.py: one unit in the last place of the dtype, and for the
frequency gradients a small multiple of what the torch reference in the same dtype is off.
"""

import itertools
import math

import pytest
import torch
from conftest import draw_times

from trope.kernels.gradient_buffer import GradientBuffer
from trope.kernels.norm import gate
from trope.kernels.silu_rotate import Turns, silu_rotate

SHAPES = [  # T, H, D, rotary_dim
    (1, 1, 2, 2),
    (7, 3, 30, 30),
    (9, 1, 50, 50),
    (37, 8, 32, 32),
    (10, 4, 128, 128),
    (5, 3, 7, 4),
]


class Problem:
    """Random inputs in float64 that are exactly representable in `dtype`."""

    def __init__(self, shape, dtype, device, coordinates=1, paper=False, rotated=True):
        T, H, D, rotary_dim = shape
        rng = torch.Generator().manual_seed(0)
        P = rotary_dim // 2
        self.heads, self.dtype, self.device, self.betas, self.freqs = H, dtype, device, None, []
        self.pre = (3 * torch.randn(T, 4 * H * D, generator=rng)).to(dtype).double()
        self.grads = torch.randn(4, T, H, D, generator=rng).to(dtype).double()
        self.coords = [torch.stack([draw_times((T,), rng) for _ in range(coordinates)]).to(device) for _ in range(2)]
        if rotated:
            betas = torch.logspace(2, 8, P, dtype=torch.float64)
            alphas = [torch.randn(coordinates, P, generator=rng) for _ in range(2)]
            self.betas = betas.float().to(device) if paper else None
            self.freqs = [(a if paper else a.double() / (2 * math.pi * betas)).to(device) for a in alphas]

    def run(self, backend, dtype=None, interleaved=True, which=(0, 1, 2, 3)):
        """u, v, q, k and the gradients of the projection and both frequencies, in float64; gradients from `which`."""
        dtype = dtype or self.dtype
        inputs = [self.pre.to(self.device, dtype).requires_grad_()]
        inputs += [f.clone().requires_grad_() for f in self.freqs]
        rotation = (*self.coords, Turns(*inputs[1:], betas=self.betas)) if self.freqs else ()
        out = silu_rotate(inputs[0], self.heads, *rotation, interleaved=interleaved, backend=backend)
        assert all(y.dtype == dtype for y in out)
        upstream = [self.grads[i].to(self.device, dtype) for i in which]
        grads = torch.autograd.grad([out[i] for i in which], inputs, upstream, materialize_grads=True)
        return [x.detach().double().cpu() for x in (*out, *grads)]


def assert_as_good_as_reference(problem: Problem, **options) -> None:
    exact, reference = problem.run("torch", torch.float64, **options), problem.run("torch", **options)
    kernel = problem.run("triton", **options)
    for name, want, got in zip(("u", "v", "q", "k", "dpre"), exact, kernel, strict=False):
        assert torch.allclose(got, want, rtol=torch.finfo(problem.dtype).eps, atol=3e-6), name
    for want, ref, got in zip(exact[5:], reference[5:], kernel[5:], strict=True):
        assert (got - want).norm() <= 3 * (ref - want).norm() + 1e-6 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    assert_as_good_as_reference(Problem(shape, dtype, device), interleaved=interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_rotation(shape: tuple, dtype: torch.dtype, device: str) -> None:
    assert_as_good_as_reference(Problem(shape, dtype, device, rotated=False))


def test_two_coordinates(device: str) -> None:
    """TO-RoPE: every plane turns by time and index together."""
    assert_as_good_as_reference(Problem((7, 3, 12, 10), torch.float32, device, coordinates=2))


def test_paper_phases(device: str) -> None:
    problem = Problem((7, 3, 12, 10), torch.float32, device, paper=True)
    for ref, got in zip(problem.run("torch"), problem.run("triton"), strict=True):
        assert (got - ref).norm() <= 2e-6 * ref.norm()


@pytest.mark.parametrize("which", [(0,), (1, 2), (3,), (0, 1)], ids=str)
def test_missing_gradients_are_zero(which: tuple, device: str) -> None:
    """Backward from some of the four alone: the others' parts of the projection get zeros, not garbage."""
    problem = Problem((7, 2, 8, 8), torch.float32, device)
    assert_as_good_as_reference(problem, which=which)
    dpre = problem.run("triton", which=which)[4].view(7, 4, -1)
    assert [bool(dpre[:, i].any()) for i in range(4)] == [i in which for i in range(4)]


def test_many_tiles_per_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward loops over tiles once there are more of them than partial rows; the last program has fewer."""
    from trope.kernels.silu_rotate import triton as fused

    monkeypatch.setattr(fused, "ROWS", 3)
    assert_as_good_as_reference(Problem((126, 2, 64, 64), torch.float32, device))


def test_gradients_are_deterministic(device: str) -> None:
    problem = Problem((80, 3, 16, 16), torch.bfloat16, device)
    for first, second in itertools.pairwise(problem.run("triton") for _ in range(3)):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_output_and_strided_gradients(device: str) -> None:
    """u is a view of the projection, the others of one tensor; gradients may be views too: of a joint one, transposed,
    or expanded. What they are views of is not written to."""
    problem = Problem((6, 3, 8, 8), torch.float32, device)
    results = []
    for backend in ("torch", "triton"):
        pre = problem.pre.float().to(device).requires_grad_()
        u, v, q, k = silu_rotate(pre, 3, *problem.coords, Turns(*problem.freqs), backend=backend)
        if backend == "triton":
            assert u.data_ptr() == pre.data_ptr() and u.stride() == (4 * 24, 8, 1)
            assert {x.untyped_storage().data_ptr() for x in (v, q, k)} == {v.untyped_storage().data_ptr()}
            assert q.stride() == (3 * 24, 8, 1)
        joint = problem.grads.float().to(device).permute(1, 0, 2, 3).contiguous()
        grads = (joint[:, 0], joint[:, 1].transpose(1, 2).contiguous().transpose(1, 2), joint[:, 2])
        before = joint.clone()
        torch.autograd.backward((u, v, q, k), (*grads, torch.ones((), device=device).expand(6, 3, 8)))
        assert torch.equal(joint, before)
        results.append(pre.grad)
    assert torch.allclose(*results, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("used", ["once", "twice", "outside", "not at all"])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (7, 3, 30, 30), (5, 3, 7, 4), (9, 2, 8, 8), (0, 2, 8, 8)], ids=str)
def test_one_gradient_written_by_gate_and_silu_rotate(shape: tuple, used: str, device: str) -> None:
    """Room shared with the gate changes no gradient, whatever else u is used for; backward may run again."""
    problem, results = Problem(shape, torch.float32, device), []
    _, H, D, _ = shape
    for backend, joint in (("torch", None), ("triton", None), ("triton", GradientBuffer(4 * H * D))):
        pre = problem.pre.float().to(device).requires_grad_()
        u, v, q, k = silu_rotate(pre, H, *problem.coords, Turns(*problem.freqs), buffer=joint, backend=backend)
        y = (v + 2 * q - k).flatten(1)
        gates = {"twice": 2, "not at all": 0}.get(used, 1)
        out = [gate(y, u.flatten(1), 0.0, buffer=joint, backend=backend) for _ in range(gates)]
        out += [y] if used == "not at all" else []
        out += [u.sin().flatten(1)] if used == "outside" else []
        loss = sum((i + 1) * x.square().sum() for i, x in enumerate(out))
        results += [torch.autograd.grad(loss, pre, retain_graph=True)[0] for _ in range(2)]
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-5, atol=2e-5)
    (first, again), (joint_first, joint_again) = results[2:4], results[4:6]
    assert torch.equal(first, again) and torch.equal(joint_first, joint_again)
    # A GPU compiles the kernel once more where rows of the shared room are longer; the last bit may differ.
    assert device == "cuda" or torch.equal(first, joint_first)


def test_the_shared_gradient_is_not_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gate's backward has written is the projection's gradient, in the same memory; it is not kept after."""
    joint, rooms = GradientBuffer(4 * 24), []
    make = GradientBuffer.first_columns
    monkeypatch.setattr(GradientBuffer, "first_columns", lambda *args: rooms.append(make(*args)) or rooms[-1])
    pre = torch.randn(6, 4 * 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    u, v, q, k = silu_rotate(pre, 3, buffer=joint, backend="triton")
    loss = gate((v + q + k).flatten(1), u.flatten(1), 0.0, buffer=joint, backend="triton").float().square().sum()
    (dpre,) = torch.autograd.grad(loss, pre)
    assert dpre.data_ptr() == rooms[0].data_ptr() and dpre.is_contiguous()
    assert not dpre.isnan().any() and joint._rows_TF is None


def test_frequencies_that_do_not_learn(device: str) -> None:
    problem = Problem((6, 3, 8, 8), torch.float32, device)
    pre = problem.pre.float().to(device).requires_grad_()
    out = silu_rotate(pre, 3, *problem.coords, Turns(*problem.freqs), backend="triton")
    torch.autograd.backward(out, list(problem.grads.float().to(device)))
    assert torch.allclose(pre.grad.double().cpu(), problem.run("torch", torch.float64)[4], rtol=1e-5, atol=3e-6)


def test_far_from_zero(device: str) -> None:
    """Where exp(-x) leaves the range of float32, on both sides: SiLU and slope are at their limits."""
    far = torch.tensor([-1e20, -1e4, -200, -100, -89, -88, -87, -20, 0, 20, 87, 88, 89, 100, 1e4, 1e20], device=device)
    results = []
    for backend in ("torch", "triton"):
        pre, y = far.repeat(2, 4).requires_grad_(), torch.linspace(-2, 3, 32, device=device).view(2, 16)
        u, v, q, k = silu_rotate(pre, 4, backend=backend)
        out = torch.stack([v.flatten(1), q.flatten(1), k.flatten(1), gate(y, u.flatten(1), backend=backend)])
        results.append((out, *torch.autograd.grad(out, pre, torch.ones_like(out))))
    for want, got in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_any_coordinate_gives_a_rotation(device: str) -> None:
    """Past 2^51 quarter turns float64 holds no phase, but lengths must still be kept; NaN must not pass for a phase."""
    pre = torch.randn(4, 4 * 8, generator=torch.Generator().manual_seed(0)).to(device)
    coords = torch.tensor([[2**62 + 12345, -(2**62) - 777, 2**53 + 1, 2**50 + 1]], device=device)
    freqs = torch.tensor([[1.37, -0.3, 0.77, 1e-3]], dtype=torch.float64, device=device)
    _, _, *turned = silu_rotate(pre, 1, coords, coords, Turns(freqs, freqs), backend="triton")
    _, _, *still = silu_rotate(pre, 1, backend="triton")
    for a, b in zip(turned, still, strict=True):
        torch.testing.assert_close(a.unflatten(-1, (4, 2)).norm(dim=-1), b.unflatten(-1, (4, 2)).norm(dim=-1))
    nowhere = Turns(freqs * torch.nan, freqs * torch.nan)
    assert all(x.isnan().all() for x in silu_rotate(pre, 1, coords, coords, nowhere, backend="triton")[2:])


def test_no_tokens(device: str) -> None:
    *_, dfreqs_q, dfreqs_k = Problem((0, 2, 8, 8), torch.float32, device).run("triton")
    assert not dfreqs_q.any() and not dfreqs_k.any()


def test_reference_gradients() -> None:
    """gradcheck of the ground truth itself, in float64; coordinates small, so that finite differences are exact."""
    torch.manual_seed(0)
    pre, freqs_q, freqs_k = (
        torch.randn(3, 16, dtype=torch.float64),
        *(torch.randn(1, 1, dtype=torch.float64) for _ in "qk"),
    )
    coords = torch.arange(3)[None]
    inputs = [x.requires_grad_() for x in (pre, freqs_q, freqs_k)]
    assert torch.autograd.gradcheck(
        lambda x, fq, fk: silu_rotate(x, 2, coords, coords, Turns(fq, fk), backend="torch"), inputs
    )


@pytest.mark.parametrize("shape", [(7, 3, 30, 30), (37, 8, 32, 32)], ids=str)
def test_frequencies_linear_in_coefficients_are_formed_inside(shape: tuple, device: str) -> None:
    """slopes * deltas inside the kernel is slopes * deltas outside, and so are the coefficients' gradients."""
    problem = Problem(shape, torch.float32, device)
    rng = torch.Generator().manual_seed(1)
    slopes = [8 * torch.rand(f.shape, generator=rng, dtype=torch.float64).to(device) / 1e8 for f in problem.freqs]
    origin = torch.tensor(1_550_000_000, device=device)
    starts = [torch.randn(f.shape[1], generator=rng).to(device) for f in problem.freqs]

    def run(backend: str, inside: bool) -> list[torch.Tensor]:
        deltas = [start.clone().requires_grad_() for start in starts]
        turns = Turns(*problem.freqs, *slopes, *deltas, origin=origin)
        coords = problem.coords
        if not inside:
            turns, coords = Turns(*turns.frequencies()), [c - origin for c in coords]
        pre = problem.pre.to(device, torch.float32).requires_grad_()
        out = silu_rotate(pre, problem.heads, *coords, turns, backend=backend)
        return [*out, *torch.autograd.grad(out, [pre, *deltas], problem.grads.to(device, torch.float32).unbind())]

    for got, want in zip(run("triton", inside=True), run("torch", inside=False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
