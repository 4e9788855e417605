"""`trope bench eval`: how long it takes to rank the full catalogue for every user, next to what the machine allows.

Data of the paper's shapes are generated on the device, every history full; the model is untrained, which is the hard
case for the kernel: positives lie in the middle of the scores, where most items are near. The kernel is first compared
with the exact reference on a few users; if it fails it gets no number. The yardsticks are this machine's own bf16
matmul (the ranking's three products at that rate) and the plain way: a float32 product and tiles of scores, measured on
a sample of users and scaled up.
"""

from __future__ import annotations

import csv as csv_module
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trope.benchmark import cuda_seconds, wall_seconds
from trope.config import EvalConfig, preset
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.evaluate import Model, Precision, evaluate
from trope.kernels import Backend
from trope.kernels.backend import HAS_TRITON
from trope.kernels.ranking import Catalogue, places
from trope.whole import whole_file

SPAN = (1_500_000_000, 1_600_000_000)
CHECKED = 64  # users compared with the reference
PIECE = 1 << 20  # users generated at a time


@dataclass(frozen=True)
class Shape:
    """U users with L events each and one positive, V items, and the model: width E, blocks, heads of head_dim.

    sample: users that the plain way is measured on.
    """

    name: str
    U: int
    V: int
    L: int = 50
    E: int = 512
    blocks: int = 2
    heads: int = 4
    head_dim: int = 128
    sample: int = 8192

    @property
    def ranking_flops(self) -> int:
        """Of the products that the kernel makes: three bf16 ones in place of one in float32."""
        return 3 * 2 * self.U * self.V * self.E


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("pixel200k", 200_000, 96_282),
        Shape("pixel1m", 1_001_822, 100_541),
        Shape("pixel8m", 8_886_078, 407_082),
        Shape("ml20m", 138_493, 26_744, L=200),
        Shape("books", 776_370, 495_063),
        Shape("shop", 100_000, 4_800_000, L=512, E=128, blocks=12, heads=8, head_dim=32, sample=1024),
    )
}
TINY = Shape("tiny", 40, 300, L=8, E=16, blocks=1, heads=2, head_dim=8, sample=20)


@dataclass(frozen=True)
class Row:
    """One line of the CSV. Seconds are for all U users; `measured_users` says how many of them were really ranked."""

    name: str
    U: int
    V: int
    L: int
    E: int
    version: str
    precision: str
    measured_users: int
    encode_s: float
    rank_s: float
    total_s: float
    users_per_s: float
    peak_GB: float
    ranking_TFLOP: float
    matmul_TFLOP_per_s: float
    least_rank_s: float
    fraction_of_matmul: float


class Timed:
    """A model that measures how long it encodes: device time on a GPU."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device, self.training = model, device, model.training
        self.wall = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """The model's, between two events."""
        start = time.perf_counter()
        if self.device == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.events.append(events)
            events[0].record()
        out_BE = self.model.encode_last(items_BL, times_BL, lengths_B, t_now_B)
        if self.device == "cuda":
            events[1].record()
        self.wall += time.perf_counter() - start
        return out_BE

    def item_vectors(self) -> Tensor:
        """The model's."""
        return self.model.item_vectors()

    def train(self, mode: bool = True) -> object:
        """The model's."""
        return self.model.train(mode)

    def seconds(self) -> float:
        """Spent in encoding so far; synchronises."""
        if self.device != "cuda":
            return self.wall
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.events) / 1e3


def generate(shape: Shape, device: str) -> Sequences:
    """U users with L + 1 events: the last is the positive, everything before it the history."""
    draw = torch.Generator(device).manual_seed(0)
    events = shape.L + 1
    items = torch.empty((shape.U, events), dtype=torch.int32, device=device)
    times = torch.empty((shape.U, events), dtype=torch.int64, device=device)
    longest = (SPAN[1] - SPAN[0]) // (2 * events)
    for first in range(0, shape.U, PIECE):
        part = slice(first, min(shape.U, first + PIECE))
        items[part].random_(1, shape.V + 1, generator=draw)
        gaps = torch.randint(longest, times[part].shape, generator=draw, device=device)
        times[part] = gaps.cumsum(1).add_(SPAN[0])
    cuts = torch.tensor([shape.L - 1, shape.L, shape.L, shape.L + 1], dtype=torch.int32, device=device)
    return _store(shape, items, times, cuts[:, None].repeat(1, shape.U))


def _store(shape: Shape, items: Tensor, times: Tensor, splits: Tensor) -> Sequences:
    meta = {"protocol": {"name": "loo-strict"}, "counts": {"items": shape.V}, "time_span": {"train": SPAN}}
    offsets = torch.arange(len(items) + 1, device=items.device) * items.shape[1]
    arrays = {"items": items.flatten(), "times": times.flatten(), "offsets": offsets, "splits": splits}
    return Sequences(Path(f"generated-{shape.name}"), meta, arrays)


def first_users(data: Sequences, shape: Shape, users: int) -> Sequences:
    """The same data with some of its users."""
    items, times = (x.view(data.num_users, -1)[:users] for x in (data.items, data.times))
    splits = torch.stack((data.train_end, data.valid_end, data.test_start, data.test_end))[:, :users]
    return _store(shape, items, times, splits)


def make_model(shape: Shape, device: str) -> Model:
    """An untrained hstu-trope of this shape."""
    from trope.model import SequentialRecommender

    sizes = {"width": shape.E, "blocks": shape.blocks, "heads": shape.heads, "head_dim": shape.head_dim}
    settings = [f"model.{name}={value}" for name, value in {**sizes, "max_len": shape.L}.items()]
    torch.manual_seed(0)
    with torch.device(device):  # a large table is drawn where it will live
        return SequentialRecommender(preset("hstu-trope", settings), shape.V, SPAN).to(device)


