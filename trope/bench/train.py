"""`trope bench train`: training steps per second at the paper's shapes, next to what this machine allows.

Three versions of the same step (same batch, same negatives per position, same optimiser):
- `fused`: what `trope train` runs on a GPU, kernels and a CUDA graph (trope.train.fused);
- `plain`: PyTorch launches, one after the other, as `trope train` runs where it cannot fuse;
- `eager`: the yardstick: what one writes first, padded, with the gathered negatives [T, N, E] and a dense table.
The roofline is an estimate of the least a step can take on this machine: the table's weights and moments (as many as
`train.table_state` keeps) read and written once, the candidates' rows read once and their outputs once more, the matrix
products and the attention at the measured matmul ceiling.

Shapes: T tokens, E width, V items, C candidates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from trope.bench.shapes import Shape, find_shape, generate
from trope.bench.tools import Ceilings, keep_rows, make_console, make_table, measure_ceilings, step_seconds, write_rows
from trope.config import Config
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.kernels.backend import prefer
from trope.models.recommender import SequentialRecommender
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fused import FusedStep
from trope.train.optimizer import make_optimizer
from trope.train.step import Feed, Objective

MODELS = ("hstu", "hstu-time", "hstu-torope", "hstu-trope-attention", "hstu-trope")
GiB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    shape: str
    model: str
    version: str
    lengths: str
    batch: int
    table_state: str
    tokens: int
    it_per_s: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    tokens_per_s: float
    peak_GiB: float
    roofline_ms: float
    table_ms: float
    candidates_ms: float
    matmul_ms: float
    attention_ms: float
    fraction_of_roofline: float
    loss: float
    copy_GB_per_s: float
    matmul_TFLOP_per_s: float


def roofline(config: Config, items: int, tokens: int, pairs: int, ceilings: Ceilings) -> dict[str, float]:
    """The least milliseconds of each part of a step.

    pairs: (query, key) pairs of the batch that attention looks at.
    """
    model, train = config.model, config.train
    inner = model.heads * model.head_dim
    # Weights and both moments read and written in float32, the unit vectors written in bf16.
    state = 2 * model.width + (1 if train.table_state == "row" else model.width)
    table = items * (2 * 4 * state + 2 * model.width) / ceilings.copy
    # Candidates' rows read once in bf16, and the outputs once more for each of them on the way back.
    candidates = 2 * tokens * (train.negatives + 1) * model.width * 2 / ceilings.copy
    # Forward, and twice that backward.
    matmul = 3 * 2 * tokens * model.blocks * (model.width * 4 * inner + inner * model.width) / ceilings.matmul
    # Two products forward, five backward.
    attention = 7 * 2 * pairs * model.blocks * inner / ceilings.matmul
    parts = {"table_ms": table, "candidates_ms": candidates, "matmul_ms": matmul, "attention_ms": attention}
    return {name: 1e3 * seconds for name, seconds in parts.items()}


class Bench:
    """One model on one shape: its parts, and the versions of its step."""

    def __init__(self, shape: Shape, model: str, data: Sequences, device: torch.device) -> None:
        self.config, self.data, self.device = shape.config(model), data, device
        torch.manual_seed(0)
        self.feed = Feed(data, self.config, Group(0, 1, device))
        with device:  # where a table of a hundred million items is drawn in seconds
            self.model = SequentialRecommender(self.config, data.num_items, data.time_span).to(device)
        self.optimizer = make_optimizer(self.model, self.config)
        self.guard = DivergenceGuard(self.model, device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.is_bf16 = device.type == "cuda"
        self.count = 0

    @property
    def whole(self) -> int:
        """Batches of an epoch that have all their rows; the others are passed over."""
        return max(1, len(self.feed.windows.starts) // self.config.train.batch)

    def place(self) -> tuple[int, int, int]:
        """Epoch, index and number of the next step."""
        place = (*divmod(self.count, self.whole), self.count)
        self.count += 1
        return place

    def make_fused(self) -> FusedStep:
        return FusedStep(
            self.model, self.data, self.config, self.feed, self.optimizer, self.guard, self.loss_sum, 0, self.is_bf16
        )

    def fused(self) -> Callable[[], Tensor]:
        step = self.make_fused()
        return lambda: step(*self.place()).loss

    def plain(self) -> Callable[[], Tensor]:
        objective = Objective(self.model, self.config.train.temperature)

        def step() -> Tensor:
            work = self.feed(*self.place())
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16):
                loss = objective(work)
            loss.backward()
            self.guard(loss.detach())
            self.optimizer.step()
            return loss.detach()

        return step

    def eager(self) -> Callable[[], Tensor]:
        """Written as one would first: padded, negatives gathered, nothing fused."""
        train = self.config.train

        @prefer("torch")
        def step() -> Tensor:
            batch = self.feed(*self.place()).batch
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16):
                t_now_B = batch.target_times.gather(1, batch.lengths[:, None] - 1)[:, 0]
                out_BLE = self.model.encode(batch.items, batch.times, batch.lengths, t_now_B)
                shape = (*batch.targets.shape, train.negatives)
                drawn = torch.randint(1, self.data.num_items + 1, shape, device=self.device)
                candidates = torch.cat((batch.targets[..., None], drawn), dim=-1)
                vectors = F.normalize(self.model.items.embed(candidates), dim=-1)
                scores = (out_BLE[:, :, None] * vectors).sum(-1) / train.temperature
                hidden = (drawn == batch.targets[..., None]) | (batch.targets == 0)[..., None]
                scores = torch.cat((scores[..., :1], scores[..., 1:].masked_fill(hidden, -torch.inf)), dim=-1)
                losses = scores.logsumexp(-1) - scores[..., 0]
                loss = losses[batch.targets != 0].mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return step


def training_benchmark(
    names: Sequence[str] = (),
    csv: Path | None = None,
    models: Sequence[str] = MODELS,
    versions: Sequence[str] = ("fused",),
    lengths: Sequence[str] = ("full", "own"),
    steps: int = 100,
    quick: bool = False,
) -> list[Row]:
    """Time training steps; see `trope bench train --help`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [find_shape(name) for name in names] or [find_shape("tiny" if quick else "pixel1m")]
    if unknown := set(versions) - {"fused", "plain", "eager"}:
        raise ValueError(f"unknown version {', '.join(unknown)}; choose from fused, plain, eager")
    environment = describe()
    ceilings = measure_ceilings(device, quick)
    console = make_console()
    copy, matmul = ceilings.copy / 1e9, ceilings.matmul / 1e12
    console.print(f"{environment['device']}: copy {copy:,.0f} GB/s, bf16 matmul {matmul:,.0f} TFLOP/s")
    rows: list[Row] = []
    for shape in shapes:
        for length in lengths:
            users = min(shape.users, 10 if quick else 64) * shape.batch
            data = generate(shape, users, length == "full", device)
            for model in models:
                for version in versions:
                    rows.append(_measure(shape, model, version, length, data, ceilings, 5 if quick else steps))
                    console.print(_line(rows[-1]))
                    if csv is not None:  # a long benchmark that is cut off leaves what it has measured
                        write_rows(csv, rows, environment)
    console.print(table(rows))
    keep_rows(console, csv, rows, environment)
    return rows


