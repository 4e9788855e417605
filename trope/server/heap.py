"""Free pages of the heap go back to the system.

Batches of many sizes leave holes in glibc's heap, and a server that is asked all day would grow by percents. Unless it
is asked, the C library gives back only pages at the heap's end.
"""

from __future__ import annotations

import ctypes
import sys
import time

EVERY = 1.0
"""Seconds. benchmarks/serve_growth.py measures the calls: all below a millisecond in results/serve_growth.json. Under
the load of benchmarks/serve_soak.py batches fill 3 of 466 MiB again within half a second."""


class HeapTrim:
    """Called after every batch; asks the C library at most once in EVERY seconds. Does nothing without glibc."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)  # musl has none
        self._next = time.monotonic() + EVERY

    def __call__(self) -> None:
        if self._trim is not None and time.monotonic() >= self._next:
            self._trim(0)
            self._next = time.monotonic() + EVERY
