"""Steps a second of `trope bench train` with other settings of the step's modules: one process, in turns.

PYTHONPATH=. python3 benchmarks/step_variants.py --shape shop --model hstu-trope --variant default --variant triton
PYTHONPATH=. python3 benchmarks/step_variants.py --list

Without --variant all variants of the shape are measured. A variant that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from attention_parts import having

from trope.bench.shapes import Shape, find_shape, generate
from trope.bench.tools import step_seconds
from trope.bench.train import Bench, warm_up
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.kernels import project
from trope.kernels.attention import bias_gradient, narrow
from trope.kernels.readout import triton as readout
from trope.kernels.silu_rotate import triton as silu_rotate
from trope.kernels.table import triton as table
from trope.train import fused, matrices

Variant = list[tuple[Any, str, Any]]  # module, constant, value

TRITON: Variant = [(narrow, "HEAD_DIM", 0)]  # attention for heads of 32, too
BEFORE: Variant = [(fused, "OWN_SHARE", 0), (fused, "AHEAD", -1)]  # the table shares all multiprocessors
# Gradients that nothing in the backward pass waits for are formed in it.
WEIGHTS: Variant = [(project, "WEIGHTS_LATE", False)]
SUMS: Variant = [(project, "BIASES_LATE", False), (bias_gradient, "SUMS_LATE", False)]
SUMS += [(readout, "SUMS_LATE", False), (silu_rotate, "SUMS_LATE", False)]
# torch moves the network's small tensors, and adds up the squares of the table's gradient.
SMALL: Variant = [(matrices, "LARGE", 1 << 16), (table, "MOST_PARTS", 1 << 12)]
LARGE: dict[str, Variant] = {
    "default": [],
    "triton": TRITON,
    "nothing beside the network": [(fused, "BESIDE_LARGE", 1 << 60)],
}
VARIANTS: dict[str, dict[str, Variant]] = {
    "shop": LARGE,
    "shop-long": LARGE,
    "pixel1m": {
        "default": [],
        "as before: nothing late, torch moves small tensors": [*WEIGHTS, *SUMS, *SMALL],
        "products of weights in the backward pass": WEIGHTS,
        "sums in the backward pass": SUMS,
        "products and sums in the backward pass": [*WEIGHTS, *SUMS],
        "late behind the network": [(fused, "BEHIND", 0)],
        "late ahead of the network": [(fused, "BEHIND", -2)],
        "torch moves small tensors": SMALL,
        "before": BEFORE,
        **{f"own {share}": [(fused, "OWN_SHARE", share)] for share in (0.42, 0.46, 0.55, 0.6)},
        "nothing ahead of the network": [(fused, "AHEAD", -1)],
    },
    "tiny": {"default": [], "before": BEFORE},
}


class Measured:
    """A variant's parts; after `measure` the seconds of its steps, sorted, and the last loss."""

    def __init__(self, shape: Shape, model: str, data: Sequences, variant: Variant) -> None:
        self.variant = variant
        self.bench = Bench(shape, model, data, data.device)
        with having(variant):
            self.step = self.bench.make_fused()
            for _ in range(warm_up(self.bench, "fused", "full")):
                self()
        if data.device.type == "cuda" and not self.step.is_captured:
            raise RuntimeError("the step was not captured")

    def __call__(self) -> torch.Tensor:
        return self.step(*self.bench.place()).loss

    def measure(self, steps: int) -> None:
        with having(self.variant):
            self.seconds = step_seconds(self, self.bench.device, steps)
            self.loss = float(self())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="shop", choices=sorted(VARIANTS))
    parser.add_argument("--model", default="hstu-trope")
    parser.add_argument("--variant", action="append", help="several times; all of the shape without it")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of a turn; 60, or 400 of a small shape")
    parser.add_argument("--list", action="store_true", help="the variants and their settings")
    args = parser.parse_args()
    variants = VARIANTS[args.shape]
    if args.list:
        for shape, named in VARIANTS.items():
            for name, variant in named.items():
                print(
                    f"{shape} {name}:",
                    *(f"{module.__name__}.{constant}={value}" for module, constant, value in variant),
                )
        return
    names = args.variant or list(variants)
    if unknown := set(names) - set(variants):
        parser.error(f"unknown variant {', '.join(sorted(unknown))}; choose from {', '.join(variants)}")
    run(find_shape(args.shape), args.model, {name: variants[name] for name in names}, args.turns, args.steps)


def run(shape: Shape, model: str, variants: dict[str, Variant], turns: int, steps: int | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    steps = steps or (60 if shape.items > 10**6 else 400)
    environment = describe()
    print(f"# {shape.name} {model}, full histories, {steps} steps a turn; {environment}", flush=True)
    data = generate(shape, 8 * shape.batch, True, device)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(turns):
        for name, variant in variants.items():
            began = time.perf_counter()
            try:
                measured = Measured(shape, model, data, variant)
                measured.measure(steps)
            except Exception as error:  # an experiment that this machine cannot do says so, and the others go on
                print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
                continue
            seconds[name].extend(measured.seconds)
            took = f"loss {measured.loss:.4f}, {time.perf_counter() - began:.1f} s in all"
            print(f"turn {turn} {name}: {_speed(measured.seconds)}, {took}", flush=True)
            del measured
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for name, times in seconds.items():
        if times:
            print(f"{name}: {model} {_speed(times)}")


def _speed(seconds: list[float]) -> str:
    return f"{1 / statistics.fmean(seconds):.1f} it/s p50 {1e3 * statistics.median(seconds):.3f}"


if __name__ == "__main__":
    main()
