"""What a training asks of its process, and gives back at its end: signals, random numbers, arithmetic."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trope.config import Config
from trope.devices import current_gpu

PARENT = "TROPE_PARENT"
"""Names the process that a run must not outlive, by its number, in the environment."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End with the process that started this one, where it asked for that (Linux).

    A comparison that is killed leaves its trainings behind otherwise. They would hold their runs' locks, and the
    comparison that is started again would find them busy.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:  # it was killed before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


class StopRequest:
    """The signal that asked to stop, 0 while none has."""

    signum = 0


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM as a request; the second one acts at once, as it would without us, but not under torchrun."""
    stop = StopRequest()
    if not _may_handle():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(signum: int, frame: types.FrameType | None) -> None:
        stop.signum = signum
        # torchrun passes on a signal that reached the process already, and after 30 seconds kills by itself.
        if not torch.distributed.is_torchelastic_launched():
            restore()

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()


@contextmanager
def sigterm_raises() -> Iterator[StopRequest]:
    """Inside, SIGTERM raises KeyboardInterrupt, so that what is unfinished is removed as after Ctrl-C.

    What is yielded says whether it was SIGTERM: a library may have raised its own KeyboardInterrupt instead.
    """
    stop = StopRequest()

    def end(signum: int, frame: types.FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # another one does not disturb the removal
        stop.signum = signum
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end) if _may_handle() else None
    try:
        yield stop
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _may_handle() -> bool:
    """Whether this thread may say what a signal does."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """How products of float32 are formed inside; "high" is TF32, for those that autocast leaves in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def threads_for(config: Config) -> Iterator[None]:
    """Compute in one thread inside, as torchrun's processes do, where a batch has parts: how a sum is rounded depends
    on the number of threads. OMP_NUM_THREADS may ask for another number.
    """
    before = torch.get_num_threads()
    if config.train.parts > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Seed and launch on `device` as we like inside, and on a CPU add in a fixed order.

    The caller's random numbers, settings and current GPU stay.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # torch's stubs do not know the attribute
    fill = memory.fill_uninitialized_memory
    with current_gpu(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            # Without it, several threads add up gradients of repeated rows as they come.
            torch.use_deterministic_algorithms(True)
            memory.fill_uninitialized_memory = False  # a help in tests, a pass over memory here
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = fill
