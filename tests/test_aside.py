"""Work beside a GPU's main stream, with streams that only note what happens: who waits, and what is kept until then.

Whether a captured step has a race only a GPU can show (test_train_fused.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from trope.kernels import aside as module
from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.attention import hstu_attention, time_gaps
from trope.kernels.project import project
from trope.kernels.readout import Curve, add_turned
from trope.kernels.sequence_bounds import SequenceBounds
from trope.kernels.silu_rotate import Turns, silu_rotate
from trope.kernels.split_rotate import split_rotate

pytest.importorskip("trope.kernels.project.triton", reason="needs the package triton")
CPU = torch.device("cpu")


class Line:
    """Stands in for a stream."""

    device = CPU

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: Line) -> None:
        self.waits.append((self.name, other.name))


class Lines:
    """A main stream and one beside it, and which of the two is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []
        self.main = self.current = Line("main", self.waits)
        self.late = Late(CPU)
        self.late.stream = Line("late", self.waits)  # type: ignore[assignment]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    @contextmanager
    def entered(self, stream: Line) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    return Lines(monkeypatch)


def learned(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def run_project(late: Late) -> tuple[Tensor, list[Tensor]]:
    x, weight, bias = learned(9, 5).detach(), learned(4, 5, seed=1), learned(4, seed=2)
    return project(x.requires_grad_(), weight.t(), bias, backend="triton", late=late), [weight, bias]


def run_attention(late: Late) -> tuple[Tensor, list[Tensor]]:
    bounds = SequenceBounds.jagged(torch.tensor([0, 20, 33]), 20)
    q, k, v = (learned(33, 2, 16, seed=seed) for seed in range(3))
    times = torch.arange(33) * 1000
    position, time = learned(39, seed=3), learned(129, seed=4)
    gaps = time_gaps(times, times, bounds, 128, q, backend="triton")
    y = hstu_attention(q, k, v, bounds, 20, position, time, gaps, backend="triton", late=late)
    return y, [position, time]


def turns_of(deltas_q: Tensor, deltas_k: Tensor) -> Turns:
    constant = torch.full((1, 4), 1e-6, dtype=torch.float64)
    return Turns(constant, constant, constant, constant, deltas_q, deltas_k, torch.tensor(5))


def run_silu_rotate(late: Late) -> tuple[Tensor, list[Tensor]]:
    deltas, coords = [learned(4, seed=1), learned(4, seed=2)], torch.arange(7)[None] * 1000
    parts = silu_rotate(learned(7, 64), 2, coords, coords, turns_of(*deltas), backend="triton", late=late)
    return torch.stack(parts), deltas


def run_split_rotate(late: Late) -> tuple[Tensor, list[Tensor]]:
    deltas, coords = [learned(4, seed=1), learned(4, seed=2)], torch.arange(7)[None] * 1000
    parts = split_rotate(learned(7, 48), 2, coords, coords, turns_of(*deltas), backend="triton", late=late)
    return torch.stack(parts), deltas


def run_readout(late: Late) -> tuple[Tensor, list[Tensor]]:
    deltas, constant = learned(4, seed=1), torch.full((4,), 1e-6, dtype=torch.float64)
    ends = (torch.tensor(5), torch.tensor(-(10**6)), torch.tensor(10**6))
    curve = Curve(constant, constant, deltas, *ends)
    return add_turned(learned(9, 16), learned(9, 16, seed=2), None, torch.arange(9), curve, "triton", late), [deltas]


OPERATORS = [run_project, run_attention, run_silu_rotate, run_split_rotate, run_readout]


@pytest.mark.parametrize("run", OPERATORS)
def test_gradients_are_formed_beside_the_backward_pass(
    run: Callable[[Late], tuple[Tensor, list[Tensor]]], lines: Lines
) -> None:
    """The same bits as in it; each arrives at its parameter as it is, and what it is made of lives until the join."""
    y, parameters = run(IN_PLACE)
    y.float().square().sum().backward()
    wanted = [parameter.grad for parameter in parameters]
    assert not lines.waits
    made: list[str] = []
    gradient = lines.late.gradient
    lines.late.gradient = lambda x: [made.append(lines.current.name), gradient(x)][1]  # type: ignore[method-assign]
    y, parameters = run(lines.late)
    y.float().square().sum().backward()
    assert made == ["late"] * len(parameters)
    assert set(lines.waits) == {("late", "main")} and lines.current is lines.main
    assert len(lines.late._made) == len(parameters) and lines.late._kept
    lines.late.check(parameters)
    assert all(torch.equal(parameter.grad, want) for parameter, want in zip(parameters, wanted, strict=True))
    lines.waits.clear()
    lines.late.join()
    assert lines.waits == [("main", "late")] and not lines.late._kept and not lines.late._made


def test_a_gradient_that_autograd_adds_to_is_noticed(lines: Lines) -> None:
    weight, x = learned(5, 4), learned(9, 5)
    y = project(x, weight, backend="triton", late=lines.late) + project(
        2 * x, weight, backend="triton", late=lines.late
    )
    y.sum().backward()
    with pytest.raises(RuntimeError, match="has changed a gradient"):
        lines.late.check([weight])
    lines.late.check([weight])  # said once


def test_what_autograd_has_to_add_up_is_formed_in_place(lines: Lines) -> None:
    deltas, coords = learned(4), torch.arange(7)[None]
    freqs = [learned(4).double()[None] * 1e-6 for _ in range(2)]
    for turns in (turns_of(deltas, deltas), Turns(*freqs)):
        parts = silu_rotate(learned(7, 64), 2, coords, coords, turns, backend="triton", late=lines.late)
        torch.stack(parts).sum().backward()
    half = learned(5, 8).chunk(2, dim=1)[0]
    project(learned(9, 5), half, backend="triton", late=lines.late).sum().backward()
    project(learned(9, 5), learned(5, 4).detach(), backend="triton", late=lines.late).sum().backward()
    assert not lines.waits and not lines.late._kept and not lines.late._made


@pytest.mark.parametrize("shape", [(5, 3), (4, 4)])
def test_which_inputs_are_parameters(shape: tuple[int, int], lines: Lines) -> None:
    weight, late = learned(*shape), lines.late
    assert late.to(weight) is late.to(weight.t(), None) is late.to(weight, learned(3)) is late
    for others in ((weight, weight), (weight, weight.t()), (weight[:],), (2 * weight,), (weight.detach(),)):
        assert late.to(*others) is IN_PLACE
    late.is_open = False
    assert late.to(weight) is Late(CPU).to(weight) is IN_PLACE


def test_slices_that_share_their_room_are_summed_in_place(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next slice is written over the one before."""
    from trope.kernels.attention import bias_gradient

    monkeypatch.setattr(bias_gradient, "STRIP_BYTES", 1)
    y, parameters = run_attention(lines.late)
    y.square().sum().backward()
    assert not lines.waits and all(parameter.grad is not None for parameter in parameters)


def test_a_closed_one_works_in_place(lines: Lines) -> None:
    lines.late.is_open = False
    y, parameters = run_project(lines.late)
    y.sum().backward()
    lines.late.check(parameters)
    lines.late.join()
    assert not lines.waits and not lines.late._kept


def test_a_step_that_failed_leaves_nothing_to_the_next(lines: Lines) -> None:
    y, _ = run_project(lines.late)
    y.sum().backward()
    assert lines.late._kept and lines.late._made and lines.late._is_ahead
    lines.late.begin(is_open=True)
    lines.waits.clear()
    lines.late.check([])
    lines.late.join()
    assert not lines.waits and not lines.late._kept


def test_waiting_for_nothing_is_no_wait(lines: Lines) -> None:
    """A stream without work is no part of a capture, and waiting for it would end the capture."""
    other = Late(CPU)
    other.stream = Line("other", lines.waits)  # type: ignore[assignment]
    lines.late.wait(other)
    lines.late.join()
    assert not lines.waits
    with other.work():
        pass
    lines.late.wait(other)
    assert lines.waits == [("other", "main"), ("late", "other")]
    assert module.IN_PLACE.stream is None
