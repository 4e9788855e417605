"""Work beside the main stream of a GPU: a second stream, also inside a captured graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Aside:
    """A second stream of a GPU. On a CPU, or if it is not open, work runs in place, on the main stream.

    The allocator hands out a freed tensor's memory again to the stream that made the tensor. So a tensor of another
    stream that the work reads or writes must live until `join`; `work` keeps those that it is given. A tensor that the
    work makes may be freed after `join`: the next work, which could get its memory, waits for the main stream first.

    priority: of the stream. Kernels of a lower number go first; a stream of the same number would wait until all
        programs of a kernel launched before have begun.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self.is_open = True
        self._is_ahead = False  # there is work that the main stream has not waited for
        self._kept: list[Tensor] = []

    def begin(self, is_open: bool) -> None:
        """Begin a step, whatever has become of the one before."""
        self.is_open, self._is_ahead = is_open, False
        self._kept.clear()

    @contextmanager
    def work(self, *touched: Tensor) -> Iterator[None]:
        """What is launched in here runs after everything launched so far, and beside what is launched after it.

        touched: what the work reads or writes and its maker might free before `join`.
        """
        if self.stream is None or not self.is_open:
            yield
            return
        self._kept += touched
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self._is_ahead = True
        with torch.cuda.stream(self.stream):
            yield

    def wait(self, other: Aside) -> None:
        """What is launched here from now on runs after the other's work. This must have some."""
        if self.stream is not None and other.stream is not None and other._is_ahead:
            self.stream.wait_stream(other.stream)

    def join(self) -> None:
        """What is launched from here on runs after the work."""
        # Without work the stream is no part of a capture, and waiting for it would end the capture with an error.
        if self.stream is not None and self._is_ahead:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._is_ahead = False
        self._kept.clear()


class Late(Aside):
    """Where a backward pass forms gradients of parameters, which nothing else in it waits for.

    Autograd must hand such a gradient on to its parameter and do nothing else to it: an addition or a copy would run on
    the main stream, which has not waited. Kernels ask `to` beforehand, and `check` looks at what has arrived.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        super().__init__(device, priority)
        self._made: list[int] = []  # addresses: autograd would copy a gradient that somebody else holds

    def begin(self, is_open: bool) -> None:
        super().begin(is_open)
        self._made.clear()

    def to(self, *inputs: Tensor | None) -> Late:
        """This if autograd hands on the gradients of these inputs: of different parameters, or transposed ones.

        Else `IN_PLACE`.
        """
        if self.stream is None or not self.is_open:
            return IN_PLACE
        parameters = [_parameter(x) for x in inputs if x is not None]
        is_plain = None not in parameters and len(set(map(id, parameters))) == len(parameters)
        return self if is_plain else IN_PLACE

    def gradient(self, made: Tensor) -> Tensor:
        """A gradient that was made in `work`, for autograd."""
        if self.stream is not None and self.is_open and made.numel():
            self._made.append(made.data_ptr())
        return made

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Raise if a gradient is not where it was made."""
        arrived = {x.grad.data_ptr() for x in parameters if x.grad is not None}
        made, self._made = self._made, []
        if not arrived.issuperset(made):
            raise RuntimeError("autograd has changed a gradient on a stream that has not waited for it")


def _parameter(x: Tensor) -> Tensor | None:
    """The parameter that a tensor is, or is the transposition of; None if there is none."""
    base = x._base
    if base is not None and base.ndim == 2 and (base.t().shape, base.t().stride()) == (x.shape, x.stride()):
        x = base
    return x if x.is_leaf and x.requires_grad else None


# Every piece of work runs where it stands.
IN_PLACE = Late(torch.device("cpu"))


class Beside(NamedTuple):
    """Where a network may have work beside its own.

    soon: for what it waits for soon. late: for gradients of its parameters.
    """

    soon: Aside = IN_PLACE
    late: Late = IN_PLACE
