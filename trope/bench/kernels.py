"""`trope bench kernels`: how fast the rotary kernels run, next to what the memory of this machine allows.

Every version is first compared with the float64 reference, values and gradients; a version that fails gets no number.
On a GPU a timing is device time: several input sets, larger together than the cache, captured in one CUDA graph, so
that neither launches nor cached data are measured. The yardstick is this machine's own copy bandwidth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from trope.bench.tools import copy_bandwidth, graph_seconds, keep_rows, make_console, make_table, step_seconds
from trope.environment import describe
from trope.kernels import Backend, rotate_qk
from trope.kernels.backend import HAS_TRITON
from trope.rotary import NEUTRAL_SPAN, TRoPE
from trope.rotary.base import Layout

SETS = 8  # input sets in one graph: what a step reuses has left the cache, and the graph's own launch is shared
# Errors against float64 relative to the norm: one rounding to bf16 (2^-9 at most, on average less); and for the
# frequency gradients float32 products, of which millions of either sign are summed.
TOLERANCE = 2.0**-9
FREQUENCY_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Shape:
    """One problem: B sequences of L events, H heads of D dims."""

    name: str
    B: int
    L: int
    H: int
    D: int

    @property
    def least_bytes(self) -> dict[str, int]:
        """bf16: forward reads and writes q and k once; backward reads q, k and both gradients and writes dq, dk."""
        qk = 2 * 2 * self.B * self.L * self.H * self.D
        return {"forward": 2 * qk, "forward+backward": 5 * qk}


SHAPES = (
    Shape("ml20m", 128, 200, 4, 128),
    Shape("shop", 64, 512, 8, 32),
    Shape("pixel1m", 128, 50, 4, 128),
    Shape("long", 8, 4096, 8, 64),
)
QUICK_SHAPES = (Shape("tiny", 2, 16, 2, 8),)


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    name: str
    B: int
    L: int
    H: int
    D: int
    dtype: str
    layout: str
    version: str
    direction: str
    p20_us: float
    p50_us: float
    p80_us: float
    least_bytes: int
    GB_per_s: float
    copy_GB_per_s: float
    fraction_of_copy: float


@dataclass(frozen=True)
class Problem:
    """Inputs of one call and the gradients that come back into it."""

    q: Tensor
    k: Tensor
    g_q: Tensor
    g_k: Tensor
    times: Tensor
    coords: Tensor

    @classmethod
    def draw(cls, shape: Shape, device: str, seed: int) -> Problem:
        """Random bf16 tensors and sorted times of about the year 2020."""
        draw = torch.Generator().manual_seed(seed)
        size = (shape.B, shape.L, shape.H, shape.D)
        q, k, g_q, g_k = (torch.randn(size, generator=draw).to(device, torch.bfloat16) for _ in range(4))
        times = torch.randint(1_500_000_000, 1_600_000_000, size[:2], generator=draw).sort(dim=1).values.to(device)
        return cls(q.requires_grad_(), k.requires_grad_(), g_q, g_k, times, (times - sum(NEUTRAL_SPAN) // 2)[None])

    def double(self) -> Problem:
        """The same numbers in float64."""
        q, k, g_q, g_k = (x.detach().double() for x in (self.q, self.k, self.g_q, self.g_k))
        return Problem(q.requires_grad_(), k.requires_grad_(), g_q, g_k, self.times, self.coords)


Forward = Callable[[Problem], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Version:
    """One implementation, the same thing in float64, and the frequency parameters it differentiates."""

    name: str
    forward: Forward
    exact: Forward
    parameters: list[Tensor]


def versions(shape: Shape, layout: Layout, device: str) -> list[Version]:
    """The operator by itself, frequencies given; and the whole module, from times and coefficients."""
    rope = TRoPE(shape.D, layout=layout, check_values=False).to(device)
    freq_q, freq_k = (f.detach().requires_grad_() for f in rope.frequencies())
    freqs = [freq_q, freq_k]

    def operator(backend: Backend) -> Forward:
        def forward(p: Problem) -> tuple[Tensor, Tensor]:
            return rotate_qk(p.q, p.k, p.coords, p.coords, freq_q, freq_k, None, layout == "interleaved", backend)

        return forward

    def module(p: Problem) -> tuple[Tensor, Tensor]:
        return rope(p.q, p.k, p.times)

    reference = operator("torch")
    made = [
        Version("reference", reference, reference, freqs),
        Version("reference compiled", torch.compile(reference, fullgraph=True, dynamic=False), reference, freqs),
    ]
    if device == "cuda" and HAS_TRITON:
        coefficients: list[Tensor] = list(rope.parameters())
        compiled = torch.compile(module, fullgraph=True, dynamic=False)
        made += [
            Version("triton", operator("triton"), reference, freqs),
            Version("TRoPE module", module, module, coefficients),
            Version("TRoPE module compiled", compiled, module, coefficients),
        ]
    return made


def run(forward: Forward, p: Problem, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    """Rotated q and k, their gradients, and the parameters' gradients."""
    y = forward(p)
    return (*y, *torch.autograd.grad(y, (p.q, p.k, *parameters), (p.g_q, p.g_k)))


