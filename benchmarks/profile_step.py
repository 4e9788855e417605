"""Where a fused training step spends its time on a GPU.

    python benchmarks/profile_step.py pixel1m:hstu-trope shop:hstu-trope     # device time and launches by kernel
    python benchmarks/profile_step.py --timeline pixel1m:hstu-trope          # one captured step, kernel by kernel

The first runs the step as ordinary launches. The second replays its CUDA graph, so it shows what runs side by side.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from trope.bench.shapes import find_shape, generate
from trope.bench.train import Bench
from trope.train.fused import FusedStep

STEPS = 3
SHOWN = 36
WARM_UP, TIMED, TRACED = 60, 200, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="SHAPE:MODEL")
    parser.add_argument("--timeline", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_step.py needs a CUDA device")
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    for what in args.what:
        name, model = what.split(":")
        shape = find_shape(name)
        bench = Bench(shape, model, generate(shape, 8 * shape.batch, full=True, device=device), device)
        (timeline if args.timeline else by_kernel)(what, bench, bench.make_fused())
        del bench
        torch.cuda.empty_cache()


def by_kernel(what: str, bench: Bench, step: FusedStep) -> None:
    """Device time and launches of a step by kernel, outside of a CUDA graph."""
    step.is_captured = False
    for _ in range(STEPS):
        step(*bench.place())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            step(*bench.place())
        torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events) / STEPS
    launches = sum(event.count for event in events) // STEPS
    print(f"== {what}: {total / 1e3:.3f} ms device, {launches} launches")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:SHOWN]:
        print(f"{event.self_device_time_total / STEPS:9.1f} us {event.count // STEPS:4d}  {event.key[:76]}")


def timeline(what: str, bench: Bench, step: FusedStep) -> None:
    """Begin and duration in microseconds, stream and name of every kernel of one captured step."""
    for _ in range(WARM_UP):
        step(*bench.place())
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(TIMED):
        step(*bench.place())
    after.record()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(TRACED):
            step(*bench.place())
        torch.cuda.synchronize()
    found = profiled.profiler.kineto_results.events()
    events = sorted(
        (event.start_ns(), event.duration_ns(), event.device_resource_id(), event.name())
        for event in found
        if str(event.device_type()).endswith("CUDA")
    )
    launches = len(events) // TRACED
    print(f"== {what}: {before.elapsed_time(after) / TIMED:.4f} ms a step in the graph, {launches} launches")
    one = events[(TRACED - 2) * launches : (TRACED - 1) * launches]
    for begin, duration, stream, name in one:
        print(f"{(begin - one[0][0]) / 1e3:9.1f} {duration / 1e3:8.1f} s{stream}  {name[:90]}")


if __name__ == "__main__":
    main()
