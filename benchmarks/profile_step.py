"""Where a fused training step spends its time on a GPU: device time and launches by kernel, outside of a CUDA graph.

python benchmarks/profile_step.py pixel1m:hstu-trope shop:hstu-trope
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from trope.bench.shapes import find_shape, generate
from trope.bench.train import Bench

STEPS = 3
SHOWN = 36


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("profile_step.py needs a CUDA device")
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    for argument in sys.argv[1:]:
        name, model = argument.split(":")
        shape = find_shape(name)
        bench = Bench(shape, model, generate(shape, 8 * shape.batch, full=True, device=device), device)
        step = bench.make_fused()
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
        print(f"== {argument}: {total / 1e3:.3f} ms device, {launches} launches")
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:SHOWN]:
            print(f"{event.self_device_time_total / STEPS:9.1f} us {event.count // STEPS:4d}  {event.key[:76]}")


if __name__ == "__main__":
    main()