def _measure(
    shape: Shape, model: str, version: str, length: str, data: Sequences, ceilings: Ceilings, steps: int
) -> Row:
    device = data.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bench = Bench(shape, model, data, device)
    step = getattr(bench, version)()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for _ in range(warm_up(bench, version, length)):
            step()
        times = step_seconds(step, device, steps)
        loss = step()
    finally:
        torch.set_float32_matmul_precision(before)
    lengths_W = (bench.feed.windows.ends - bench.feed.windows.starts - 1).double()
    tokens = int(lengths_W.mean() * shape.batch)
    pairs = int((lengths_W * (lengths_W + 1) / 2).mean() * shape.batch)
    parts = roofline(bench.config, shape.items, tokens, pairs, ceilings)
    least = sum(parts.values())
    mean = statistics.fmean(times)
    p20, p50, p80 = (1e3 * times[int(share * len(times))] for share in (0.2, 0.5, 0.8))
    peak = torch.cuda.max_memory_allocated() / GiB if device.type == "cuda" else 0.0
    return Row(
        shape=shape.name, model=model, version=version, lengths=length, batch=shape.batch,
        table_state=shape.table_state, tokens=tokens,
        it_per_s=round(1 / mean, 2), p20_ms=round(p20, 3), p50_ms=round(p50, 3), p80_ms=round(p80, 3),
        tokens_per_s=round(tokens / mean), peak_GiB=round(peak, 2), roofline_ms=round(least, 3),
        **{name: round(value, 3) for name, value in parts.items()},
        fraction_of_roofline=round(least / (1e3 * mean), 3), loss=round(float(loss), 3),
        copy_GB_per_s=round(ceilings.copy / 1e9), matmul_TFLOP_per_s=round(ceilings.matmul / 1e12),
    )  # fmt: skip


def warm_up(bench: Bench, version: str, length: str) -> int:
    """Steps before the clock starts: the fused step meets every size of batch twice, and captures it."""
    if version != "fused":
        return 2
    return 4 if length == "full" else 2 * bench.whole + 2


def _line(row: Row) -> str:
    return f"{row.shape} {row.model} {row.version} {row.lengths}: {row.it_per_s:,.1f} it/s, {row.p50_ms:.3f} ms"


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    words, numbers = ("shape", "lengths", "model", "version"), ("it/s", "p50 ms", "tokens/s", "peak GiB")
    least = ("table", "+ candidates", "+ matmul", "+ attention", "= ms", "of it")
    view = make_table("Training steps", words, (*numbers, *least))
    for r in rows:
        parts = (r.table_ms, r.candidates_ms, r.matmul_ms, r.attention_ms, r.roofline_ms)
        view.add_row(
            r.shape, r.lengths, r.model, r.version, f"{r.it_per_s:,.1f}", f"{r.p50_ms:.3f}", f"{r.tokens_per_s:,.0f}",
            f"{r.peak_GiB:.1f}", *(f"{part:.2f}" for part in parts), f"{r.fraction_of_roofline:.0%}",
        )  # fmt: skip
    return view