def complaint(version: Version, p: Problem) -> str | None:
    """None if the version agrees with float64 on these inputs, values and gradients; else what does not."""
    names = ("q", "k", "dq", "dk", "dfreq_q", "dfreq_k")
    got = run(version.forward, p, version.parameters)
    for name, y, exact in zip(names, got, run(version.exact, p.double(), version.parameters), strict=True):
        error = ((y.double() - exact.double()).norm() / exact.double().norm()).item()
        allowed = FREQUENCY_TOLERANCE if name.startswith("dfreq") else TOLERANCE
        if not error <= allowed:  # NaN never passes
            return f"{name} is off by {error:.1e} of its norm, {allowed:.0e} allowed"
    return None


def seconds(version: Version, problems: list[Problem], backward: bool, repeats: int) -> list[float]:
    """Times of one forward (and backward), sorted."""

    def step() -> list[tuple[Tensor, ...]]:
        # All forwards, then all backwards, as between the layers of a model: nothing waits for its turn in the cache.
        outputs: list[tuple[Tensor, ...]] = [version.forward(p) for p in problems]
        if backward:
            outputs = [
                torch.autograd.grad(y, (p.q, p.k, *version.parameters), (p.g_q, p.g_k))
                for y, p in zip(outputs, problems, strict=True)
            ]
        return outputs

    times = graph_seconds(step, repeats) if problems[0].q.is_cuda else step_seconds(step, "cpu", repeats)
    return [t / len(problems) for t in times]


def chosen_shapes(names: Sequence[str], quick: bool) -> tuple[Shape, ...]:
    """The shapes by name; all of them if none is named."""
    known = {shape.name: shape for shape in SHAPES}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown shape {unknown[0]!r}; choose from {', '.join(known)}")
    return tuple(known[name] for name in names) or (QUICK_SHAPES if quick else SHAPES)


def kernel_benchmark(csv: Path | None = None, names: Sequence[str] = (), quick: bool = False) -> list[Row]:
    """Check, time and print every version on every shape and layout; see `trope bench kernels --help`."""
    shapes = chosen_shapes(names, quick)
    console = make_console(130)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = describe()
    copy = copy_bandwidth(device, 1 << (20 if quick else 32 if device == "cuda" else 28))
    console.print(f"{environment['device']}: a copy moves {copy / 1e9:,.0f} GB/s, read + written")
    if device == "cpu":
        console.print("no CUDA device: timing the torch paths on the CPU; Triton's interpreter is not worth timing")
    rows: list[Row] = []
    layouts: tuple[Layout, ...] = ("interleaved", "halves")
    for shape, layout in itertools.product(shapes, layouts):
        problems = [Problem.draw(shape, device, seed) for seed in range(SETS)]
        for version in versions(shape, layout, device):
            if wrong := complaint(version, problems[0]):
                console.print(f"[red]{shape.name} {layout} {version.name}: no number, {wrong}")
                continue
            for direction, least in shape.least_bytes.items():
                times = seconds(version, problems, direction != "forward", repeats=5 if quick else 50)
                p20, p50, p80 = (times[int(share * len(times))] for share in (0.2, 0.5, 0.8))
                rows.append(
                    Row(**asdict(shape), dtype="bfloat16", layout=layout, version=version.name, direction=direction,
                        p20_us=round(1e6 * p20, 2), p50_us=round(1e6 * p50, 2), p80_us=round(1e6 * p80, 2),
                        least_bytes=least, GB_per_s=round(least / p50 / 1e9, 1), copy_GB_per_s=round(copy / 1e9, 1),
                        fraction_of_copy=round(least / p50 / copy, 3))
                )  # fmt: skip
    console.print(table(rows))
    keep_rows(console, csv, rows, environment)
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    words, numbers = ("shape", "layout", "version", "direction"), ("p20 us", "p50 us", "p80 us", "GB/s", "of copy")
    view = make_table("Rotary kernels, bf16, time per call", words, numbers)
    for r in rows:
        view.add_row(
            f"{r.name} {r.B}x{r.L}x{r.H}x{r.D}", r.layout, r.version, r.direction,
            f"{r.p20_us:.1f}", f"{r.p50_us:.1f}", f"{r.p80_us:.1f}", f"{r.GB_per_s:,.0f}", f"{r.fraction_of_copy:.0%}",
        )  # fmt: skip
    return view
