"""Work beside the main stream of a GPU: a second stream, also inside a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """A second stream of a GPU. On a CPU, or if it is not open, work runs in place, on the main stream.

    The allocator hands out a freed tensor's memory again to the stream that made the tensor. So a tensor of the main
    stream that the work reads must live until `join`. A tensor that the work makes may be freed after `join`: the next
    work, which could get its memory, waits for the main stream first.

    priority: of the stream. Kernels of a lower number go first; a stream of the same number would wait until all
        programs of a kernel launched before have begun.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self.is_open = True
        self._is_ahead = False  # there is work that nothing has waited for

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is launched in here runs after everything launched so far, and beside what is launched after it."""
        if self.stream is None or not self.is_open:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self._is_ahead = True
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What is launched from here on runs after the work."""
        # Without work the stream is no part of a capture, and waiting for it would end the capture with an error.
        if self.stream is not None and self._is_ahead:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._is_ahead = False
