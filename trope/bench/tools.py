"""What the benchmarks share: clocks, the machine's own ceilings, and a CSV whose rows know where they were made."""

from __future__ import annotations

import csv as csv_module
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trope.atomic import atomic_file


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do: bytes copied (read plus written) and bf16 operations, per second."""

    copy: float
    matmul: float


def make_console(width: int = 150) -> Console:
    """A console; a log file has no width of its own."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def step_seconds(step: Callable[[], object], device: torch.device | str, repeats: int) -> list[float]:
    """Times of single steps, sorted, after a warm-up; on a GPU between events, so slow launches count."""
    for _ in range(3):
        step()
    if torch.device(device).type == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return sorted(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events))


def graph_seconds(step: Callable[[], object], repeats: int) -> list[float]:
    """Device times of a step replayed as a CUDA graph, sorted: no launch gaps, no Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compilation and lazy initialisation stay outside the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return step_seconds(graph.replay, "cuda", repeats)


def copy_bandwidth(device: torch.device | str, size: int) -> float:
    """Bytes read plus written per second by a large copy on this machine."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    # Launched, not captured: a captured copy becomes a graph's memcpy node, which is slower than the copy kernel.
    return 2 * size / statistics.median(step_seconds(lambda: target.copy_(source), device, 20))


def matmul_rate(device: torch.device | str, size: int) -> float:
    """bf16 operations per second of a large square product on this machine."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / statistics.median(step_seconds(lambda: a @ b, device, 20))


def measure_ceilings(device: torch.device | str, quick: bool) -> Ceilings:
    """Both, on sizes that fill the machine; `quick` for a smoke test."""
    on_gpu = torch.device(device).type == "cuda"
    copy = copy_bandwidth(device, 1 << (20 if quick else 32 if on_gpu else 28))
    return Ceilings(copy, matmul_rate(device, 256 if quick else 8192 if on_gpu else 1024))


def make_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    view = Table(title=title)
    for name in words:
        view.add_column(name)
    for name in numbers:
        view.add_column(name, justify="right")
    return view


def keep_rows(console: Console, csv: Path | None, rows: Sequence[Any], environment: dict[str, str]) -> None:
    """Write the rows to a CSV file, if there is one, and say so."""
    if csv is not None:
        write_rows(csv, rows, environment)
        console.print(f"written to {csv}", markup=False)


def write_rows(path: Path, rows: Sequence[Any], environment: dict[str, str]) -> None:
    """Dataclass rows as CSV, each with the machine, versions and commit it was measured on; whole or absent."""
    names = [field.name for field in fields(rows[0])] if rows else []
    with atomic_file(path) as partial, partial.open("w", newline="") as file:
        writer = csv_module.DictWriter(file, [*names, *environment], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(row), **environment} for row in rows)
