"""Device time of HSTU's attention for one block, forward and backward, by kernel: the old way, the new way, variants.

    PYTHONPATH=. python3 benchmarks/attention_parts.py                 # on a GPU; needs torch, triton and numpy
    PYTHONPATH=. TRITON_INTERPRET=1 python3 benchmarks/attention_parts.py --tiny      # on a CPU: whether it runs

Times are medians in microseconds; "x 2" after a kernel's name: launches of it. runs and bucket are needed once a step,
the rest in every block. "off": relative difference of y, dq, dk, dv, d position, d time from the first line.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trope.kernels.attention import backward, bias_gradient, hstu_attention, kept, narrow, runs, time_gaps
from trope.kernels.backend import Backend
from trope.kernels.sequence_bounds import SequenceBounds

WARM_UP, REPEATS = 3, 10
NEVER = 1 << 60  # one share of so many is nothing
SHAPES = [(128, 512, 8, 32), (16, 4096, 8, 32)]
TINY = [(2, 130, 2, 16), (2, 40, 1, 16)]


class Launched:
    """A kernel that is launched with other options than its caller's."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda **arguments: self.kernel[grid](**{**arguments, **self.options})


def joint(keys: int, warps: int, stages: int) -> list[tuple[Any, str, Any]]:
    """dq with the sum over heads: keys of a step, warps, stages."""
    return [(kept, "LAUNCH", {"BLOCK_N": keys, "num_warps": warps, "num_stages": stages})]


def launched(module: Any, kernel: str, **options: Any) -> list[tuple[Any, str, Any]]:
    return [(module, kernel, Launched(getattr(module, kernel), **options))]


# Name, and what is set: module, name, value. The first is what the others are compared with; it has every change off.
TRITON = [(narrow, "HEAD_DIM", 0)]
WAYS: list[tuple[str, list[tuple[Any, str, Any]]]] = [
    ("triton", TRITON),
    ("new", []),
    ("triton, dq and sum apart", [*TRITON, (kept, "WIDEST", 0)]),
    ("triton, runs in every tile", [*TRITON, (runs, "FEW", 0)]),
    ("triton, slices of 256 MiB", [*TRITON, (bias_gradient, "STRIP_SHARE", NEVER)]),
    ("triton, key 2 stages", [*TRITON, *launched(backward, "_key_kernel", num_stages=2)]),
]


@contextlib.contextmanager
def having(settings: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Block:
    """Attention of one block with all its inputs; calling it gives y, dq, dk, dv, d position, d time."""

    def __init__(self, B: int, L: int, H: int, D: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        # As trope/bench/shapes.py makes them: full histories, gaps spread evenly over their logarithm up to a month.
        gaps = (torch.rand(B, L + 1, generator=generator, device=device) * math.log(30 * 86_400)).exp().long()
        times = 1_500_000_000 + gaps.cumsum(1)
        self.times, self.looking = times[:, :-1].flatten(), times[:, 1:].flatten()
        self.bounds = SequenceBounds.jagged(torch.arange(0, (B + 1) * L, L, device=device), L)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.joint = random(B * L, 3, H, D).bfloat16().requires_grad_()
        self.weights = [random(size).requires_grad_() for size in (2 * L - 1, 129)]
        self.dy, self.n = random(B * L, H, D).bfloat16(), L

    def __call__(self, backend: Backend = "triton", dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        joint = self.joint.to(dtype)
        gaps = time_gaps(self.times, self.looking, self.bounds, 128, joint, backend=backend, heads=joint.shape[2:])
        y = hstu_attention(*joint.unbind(1), self.bounds, self.n, *self.weights, gaps, backend=backend)
        d_joint, *d_weights = torch.autograd.grad(y, [joint, *self.weights], self.dy.to(dtype))
        return [y.detach(), *d_joint.unbind(1), *d_weights]


def device_times(block: Block) -> dict[str, tuple[float, int]]:
    """Microseconds and launches by kernel of ours, medians over the repeats."""
    for _ in range(WARM_UP):
        block()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            block()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[int, int]]] = {}
    for event in profiled.profiler.kineto_results.events():
        ours = event.name().endswith("_kernel") or event.name().startswith("narrow_")
        if str(event.device_type()).endswith("CUDA") and ours:
            found.setdefault(event.name(), []).append((event.start_ns(), event.duration_ns()))
    times = {}
    for name, launches in found.items():
        each = len(launches) // REPEATS
        durations = [duration for _, duration in sorted(launches)]
        sums = [sum(durations[i * each : (i + 1) * each]) / 1e3 for i in range(REPEATS)]
        times[name.strip("_").removesuffix("_kernel")] = (statistics.median(sums), each)
    return times


def off(found: list[Tensor], first: list[Tensor]) -> str:
    """Relative differences; a NaN is shown as nan."""
    return " ".join(
        f"{float((x.float() - y.float()).norm() / y.float().norm()):.1e}" for x, y in zip(found, first, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes and no times, for a CPU")
    parser.add_argument("--only", default="", help="only ways whose name contains this, and the first")
    parser.add_argument("--seconds", type=float, default=85, help="begin nothing after so long")
    arguments = parser.parse_args()
    began, device = time.monotonic(), "cpu" if arguments.tiny else "cuda"
    if not arguments.tiny:
        import triton

        print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    shapes = TINY if arguments.tiny else SHAPES
    small = Block(*((2, 70, 2, 16) if arguments.tiny else (2, 700, 8, 32)), device)
    print("small, off from the reference in float32:", off(small(), small("torch", torch.float32)), flush=True)
    blocks, firsts = {shape: Block(*shape, device) for shape in shapes}, {}
    ways = [way for i, way in enumerate(WAYS) if i == 0 or arguments.only in way[0]]
    # All shapes of a way, then the next way: its kernels are compiled once, and what is cut off is the end of the list.
    for way, settings in ways:
        for shape, block in blocks.items():
            if time.monotonic() - began > arguments.seconds:
                print(f"no time for: {way}")
                break
            with having(settings):
                try:
                    found = block()
                    times = {} if arguments.tiny else device_times(block)
                except Exception as error:  # a variant that does not fit must not hide the others
                    print(f"{shape} {way}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                    continue
            first = firsts.setdefault(shape, found)
            by_time = sorted(times.items(), key=lambda item: -item[1][0])
            parts = ", ".join(f"{name}{f' x {n}' if n > 1 else ''} {us:.0f}" for name, (us, n) in by_time)
            total = sum(us for us, _ in times.values())
            print("{} x {} x {} x {} ".format(*shape), end="")
            print(f"{way}: total {total:.0f} us; {parts} | off {off(found, first)}", flush=True)
            if way == "new" and not arguments.tiny:  # the same bits every time, also in memory that held NaN
                dirty = [torch.full((size,), torch.nan, device=device) for size in (1 << 16, 1 << 20, 1 << 23, 1 << 28)]
                del dirty
                print("  the same bits again:", all(map(torch.equal, found, block())), flush=True)
    print(f"# {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