def complaint(model: Model, data: Sequences, max_len: int) -> str | None:
    """None if the kernel counts what the exact reference counts for a few users, else what it does not."""
    batch = data.eval_batch("test", data.eval_users("test")[:CHECKED], max_len)
    with torch.inference_mode():
        items_VE = model.item_vectors().float()
        users_BE = model.encode_last(batch.items, batch.times, batch.lengths, batch.t_now).float()
        rows_S = torch.arange(len(users_BE), device=users_BE.device)
        backends: tuple[Backend, ...] = ("triton", "torch")
        (better, ties), (exact_better, exact_ties) = (
            places(users_BE, Catalogue.of(items_VE, backend), rows_S, batch.positives) for backend in backends
        )
    wrong = int(((better != exact_better) | (ties != exact_ties)).sum())
    return f"{wrong} of {len(rows_S)} places differ from the exact reference" if wrong else None


def matmul_rate(device: str, size: int) -> float:
    """bf16 operations per second of a large square product on this machine."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    timer = cuda_seconds if device == "cuda" else wall_seconds
    return 2 * size**3 / statistics.median(timer(lambda: a @ b, 20))


def measure(
    shape: Shape, model: Model, data: Sequences, version: str, precision: Precision, backend: Backend, rate: float
) -> Row:
    """Evaluate once, after a warm-up on a few users; what was measured on a sample is scaled up."""
    device, users = data.device.type, data.num_users
    for few in (2048, 2047):  # round sizes and others are compiled apart
        warm = first_users(data, shape, min(users, few))
        evaluate(model, warm, "test", EvalConfig(), shape.L, precision=precision, backend=backend)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    timed = Timed(model, device)
    start = time.perf_counter()
    evaluate(timed, data, "test", EvalConfig(), shape.L, precision=precision, backend=backend)
    total = time.perf_counter() - start  # evaluate ends with the transfer of the counts, so nothing is still under way
    encode = timed.seconds()
    scale = shape.U / users
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    least = shape.ranking_flops / rate
    return Row(
        shape.name, shape.U, shape.V, shape.L, shape.E, version, precision, users,
        encode_s=round(encode * scale, 4), rank_s=round((total - encode) * scale, 4), total_s=round(total * scale, 4),
        users_per_s=round(users / total, 1), peak_GB=round(peak, 2), ranking_TFLOP=round(shape.ranking_flops / 1e12, 3),
        matmul_TFLOP_per_s=round(rate / 1e12, 2), least_rank_s=round(least, 4),
        fraction_of_matmul=round(least / ((total - encode) * scale), 3),
    )  # fmt: skip


def evaluation_benchmark(shape: str = "pixel1m", csv: Path | None = None, quick: bool = False) -> list[Row]:
    """Check, time and print evaluation at one shape; see `trope bench eval --help`.

    shape: one of SHAPES. csv: also write the rows there. quick: a tiny shape in place of it, a smoke test.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}")
    size = TINY if quick else SHAPES[shape]
    console = Console() if sys.stdout.isatty() else Console(width=130)  # a log file has no width of its own
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = describe()
    rate = matmul_rate(device, 256 if quick else 8192 if device == "cuda" else 1024)
    console.print(
        f"{environment['device']}: bf16 matmul {rate / 1e12:,.1f} TFLOP/s\n"
        f"{size.name}: ranking is 3 x 2 x U {size.U:,} x V {size.V:,} x E {size.E} = {size.ranking_flops / 1e12:,.1f} "
        f"TFLOP, at least {size.ranking_flops / rate:,.2f} s"
    )
    data, model = generate(size, device), make_model(size, device)
    sample = first_users(data, size, min(size.sample, size.U))
    rows = []
    # Interpreted kernels are for tests, and only small shapes.
    fused = HAS_TRITON and (device == "cuda" or (quick and os.environ.get("TRITON_INTERPRET") == "1"))
    if not fused:
        console.print("no CUDA device: timing the plain way on the CPU; Triton's interpreter is not worth timing")
    elif wrong := complaint(model, sample, size.L):
        console.print(f"[red]{size.name} kernel: no number, {wrong}")
    else:
        rows.append(measure(size, model, sample, "kernel", "fp32", "triton", rate))
        rows.append(measure(size, model, data, "kernel", "bf16", "triton", rate))
    rows.append(measure(size, model, sample, "plain", "fp32", "torch", rate))
    console.print(table(rows))
    if csv is not None:
        write_csv(csv, rows, environment)
        console.print(f"written to {csv}")
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    view = Table(title="Evaluation: encode every history, rank the full catalogue")
    for name in ("shape", "version", "encode in", "measured on"):
        view.add_column(name)
    for name in ("encode s", "rank s", "total s", "users/s", "peak GB", "of matmul"):
        view.add_column(name, justify="right")
    for r in rows:
        on = f"{r.measured_users:,} users" + ("" if r.measured_users == r.U else ", scaled up")
        view.add_row(
            f"{r.name} {r.U:,}x{r.V:,}x{r.E}", r.version, r.precision, on, f"{r.encode_s:,.2f}", f"{r.rank_s:,.2f}",
            f"{r.total_s:,.2f}", f"{r.users_per_s:,.0f}", f"{r.peak_GB:.1f}", f"{r.fraction_of_matmul:.0%}",
        )  # fmt: skip
    return view


def write_csv(path: Path, rows: list[Row], environment: dict[str, str]) -> None:
    """The rows, each with the machine, versions and commit they were measured on; whole or absent."""
    with whole_file(path) as partial, partial.open("w", newline="") as file:
        writer = csv_module.DictWriter(file, [f.name for f in fields(Row)] + list(environment), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(row), **environment} for row in rows)
