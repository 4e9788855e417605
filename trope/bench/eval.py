"""`trope bench eval`: how long it takes to rank the full catalogue for every user, next to what the machine allows.

Data of a shape (trope.bench.shapes) are generated on the device, every history full. The model is untrained, which is
the hard case for the kernel: positives lie in the middle of the scores, where most items are near. The kernel is first
compared with the exact reference on a few users; a kernel that differs gets no number. There are two yardsticks. One is
this machine's own bf16 matmul: the time of the ranking's three products at that rate. The other is the plain way, a
float32 product and tiles of scores, measured on a sample of users and scaled up.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from trope.bench.shapes import Shape, find_shape, generate
from trope.bench.tools import keep_rows, make_console, make_table, measure_ceilings
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.evaluate.evaluation import Model, Precision, evaluate
from trope.kernels import Backend
from trope.kernels.backend import HAS_TRITON
from trope.kernels.ranking import Catalogue, places

CHECKED = 64  # users compared with the reference


def sample_users(shape: Shape) -> int:
    """Users that the plain way is measured on: as many scores as 8,192 users of a catalogue of 100,000 items."""
    return max(16, min(shape.users // 2, 8192 * 100_000 // shape.items))


def ranking_flops(shape: Shape) -> int:
    """Of the products that the kernel makes: three bf16 ones in place of one in float32."""
    return 3 * 2 * shape.users * shape.items * shape.width


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


def first_users(data: Sequences, users: int) -> Sequences:
    """The same data with some of its users."""
    events = int(data.offsets[users])
    return Sequences.leave_one_out(
        data.items[:events], data.times[:events], data.offsets[: users + 1], data.num_items, data.path
    )


def make_model(shape: Shape, data: Sequences) -> Model:
    """An untrained hstu-trope of this shape, on the data's device."""
    from trope.models.recommender import SequentialRecommender

    torch.manual_seed(0)
    with data.device:  # a large table is drawn where it will live
        return SequentialRecommender(shape.config("hstu-trope"), shape.items, data.time_span).to(data.device)


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


def measure(
    shape: Shape, model: Model, data: Sequences, version: str, precision: Precision, backend: Backend, rate: float
) -> Row:
    """Evaluate once, after a warm-up on a few users; what was measured on a sample is scaled up."""
    device, users = data.device.type, data.num_users
    for few in (2048, 2047):  # round sizes and others are compiled apart
        warm = first_users(data, min(users, few))
        evaluate(model, warm, "test", "none", shape.max_len, precision=precision, backend=backend)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    timed = Timed(model, device)
    start = time.perf_counter()
    evaluate(timed, data, "test", "none", shape.max_len, precision=precision, backend=backend)
    total = time.perf_counter() - start  # evaluate ends with the transfer of the counts, so nothing is still under way
    encode = timed.seconds()
    scale = shape.users / users
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    least = ranking_flops(shape) / rate
    return Row(
        shape.name, shape.users, shape.items, shape.max_len, shape.width, version, precision, users,
        encode_s=round(encode * scale, 4), rank_s=round((total - encode) * scale, 4), total_s=round(total * scale, 4),
        users_per_s=round(users / total, 1), peak_GB=round(peak, 2),
        ranking_TFLOP=round(ranking_flops(shape) / 1e12, 3),
        matmul_TFLOP_per_s=round(rate / 1e12, 2), least_rank_s=round(least, 4),
        fraction_of_matmul=round(least / ((total - encode) * scale), 3),
    )  # fmt: skip


def evaluation_benchmark(shape: str = "pixel1m", csv: Path | None = None, quick: bool = False) -> list[Row]:
    """Check, time and print evaluation at one shape; see `trope bench eval --help`.

    shape: by name. csv: also write the rows there. quick: a tiny shape in place of it, a smoke test.
    """
    chosen = find_shape(shape)
    size = find_shape("tiny") if quick else chosen
    console = make_console(130)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = describe()
    rate = measure_ceilings(device, quick).matmul
    flops = ranking_flops(size)
    console.print(
        f"{environment['device']}: bf16 matmul {rate / 1e12:,.1f} TFLOP/s\n"
        f"{size.name}: ranking is 3 x 2 x U {size.users:,} x V {size.items:,} x E {size.width} = {flops / 1e12:,.1f} "
        f"TFLOP, at least {flops / rate:,.2f} s"
    )
    data = generate(size, size.users, full=True, device=device)
    model = make_model(size, data)
    sample = first_users(data, sample_users(size))
    rows = []
    # Interpreted kernels are for tests, and only small shapes.
    fused = HAS_TRITON and (device.type == "cuda" or (quick and os.environ.get("TRITON_INTERPRET") == "1"))
    if not fused:
        console.print("no CUDA device: timing the plain way on the CPU; Triton's interpreter is not worth timing")
    elif wrong := complaint(model, sample, size.max_len):
        console.print(f"[red]{size.name} kernel: no number, {wrong}")
    else:
        rows.append(measure(size, model, sample, "kernel", "fp32", "triton", rate))
        rows.append(measure(size, model, data, "kernel", "bf16", "triton", rate))
    rows.append(measure(size, model, sample, "plain", "fp32", "torch", rate))
    console.print(table(rows))
    keep_rows(console, csv, rows, environment)
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    words = ("shape", "version", "encode in", "measured on")
    numbers = ("encode s", "rank s", "total s", "users/s", "peak GB", "of matmul")
    view = make_table("Evaluation: encode every history, rank the full catalogue", words, numbers)
    for r in rows:
        on = f"{r.measured_users:,} users" + ("" if r.measured_users == r.U else ", scaled up")
        view.add_row(
            f"{r.name} {r.U:,}x{r.V:,}x{r.E}", r.version, r.precision, on, f"{r.encode_s:,.2f}", f"{r.rank_s:,.2f}",
            f"{r.total_s:,.2f}", f"{r.users_per_s:,.0f}", f"{r.peak_GB:.1f}", f"{r.fraction_of_matmul:.0%}",
        )  # fmt: skip
    return view
