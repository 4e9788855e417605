"""The Triton kernels against the float64 reference: values and gradients, odd shapes, real timestamps.

`torch.empty` is filled with NaN here, so an output element that no program wrote fails the comparison. Tolerances come
from the float64 run: one unit in the last place of the dtype (the interpreter truncates to bf16, a GPU rounds), and for
the frequency gradients a small multiple of what the torch reference in the same dtype is off.
"""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import draw_times

import trope.kernels
from trope import IndexRoPE, TORoPE, TRoPE
from trope.kernels import rotate_qk

SHAPES = [  # B, L, heads of q, heads of k, D, rotary_dim
    (1, 1, 1, 1, 2, 2),
    (2, 7, 3, 3, 30, 30),
    (1, 63, 1, 1, 128, 128),
    (3, 5, 4, 2, 16, 16),
    (2, 7, 3, 1, 30, 22),
    (1, 9, 2, 2, 5, 4),
    (2, 7, 3, 0, 16, 16),  # no keys, as in trope.rotary.readout
]


class Problem:
    """Random inputs in float64 that are exactly representable in `dtype`."""

    def __init__(self, shape, dtype, device, coordinates=1, paper=False, seed=0):
        B, L, HQ, HK, D, rotary_dim = shape
        rng = torch.Generator().manual_seed(seed)
        P = rotary_dim // 2
        self.dtype, self.device = dtype, device
        self.q, self.g_q = (torch.randn(B, L, HQ, D, generator=rng).to(dtype).double() for _ in range(2))
        self.k, self.g_k = (torch.randn(B, L, HK, D, generator=rng).to(dtype).double() for _ in range(2))
        self.coords = [torch.stack([draw_times((B, L), rng) for _ in range(coordinates)]) for _ in range(2)]
        betas = torch.logspace(2, 8, P, dtype=torch.float64)
        alphas = [torch.randn(coordinates, P, generator=rng) for _ in range(2)]
        self.betas = betas.float() if paper else None
        self.freqs = alphas if paper else [a.double() / (2 * math.pi * betas) for a in alphas]

    def run(self, backend, dtype=None, interleaved=True):
        """Rotated q and k, and the gradients of q, k and both frequencies, in float64."""
        dtype = dtype or self.dtype
        inputs = [x.to(self.device, dtype).requires_grad_() for x in (self.q, self.k)]
        inputs += [f.to(self.device).clone().requires_grad_() for f in self.freqs]
        coords = [c.to(self.device) for c in self.coords]
        betas = None if self.betas is None else self.betas.to(self.device)
        y = rotate_qk(*inputs[:2], *coords, *inputs[2:], betas, interleaved, backend)
        grads = torch.autograd.grad(y, inputs, [g.to(self.device, dtype) for g in (self.g_q, self.g_k)])
        return [x.detach().double().cpu() for x in (*y, *grads)]


def assert_as_good_as_reference(problem: Problem, interleaved: bool) -> None:
    exact = problem.run("torch", torch.float64, interleaved)
    reference = problem.run("torch", interleaved=interleaved)
    kernel = problem.run("triton", interleaved=interleaved)
    for name, want, got in zip(("q", "k", "dq", "dk"), exact[:4], kernel[:4], strict=True):
        assert torch.allclose(got, want, rtol=torch.finfo(problem.dtype).eps, atol=1e-6), name
    for want, ref, got in zip(exact[4:], reference[4:], kernel[4:], strict=True):
        assert (got - want).norm() <= 3 * (ref - want).norm() + 1e-6 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    assert_as_good_as_reference(Problem(shape, dtype, device), interleaved)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_two_coordinates(interleaved: bool, device: str) -> None:
    """TO-RoPE: every plane turns by time and index together."""
    assert_as_good_as_reference(Problem((2, 7, 3, 3, 12, 10), torch.float32, device, coordinates=2), interleaved)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_paper_phases(interleaved: bool, device: str) -> None:
    problem = Problem((2, 7, 3, 3, 12, 10), torch.float32, device, paper=True)
    for ref, got in zip(
        problem.run("torch", interleaved=interleaved), problem.run("triton", interleaved=interleaved), strict=True
    ):
        assert (got - ref).norm() <= 2e-6 * ref.norm()


def test_many_tiles_per_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward loops over tiles once there are more of them than partial rows; the last program has fewer."""
    from trope.kernels.rotary import triton as rotary_triton

    monkeypatch.setattr(rotary_triton, "ROWS", 3)
    assert_as_good_as_reference(Problem((2, 63, 2, 2, 64, 64), torch.float32, device), interleaved=True)


def test_gradients_are_deterministic(device: str) -> None:
    problem = Problem((2, 40, 3, 3, 16, 16), torch.bfloat16, device)
    for first, second in itertools.pairwise(problem.run("triton") for _ in range(3)):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strided_inputs_and_gradients(device: str) -> None:
    """q and k as slices of one projection, gradients as attention returns them: transposed."""
    rng = torch.Generator().manual_seed(0)
    uvqk = torch.randn(2, 9, 4, 3, 8, generator=rng).to(device)
    upstream = torch.randn(2, 3, 9, 8, generator=rng).to(device)
    times = draw_times((2, 9), rng).to(device)
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        rope = TRoPE(8, backend=backend).to(device)
        x = uvqk.clone().requires_grad_()
        q, k = rope(x[:, :, 2], x[:, :, 3], times)
        (q.transpose(1, 2) * upstream + k.transpose(1, 2) * upstream).sum().backward()
        results.append((q, k, x.grad, rope.delta_q.grad, rope.delta_k.grad))
    for want, got in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
def test_the_modules_take_the_kernel(encoding: type, device: str, rng: torch.Generator) -> None:
    torch.manual_seed(0)
    rope = encoding(16, backend="triton").to(device)
    q, k = (torch.randn(2, 5, 2, 16, generator=rng).to(device) for _ in range(2))
    times = draw_times((2, 5), rng).to(device)
    got = rope(q, k, times)
    rope.backend = "torch"
    for y, want in zip(got, rope(q, k, times), strict=True):
        assert torch.allclose(y, want, atol=1e-6)


def test_empty_batches(device: str) -> None:
    problem = Problem((0, 4, 2, 2, 8, 8), torch.float32, device)
    *_, dfq, dfk = problem.run("triton")
    assert not dfq.any() and not dfk.any()


def test_the_op_is_registered_correctly(device: str) -> None:
    """torch's own check of schema, fake tensors, autograd registration and compiled tracing."""
    problem = Problem((1, 3, 2, 2, 8, 8), torch.float32, device)
    inputs = [x.to(device, torch.float32).requires_grad_() for x in (problem.q, problem.k)]
    coords = [c.to(device) for c in problem.coords]
    freqs = [f.to(device).requires_grad_() for f in problem.freqs]
    tests = ("test_schema", "test_autograd_registration")
    if device == "cuda":  # tracing a kernel needs one that is compiled, not interpreted
        tests += ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.trope.rotate_qk, (*inputs, *coords, *freqs, None, True), test_utils=tests)


def test_no_kernel_argument_has_a_name_that_triton_takes_for_itself() -> None:
    """Launches are by keyword, and `kernel[grid](stream=...)` fails on a GPU but not in the interpreter."""
    taken = {"stream", "device", "device_type", "grid", "warmup", "debug", "num_warps", "num_stages", "num_ctas"}
    kernels = 0
    for path in Path(trope.kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                assert not taken & {argument.arg for argument in node.args.args}, f"{path.name}, {node.name}"
                kernels += node.name.endswith("_kernel")
    assert kernels > 30
