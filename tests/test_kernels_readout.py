"""The fused end of the network with a readout by time, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import SECONDS, draw_times
from torch import Tensor

from trope.kernels import Backend
from trope.kernels.readout import Curve, add_turned

MIDDLE = 1_550_000_000
ENDS = (-40_000_000, 45_000_000)  # the times drawn here begin earlier and end later
KINDS = ["coefficients", "frequencies"]


def draw_curve(kind: str, planes: int, rng: torch.Generator, device: str) -> Curve:
    """Frequencies that are learned, or constants with learned coefficients; coordinates from the middle."""
    freqs, slopes = (torch.rand(planes, generator=rng).double() / 1e7 for _ in range(2))
    deltas = torch.randn(planes, generator=rng).to(device).requires_grad_()
    scalars = (torch.tensor(value, device=device) for value in (MIDDLE, *ENDS))
    if kind == "frequencies":
        return Curve(freqs.to(device).requires_grad_(), None, None, *scalars)
    return Curve(freqs.to(device), slopes.to(device), deltas, *scalars)


def draw_moments(tokens: int, rng: torch.Generator) -> Tensor:
    """Times, the first of them before the earliest and the last after the latest."""
    moments = draw_times((tokens,), rng)
    moments[:1], moments[1:][-1:] = SECONDS[0] - 10**7, SECONDS[1] + 10**7
    return moments


def learned_by(curve: Curve) -> Tensor:
    return curve.freqs_P if curve.deltas_P is None else curve.deltas_P


def found(
    given: tuple[Tensor | None, ...], moments: Tensor, curve: Curve, up: Tensor, backend: Backend
) -> list[Tensor]:
    """The result and the gradients of what is there of x, delta and start, and of the curve."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in given]
    y = add_turned(*inputs, moments, curve, backend)  # type: ignore[arg-type]
    wanted = [x for x in inputs if x is not None]
    return [y.detach(), *torch.autograd.grad(y, [*wanted, learned_by(curve)], up.to(y.dtype))]


def assert_parity(given: tuple[Tensor | None, ...], moments: Tensor, curve: Curve, up: Tensor) -> None:
    """Of the kernel with the reference in float64."""
    wide = tuple(None if x is None else x.double() for x in given)
    want, got = found(wide, moments, curve, up, "torch"), found(given, moments, curve, up, "triton")
    # A frequency gradient is a sum of differences, small beside them.
    gain = 1.0 if curve.slopes_P is None else curve.slopes_P.max().item()
    size_learned = 4e-6 * gain * curve.coordinates(moments).abs().sum().item()
    for exact, kernel in zip(want[:-1], got[:-1], strict=True):
        # The interpreter truncates to bf16, a GPU rounds.
        size = 2**-5 if kernel.dtype == torch.bfloat16 else 4e-6
        assert kernel.shape == exact.shape and torch.allclose(kernel.double(), exact, rtol=1e-6, atol=size)
    assert got[-1].dtype == want[-1].dtype == learned_by(curve).dtype
    assert torch.allclose(got[-1], want[-1], rtol=1e-6, atol=size_learned)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width", "planes", "dtype"), [
    (1, 4, 1, torch.float32), (13, 24, 5, torch.float32), (9, 300, 70, torch.bfloat16), (40, 128, 64, torch.float32),
    (0, 8, 2, torch.float32),
])  # fmt: skip
def test_values_and_gradients(
    tokens: int, width: int, planes: int, dtype: torch.dtype, kind: str, device: str, rng: torch.Generator
) -> None:
    """What the last block adds is bf16 under autocast."""
    x, delta, start, up = (torch.randn(tokens, width, generator=rng).to(device) for _ in range(4))
    moments = draw_moments(tokens, rng).to(device)
    assert_parity((x, delta.to(dtype), start), moments, draw_curve(kind, planes, rng, device), up)


