"""Waiting for another thread or process: as long as the slowest machine may need, and not a moment longer."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds; nothing that works takes nearly as long. A limit near the usual time fails on a busy machine."""


def wait_until(condition: Callable[[], object], why: str = "it did not happen") -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, why
        time.sleep(0.005)
