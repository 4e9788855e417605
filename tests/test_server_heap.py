"""Holes in the heap go back to the system."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from trope.server import heap

BLOCK, COUNT = 64 << 10, 1_000  # below the size from which on glibc asks the system for each block by itself


def _allocated() -> int:
    found = re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux with glibc"
)
def test_holes_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "EVERY", 0.0)
    trim, libc = heap.HeapTrim(), ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[::2]:
        libc.free(block)
    with_holes = _allocated()
    trim()
    given_back = with_holes - _allocated()
    for block in blocks[1::2]:
        libc.free(block)
    assert given_back > BLOCK * COUNT / 4  # half of the blocks were holes


def test_not_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    trim = heap.HeapTrim()
    monkeypatch.setattr(trim, "_trim", calls.append)
    trim()
    assert calls == []
    monkeypatch.setattr(trim, "_next", 0.0)
    trim()
    trim()
    assert calls == [0]


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    trim = heap.HeapTrim()
    monkeypatch.setattr(trim, "_next", 0.0)
    trim()