@pytest.mark.parametrize("present", [(), ("delta",), ("start",)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_delta_or_a_start(kind: str, present: tuple[str, ...], device: str, rng: torch.Generator) -> None:
    """As with zeros in their place; there is no gradient for what is not there."""
    x, delta, start, up = (torch.randn(6, 20, generator=rng).to(device) for _ in range(4))
    moments, curve = draw_moments(6, rng).to(device), draw_curve(kind, 3, rng, device)
    given = (x, delta if "delta" in present else None, start if "start" in present else None)
    assert_parity(given, moments, curve, up)
    zeros = (x, *(torch.zeros_like(x) if each is None else each for each in given[1:]))
    assert torch.equal(add_turned(*given, moments, curve, "triton"), add_turned(*zeros, moments, curve, "triton"))


@pytest.mark.parametrize("dims", [140, 141, 256, 300])
@pytest.mark.parametrize("is_view", [True, False])
def test_a_start_of_the_turning_dims_or_more(dims: int, is_view: bool, device: str, rng: torch.Generator) -> None:
    """As a view of wider rows or a tensor of its own: the gradient has its shape, and is zero past the turning dims."""
    x, delta, up = (torch.randn(5, 300, generator=rng).to(device) for _ in range(3))
    start = torch.randn(5, 310, generator=rng).to(device)[:, :dims]
    given = (x, delta, start if is_view else start.contiguous())
    moments, curve = draw_moments(5, rng).to(device), draw_curve("coefficients", 70, rng, device)
    assert_parity(given, moments, curve, up)
    dstart = found(given, moments, curve, up, "triton")[3]
    assert dstart.shape == (5, dims) and dstart.is_contiguous() and not dstart[:, 140:].any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_and_frequencies_are_those_of_the_curve(
    kind: str, backend: Backend, device: str, rng: torch.Generator
) -> None:
    """The same as with both formed before, bit for bit; outside its ends the curve stands still."""
    curve, moments = draw_curve(kind, 5, rng, device), draw_moments(30, rng).to(device)
    x = torch.randn(30, 24, generator=rng).to(device)
    coords = curve.coordinates(moments)
    assert coords.min() == ENDS[0] and coords.max() == ENDS[1] and len(coords.unique()) > 10
    got = add_turned(x, None, None, moments, curve, backend)
    formed = add_turned(x, None, None, coords, Curve(curve.frequencies().detach()), backend)
    # A GPU may fuse the product of slope and coefficient into the sum.
    torch.testing.assert_close(got, formed, rtol=0, atol=0 if device == "cpu" else 1e-6)
    held = moments.clamp(MIDDLE + ENDS[0], MIDDLE + ENDS[1])
    assert torch.equal(got, add_turned(x, None, None, held, curve, backend))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_moments_of_other_types(dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    x, moments = torch.randn(9, 8, generator=rng).to(device), draw_moments(9, rng).to(device)
    curve = draw_curve("coefficients", 2, rng, device)
    want, got = (add_turned(x, None, None, each, curve, "triton") for each in (moments, moments.to(dtype)))
    assert torch.equal(want, got)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every second", "one row for all"])
def test_gradients_and_inputs_of_any_strides(layout: str, device: str, rng: torch.Generator) -> None:
    strange = {
        "transposed": torch.randn(10, 6, generator=rng).T, "expanded": torch.randn(6, 1, generator=rng).expand(6, 10),
        "every second": torch.randn(6, 20, generator=rng)[:, ::2], "one row for all": torch.ones(10).expand(6, 10),
    }[layout].to(device)  # fmt: skip
    plain = torch.randn(6, 10, generator=rng).to(device)
    moments, curve = draw_moments(6, rng).to(device), draw_curve("coefficients", 2, rng, device)
    assert_parity((strange, strange, plain), moments, curve, strange)
    assert_parity((plain, plain, strange), moments, curve, plain)


def test_only_what_is_wanted_has_a_gradient(device: str, rng: torch.Generator) -> None:
    """Of frozen frequencies nothing is summed, and a start without a gradient gets none."""
    x, delta, start, up = (torch.randn(6, 20, generator=rng).to(device) for _ in range(4))
    moments, curve = draw_moments(6, rng).to(device), draw_curve("coefficients", 3, rng, device)
    want = found((x, delta, start), moments, curve, up, "triton")[1]
    x.requires_grad_()
    frozen = curve._replace(deltas_P=learned_by(curve).detach())
    add_turned(x, delta, start, moments, frozen, "triton").backward(up)
    assert x.grad is not None and torch.equal(x.grad, want)
    assert start.grad is None and delta.grad is None and learned_by(curve).grad is None


def test_a_stream_in_bf16_stays_bf16(device: str, rng: torch.Generator) -> None:
    moments, curve = draw_moments(6, rng).to(device), draw_curve("coefficients", 2, rng, device)
    x, delta = (torch.randn(6, 10, generator=rng).to(device) for _ in range(2))
    want, got = (add_turned(x.bfloat16(), delta, delta, moments, curve, backend) for backend in ("torch", "triton"))
    assert want.dtype == got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want.float(), atol=2**-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_by_differences(kind: str, rng: torch.Generator) -> None:
    """In float64, with coordinates and frequencies of order 1, so that differences mean something."""
    x, delta, start = (torch.randn(4, 6, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3))
    freqs, slopes, deltas = torch.rand(3, 2, generator=rng, dtype=torch.float64)
    moments, scalars = torch.tensor([8, 10, 11, 19]), [torch.tensor(value) for value in (10, -1, 3)]
    learned = (freqs if kind == "frequencies" else deltas).requires_grad_()

    def run(x: Tensor, delta: Tensor, start: Tensor, learned: Tensor) -> Tensor:
        parts = (learned, None, None) if kind == "frequencies" else (freqs, slopes, learned)
        return add_turned(x, delta, start[:, :4], moments, Curve(*parts, *scalars), "torch")

    assert torch.autograd.gradcheck(run, (x, delta, start, learned))


def test_a_second_derivative_is_refused(device: str, rng: torch.Generator) -> None:
    """Not silently zero."""
    x = torch.randn(3, 4, generator=rng).to(device).requires_grad_()
    curve = draw_curve("coefficients", 1, rng, device)
    y = add_turned(x, x, x, draw_moments(3, rng).to(device), curve, "triton")
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_many_tiles_per_program(kind: str, device: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than programs: each sums up several tiles."""
    from trope.kernels.readout import triton as readout_triton

    monkeypatch.setattr(readout_triton, "ROWS", 2)
    test_values_and_gradients(100, 6, 2, torch.float32, kind, device, rng)
