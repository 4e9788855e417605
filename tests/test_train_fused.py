"""The fused training step is the plain one: same batches, same gradients, same parameters, whatever the model."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import on_gpu
from torch import Tensor

from trope.bench.shapes import SHAPES, find_shape, generate
from trope.config import PRESETS, Config, TrainConfig
from trope.data.sequences import Sequences
from trope.environment import describe
from trope.kernels import attention
from trope.kernels.aside import Aside
from trope.kernels.attention.arguments import kept_bytes, passing_bytes
from trope.kernels.backend import Backend, prefer
from trope.kernels.sequence_bounds import SequenceBounds
from trope.kernels.softmax import shared as softmax_shared
from trope.models.recommender import SequentialRecommender
from trope.train import fused as train_fused
from trope.train import matrices as train_matrices
from trope.train import step as train_step
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fused import FusedStep
from trope.train.loss import draw_negatives
from trope.train.optimizer import make_optimizer
from trope.train.step import Feed, Objective

CPU = torch.device("cpu")
DAY = 86_400
TINY = SHAPES["tiny"]


def made_up(targets_T: Tensor, negatives: int) -> Tensor:
    """Negatives that are a function of the targets alone, some of them the target itself."""
    return (targets_T[:, None].long() * 7 + torch.arange(negatives, device=targets_T.device) ** 2) % TINY.items + 1


class Parts:
    """A model and what trains it."""

    def __init__(self, config: Config, data: Sequences, device: torch.device = CPU) -> None:
        torch.manual_seed(0)
        self.config, self.feed = config, Feed(data, config, Group(0, 1, device))
        self.model = SequentialRecommender(config, data.num_items, data.time_span).to(device)
        self.optimizer = make_optimizer(self.model, config)
        self.guard = DivergenceGuard(self.model, device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.data = data

    def fused(self, is_bf16: bool = False, backend: Backend = "auto") -> FusedStep:
        parts = (self.model, self.data, self.config, self.feed, self.optimizer, self.guard, self.loss_sum)
        return FusedStep(*parts, 0, is_bf16, backend)

    def plain_step(self, step: int) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        loss = Objective(self.model, self.config.train.temperature)(self.feed(0, step, step))
        loss.backward()
        norm = self.guard(loss.detach())
        if self.config.train.clip:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.train.clip, norm)
        self.optimizer.step()
        return loss.detach(), norm


@pytest.fixture
def same_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps draw the same negatives; what is drawn is tested elsewhere."""

    def draw_uniform(num_items: int, seed: Tensor, candidates_TC: Tensor, backend: str) -> None:
        candidates_TC[:, 1:] = made_up(candidates_TC[:, 0], candidates_TC.shape[1] - 1)
        candidates_TC[:, 1:] *= candidates_TC[:, :1] != 0

    def draw_negatives(targets_T: Tensor, num_items: int, config: object, *_: object) -> Tensor:
        return made_up(targets_T, 8)

    monkeypatch.setattr(train_fused, "draw_uniform", draw_uniform)
    monkeypatch.setattr(train_step, "draw_negatives", draw_negatives)


SHARED = [("train.shared_negatives=true", f"train.negative_source={source}") for source in ("uniform", "batch")]


@pytest.fixture
def same_shared_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared negatives that are a function of the batch's targets: some of them, with duplicates, and from the uniform
    source other items.

    Tiles are small, so that a batch takes several.
    """

    def draw(targets_T: Tensor, num_items: int, config: TrainConfig, *_: object) -> Tensor:
        drawn = draw_negatives(targets_T, num_items, config, None)
        assert drawn is not None and drawn.shape == (config.negatives,)
        items_N = targets_T.sort(descending=True).values[: 3 * config.negatives : 3].clone()
        if config.negative_source == "uniform":
            others = torch.arange(config.negatives - 5, device=targets_T.device) ** 2
            items_N[5:] = (targets_T.sum() + others) % num_items + 1
        return items_N

    monkeypatch.setattr(train_fused, "draw_negatives", draw)
    monkeypatch.setattr(train_step, "draw_negatives", draw)
    monkeypatch.setattr(softmax_shared, "_TILE", 8 * 50)


@pytest.fixture
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of a tiny model counts as large."""
    monkeypatch.setattr(train_matrices, "LARGE", 2)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("name", "table_state"), [*((name, "full") for name in PRESETS), ("hstu-trope", "row")])
@pytest.mark.usefixtures("same_negatives", "small_matrices")
def test_steps_are_the_plain_steps(name: str, table_state: str, clip: float) -> None:
    # A gradient that is 0 but for rounding moves its parameter by lr; SwiGLU and RMSNorm make much of that.
    rate = 0.001 if name.startswith("transformer") else 0.01
    settings = ("model.dropout=0", "train.negatives=8", f"train.lr={rate}", f"train.table_state={table_state}")
    assert_same_steps(TINY.config(name, *settings, f"train.clip={clip}"))


@pytest.mark.parametrize("name", ["sasrec", "sasrec-trope", "tisasrec", "hstu"])
@pytest.mark.usefixtures("same_negatives")
def test_steps_with_a_readout_behind_any_block_are_the_plain_steps(name: str) -> None:
    assert_same_steps(TINY.config(name, "model.dropout=0", "train.negatives=8", "rotary.readout=0.5"))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ["hstu-trope", "sasrec"])  # with and without padding in attention
@pytest.mark.parametrize("settings", SHARED, ids=str)
@pytest.mark.usefixtures("same_shared_negatives")
def test_steps_with_shared_negatives_are_the_plain_steps(settings: tuple[str, ...], name: str, clip: float) -> None:
    assert_same_steps(TINY.config(name, "model.dropout=0", "train.negatives=8", f"train.clip={clip}", *settings))


@pytest.mark.parametrize("name", ["hstu-trope", "hstu-time", "tisasrec"])
@pytest.mark.usefixtures("same_negatives")
def test_steps_towards_the_next_moment_are_the_plain_steps(name: str) -> None:
    data = generate(TINY, users=60, full=False, device=CPU)
    days = Sequences.leave_one_out(data.items, data.times // DAY * DAY, data.offsets, TINY.items, data.path)
    assert (days.times.diff() == 0).float().mean() > 0.2
    assert_same_steps(TINY.config(name, "model.dropout=0", "train.negatives=8", "model.predicts=next-moment"), days)


def assert_same_steps(config: Config, data: Sequences | None = None) -> None:
    """Three fused steps against three plain ones: losses, norms, parameters and the table's moments."""
    data = generate(TINY, users=40, full=False, device=CPU) if data is None else data
    plain, fused = Parts(config, data), Parts(config, data)
    step = fused.fused()
    total = 0.0
    for number in range(3):  # the last batch of the epoch is not full
        loss, norm = plain.plain_step(number)
        total += float(loss)
        got = step(0, number, number)
        torch.testing.assert_close(got.loss, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.norm, norm, rtol=1e-4, atol=1e-6)
    # Adam divides by the gradient's size: where that is 0 but for rounding, the parameter moves by lr, either way. So
    # does a third of qkv.bias: adding the same to all keys changes no softmax.
    for (parameter, ours), theirs in zip(fused.model.named_parameters(), plain.model.parameters(), strict=True):
        apart = (ours - theirs).abs()
        most = 0.34 if parameter.endswith("qkv.bias") else 0.05
        assert (apart > 1e-4).float().mean() < most and apart.max() <= 0.061, parameter
    assert fused.loss_sum.item() == pytest.approx(total, rel=1e-5)
    ours, theirs = (parts.optimizer.state[parts.model.items.weight] for parts in (fused, plain))
    assert float(ours["step"]) == float(theirs["step"]) == 3
    for moment in ("exp_avg", "exp_avg_sq"):
        assert (ours[moment] - theirs[moment]).norm() <= 1e-3 * theirs[moment].norm()


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("table_state", ["full", "row"])
@pytest.mark.usefixtures("same_negatives")
def test_the_table_follows_a_falling_learning_rate(table_state: str, clip: float) -> None:
    """Six steps of both kinds; after three the learning rate is almost 0, and so is every later step of the table."""
    settings = ("model.dropout=0", "train.negatives=8", f"train.table_state={table_state}")
    config = TINY.config("hstu", *settings, f"train.clip={clip}")
    data = generate(TINY, users=96, full=False, device=CPU)
    plain, fused = Parts(config, data), Parts(config, data)
    step = fused.fused()
    for number in range(6):
        if number == 3:
            before = fused.model.items.weight.detach().clone()
            for group in (*plain.optimizer.param_groups, *fused.optimizer.param_groups):
                group["lr"] = 1e-9
            step.learning_rate_changed()
        loss, _ = plain.plain_step(number)
        torch.testing.assert_close(step(0, number, number).loss, loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fused.model.items.weight.detach(), before, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["hstu-trope", "transformer-trope"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.usefixtures("same_negatives", "small_matrices")
def test_copies_for_products_follow_the_parameters(name: str, clip: float) -> None:
    config = TINY.config(name, "model.dropout=0", "train.negatives=8", f"train.clip={clip}")
    data = generate(TINY, users=40, full=False, device=CPU)
    parts = Parts(config, data)
    step = parts.fused(is_bf16=True)
    first = {parameter: parameter.detach().clone() for parameter in parts.model.parameters()}
    for number in range(2):
        step(0, number, number)
    copies = {parameter: step.matrices._low.get(id(parameter)) for parameter in first}
    copied = {parameter: copy for parameter, copy in copies.items() if copy is not None}
    assert len(copied) == {"hstu-trope": 6, "transformer-trope": 8}[name]
    for parameter, copy in copied.items():
        assert not torch.equal(parameter, first[parameter]) and torch.equal(copy, parameter.bfloat16())


def test_a_batch_takes_one_of_a_few_sizes() -> None:
    config = TINY.config("hstu-trope", "train.negatives=8")
    data = generate(TINY, users=300, full=False, device=CPU)
    parts = Parts(config, data)
    step = parts.fused()
    plans = {step._plan(tokens) for tokens in range(1, TINY.batch * TINY.max_len + 1)}
    assert all(plan.tokens % 16 == 0 for plan in plans)
    assert len({plan.tokens for plan in plans}) <= train_fused.SIZES
    for tokens in (1, 17, 200, TINY.batch * TINY.max_len):
        plan = step._plan(tokens)
        assert tokens <= plan.tokens <= TINY.batch * TINY.max_len
        assert (plan.tokens - tokens) <= plan.spare_rows * TINY.max_len


@pytest.mark.parametrize("settings", [
    ("train.negative_source=batch",), *SHARED,
], ids=str)  # fmt: skip
def test_other_negatives(settings: tuple[str, ...]) -> None:
    config = TINY.config("hstu-trope", "train.negatives=8", *settings)
    data = generate(TINY, users=40, full=False, device=CPU)
    step = Parts(config, data).fused()
    losses = [float(step(0, number, number).loss) for number in range(2)]
    assert all(0 < loss < 30 for loss in losses)


@pytest.mark.parametrize("settings", [SHARED[0], SHARED[-1]], ids=str)
def test_the_tables_kernel_takes_shared_negatives(settings: tuple[str, ...]) -> None:
    """Kernels around the network and plain PyTorch, from the same draw."""
    config = TINY.config("hstu", "model.dropout=0", "train.negatives=8", *settings)
    data = generate(TINY, users=20, full=False, device=CPU)
    one, two = Parts(config, data), Parts(config, data)
    kernels, plain = one.fused(backend="triton"), two.fused(backend="torch")
    for number in range(2):
        ours, theirs = kernels(0, number, number), plain(0, number, number)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.norm, theirs.norm, rtol=1e-4, atol=1e-6)
    moments = (parts.optimizer.state[parts.model.items.weight]["exp_avg"] for parts in (one, two))
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("same_negatives")
@pytest.mark.parametrize(
    ("settings", "is_bf16", "is_own"), [((), False, True), ((), True, True), (SHARED[0], True, False)], ids=str
)
def test_the_table_moves_on_multiprocessors_of_its_own(
    settings: tuple[str, ...], is_bf16: bool, is_own: bool, launched: list[str]
) -> None:
    """As on a Hopper GPU, played by the CPU, and plain PyTorch, from the same draw."""
    shape = dataclasses.replace(TINY, width=128)
    config = shape.config("hstu", "model.dropout=0", "train.negatives=8", *settings)
    data = generate(shape, users=20, full=False, device=CPU)
    one, two = Parts(config, data), Parts(config, data)
    kernels, plain = (parts.fused(is_bf16, backend) for parts, backend in ((one, "triton"), (two, "torch")))
    kernels.multiprocessors = 2
    near = {"rtol": 2e-2, "atol": 2e-3} if is_bf16 else {"rtol": 1e-4, "atol": 1e-6}
    for number in range(2):
        ours, theirs = kernels(0, number, number), plain(0, number, number)
        torch.testing.assert_close(ours.loss, theirs.loss, **near)
        torch.testing.assert_close(ours.norm, theirs.norm, **near)
    assert launched == ["update_others"] * (2 * is_own)
    first, second = (parts.optimizer.state[parts.model.items.weight]["exp_avg"] for parts in (one, two))
    assert (first - second).norm() < (2e-2 if is_bf16 else 1e-4) * second.norm()


def test_a_batch_that_is_not_full_fits_where_a_full_one_does() -> None:
    """At shop-long's shape, where both just fit: padding has a row of its own."""
    shape = find_shape("shop-long")
    config = shape.config("hstu-trope")
    for tokens in (16 * 4096, 16 * 4096 - 1):
        plan = FusedStep._plan(SimpleNamespace(config=config), tokens)  # type: ignore[arg-type]
        rows = plan.rows + plan.spare_rows
        bounds = SequenceBounds.padded(torch.full((rows,), shape.max_len), shape.max_len)
        assert rows == 16 + (tokens % 4096 > 0)
        assert rows * shape.max_len**2 <= attention.CACHE_BYTES
        like = torch.empty(0, dtype=torch.bfloat16)
        assert kept_bytes(shape.heads, like, bounds) <= passing_bytes(attention.CACHE_BYTES, CPU)


@pytest.mark.usefixtures("same_negatives")
def test_kernels_around_the_network_take_the_readouts_gradient() -> None:
    """Against plain PyTorch, with dropout: the gradient of the stream's beginning meets the other before it."""
    config = TINY.config("hstu-trope", "model.dropout=0.2", "train.negatives=8", "rotary.readout=0.5")
    data = generate(TINY, users=20, full=False, device=CPU)
    one, two = Parts(config, data), Parts(config, data)
    kernels, plain = one.fused(backend="triton"), two.fused(backend="torch")
    ours, theirs = kernels(0, 0, 0), plain(0, 0, 0)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.norm, theirs.norm, rtol=1e-4, atol=1e-6)
    moments = (parts.optimizer.state[parts.model.items.weight]["exp_avg"] for parts in (one, two))
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("settings", [(), *SHARED], ids=str)
def test_the_same_seed_gives_the_same_steps_wherever_it_begins(settings: tuple[str, ...]) -> None:
    config = TINY.config("hstu-trope", "train.negatives=8", *settings)
    data = generate(TINY, users=40, full=False, device=CPU)
    one, two = Parts(config, data), Parts(config, data)
    first = one.fused()
    for number in range(3):
        last = first(0, number, number)
    again = two.fused()
    again(0, 0, 0)
    resumed = two.fused()  # begins in the middle of an epoch, as a resumed run does
    resumed.hyper[5] = 1
    resumed(0, 1, 1)
    assert torch.equal(resumed(0, 2, 2).loss, last.loss)
    for ours, theirs in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def losses(config: Config, data: Sequences, device: str, is_bf16: bool, plain: bool) -> Tensor:
    """Of 200 steps from the same start, with the same negatives: by the fused step, or by plain PyTorch."""
    torch.manual_seed(0)
    parts = Parts(config, data.to(device), torch.device(device))
    start = SequentialRecommender(config, data.num_items, data.time_span)
    start.load_state_dict({name: x.cpu() for name, x in Parts(config, data).model.state_dict().items()})
    parts.model.load_state_dict(start.state_dict())
    step = parts.fused(is_bf16)
    found = []
    with prefer("torch") if plain else nullcontext():
        for number in range(200):
            epoch, index = divmod(number, parts.feed.steps)
            found.append(step(epoch, index, number).loss.clone())
    assert plain or device == "cpu" or step._graphs, "the step was never captured"
    return torch.stack(found).cpu()


def off_from_the_reference(what: str, config: Config, data: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """How far 200 losses on a GPU are from plain PyTorch in float32 on a CPU: fused in float32, in bf16, and plain
    PyTorch in bf16."""
    truth = losses(config, data, "cpu", is_bf16=False, plain=True)
    exact, fused, plain = (
        (losses(config, data, "cuda", is_bf16=low, plain=plain) - truth).abs()
        for low, plain in ((False, False), (True, False), (True, True))
    )
    apart = {"fp32": exact, "bf16": fused, "plain_bf16": plain}
    row = {"model": what, "first_loss": f"{truth[0]:.3f}", "last_loss": f"{truth[-1]:.3f}"}
    row |= {f"largest_{of}": f"{x.max():.5f}" for of, x in apart.items()}
    row |= {f"mean_{of}": f"{x.mean():.6f}" for of, x in apart.items()}
    print(row)
    if "TROPE_PARITY" in os.environ:  # a file for docs/speed.md; benchmarks/gpu.sh asks for it
        row |= {"steps": str(len(truth))} | describe()
        with open(os.environ["TROPE_PARITY"], "a", newline="") as file:
            table = csv.DictWriter(file, list(row))
            if not file.tell():
                table.writeheader()
            table.writerow(row)
    return exact, fused, plain


@on_gpu
@pytest.mark.parametrize(("name", "table_state"), [*((name, "full") for name in PRESETS), ("hstu-trope", "row")])
@pytest.mark.usefixtures("same_negatives")
def test_two_hundred_steps_agree_with_the_reference(name: str, table_state: str) -> None:
    """Fused kernels in a CUDA graph against plain PyTorch in float32 on the CPU.

    In float32 they agree closely. In bf16 they are as far apart as plain PyTorch in bf16 is: that is bf16's noise,
    which grows as two trainings drift apart on a toy set that they learn by heart.
    """
    config = TINY.config(name, "model.dropout=0", "train.negatives=8", f"train.table_state={table_state}")
    data = generate(TINY, users=400, full=False, device=CPU)
    exact, fused, plain = off_from_the_reference(
        name if table_state == "full" else f"{name}, {table_state}", config, data
    )
    # Softmax attention does not feel its keys' bias, which Adam moves by rounding alone: those trainings drift apart.
    assert exact.max() < (1e-3 if name.startswith("hstu") else 0.03)
    # In bf16 plain PyTorch, too, is further away with softmax attention (results/parity-h200.csv).
    assert fused[:20].max() < (0.02 if name.startswith("hstu") else 0.04) and fused.mean() < 2 * plain.mean() + 0.005


@on_gpu
@pytest.mark.usefixtures("same_negatives")
def test_two_hundred_steps_with_the_kernels_in_cuda_agree_with_the_reference(noted: list[str]) -> None:
    """Heads of 32 on histories of more than one tile, and a table that moves on multiprocessors of its own."""
    shape = dataclasses.replace(TINY, width=128, heads=4, head_dim=32, max_len=80)
    config = shape.config("hstu-trope", "model.dropout=0", "train.negatives=8")
    data = generate(shape, users=100, full=True, device=CPU)
    assert Parts(config, data.to("cuda"), torch.device("cuda")).fused(True).multiprocessors > 0
    exact, fused, plain = off_from_the_reference("hstu-trope, CUDA C++", config, data)
    assert {"narrow_sheet", "narrow_forward", "narrow_keys", "narrow_queries", "update_others"} == set(noted)
    assert exact.max() < 1e-3
    assert fused[:20].max() < 0.02 and fused.mean() < 2 * plain.mean() + 0.005


@on_gpu
@pytest.mark.parametrize("settings", SHARED, ids=str)
@pytest.mark.usefixtures("same_shared_negatives")
def test_two_hundred_steps_with_shared_negatives_agree_with_the_reference(settings: tuple[str, ...]) -> None:
    config = TINY.config("hstu-trope", "model.dropout=0", "train.negatives=8", *settings)
    data = generate(TINY, users=400, full=False, device=CPU)
    truth = losses(config, data, "cpu", is_bf16=False, plain=True)
    exact = (losses(config, data, "cuda", is_bf16=False, plain=False) - truth).abs()
    fused = (losses(config, data, "cuda", is_bf16=True, plain=False) - truth).abs()
    print(f"{settings}: largest difference: float32 {exact.max():.5f}, bf16 {fused.max():.4f}")
    assert exact.max() < 1e-3 and fused[:20].max() < 0.02


@on_gpu
@pytest.mark.parametrize("settings", [(), ("train.negative_source=batch",), *SHARED], ids=str)
def test_a_captured_step_never_waits_for_the_gpu(settings: tuple[str, ...]) -> None:
    data = generate(TINY, users=400, full=True, device=torch.device("cuda"))
    config = TINY.config("hstu-trope", "train.negatives=8", *settings)
    step = Parts(config, data, torch.device("cuda")).fused(is_bf16=True)
    for number in range(3):
        step(0, number, number)
    assert step._graphs, "the step was never captured"
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(0, 3, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("settings", [
    ("train.table_state=full",), ("train.table_state=row",), ("train.table_state=row", "train.clip=0.5"), *SHARED,
], ids=str)  # fmt: skip
def test_a_gpu_run_resumes_to_the_same_bytes(settings: tuple[str, ...]) -> None:
    """Kernels add in a fixed order and random numbers come from the step, so a GPU run is reproducible as well."""
    data = generate(TINY, users=100, full=False, device=torch.device("cuda"))
    config = TINY.config("hstu-trope", "train.negatives=8", *settings)
    whole, parts = Parts(config, data, torch.device("cuda")), Parts(config, data, torch.device("cuda"))
    step = whole.fused(is_bf16=True)
    for number in range(12):
        step(number // 7, number % 7, number)
    first = parts.fused(is_bf16=True)
    for number in range(5):
        first(number // 7, number % 7, number)
    second = parts.fused(is_bf16=True)
    second.hyper[5] = 5
    for number in range(5, 12):
        second(number // 7, number % 7, number)
    for (name, ours), theirs in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def trained(
    config: Config, data: Sequences, steps: int, device: torch.device, is_bf16: bool, slow: str = ""
) -> list[Tensor]:
    """Every parameter after some steps, and the last loss and norm. slow: the stream that `slowed` slows."""
    parts = Parts(config, data, device)
    step = parts.fused(is_bf16)
    if slow:
        slowed(getattr(step, slow))
    for number in range(steps):
        last = step(number // 7, number % 7, number)
    assert not step.is_captured or step._graphs
    return [*(p.detach().clone() for p in parts.model.parameters()), last.loss.clone(), last.norm.clone()]


@pytest.mark.parametrize("settings", [("train.table_state=full",), ("train.table_state=row",), *SHARED], ids=str)
def test_where_the_table_moves_changes_nothing(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In two parts around the backward pass, as batches of few tokens have it, and in one behind it."""
    data = generate(TINY, users=100, full=False, device=CPU)
    config = TINY.config("hstu-trope", "train.negatives=8", *settings)
    beside = trained(config, data, 5, CPU, is_bf16=False)
    monkeypatch.setattr(train_fused, "BESIDE", 0)
    *behind, loss, norm = trained(config, data, 5, CPU, is_bf16=False)
    assert all(torch.equal(*pair) for pair in zip(beside, [*behind, loss], strict=False))
    torch.testing.assert_close(beside[-1], norm)


class Line:
    """Stands in for a stream: notes who waits."""

    device = CPU

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: Line) -> None:
        assert other is not self
        self.waits.append(self.name)


# The sort of inputs, the draw, the sort of candidates, which waits for both the batch and the draw; the buckets of
# time, which the first block waits for; the ends of the draw and the sorts.
SORT = ["small", "last", "aside", "aside", "soon", "main", "main", "main", "main"]
# The table's other rows, the loss, the network's parameters, and the ends of all.
ROWS = ["aside", "last", "soon", "main", "main", "main"]
OWN = ["own", *ROWS[1:]]


@pytest.mark.parametrize(
    ("clip", "beside", "multiprocessors", "expected"),
    [
        (0, 10**6, 0, SORT + ROWS),
        (0, 10**6, 2, SORT + OWN),
        (1, 10**6, 0, [*SORT, "last", "main"]),
        (0, 0, 2, []),
        (1, 0, 0, []),
        (0, 128, 0, SORT + ROWS),
    ],
    ids=["all", "own multiprocessors", "clipped", "nothing", "nothing, clipped", "small batches"],
)
def test_every_step_waits_for_what_it_began_beside_the_network(
    clip: int, beside: int, multiprocessors: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its size: another stream waits for the first before it begins, and the first for it at the end."""
    waits: list[str] = []
    main = Line("main", waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(train_fused, "BESIDE", beside)
    data = generate(TINY, users=100, full=False, device=CPU)
    step = Parts(TINY.config("hstu-trope", "train.negatives=8", f"train.clip={clip}"), data).fused()
    for name in ("aside", "soon", "small", "own", "last", "late"):
        getattr(step, name).stream = Line(name, waits)
    step.multiprocessors = multiprocessors
    sizes = set()
    for number in range(6):
        step(0, number, number)
        is_beside = step._plan(step.feed.tokens(0, number)).tokens <= beside
        sizes.add(is_beside)
        assert waits == (expected if is_beside else [])
        waits.clear()
    assert len(sizes) == (2 if beside == 128 else 1)


@pytest.mark.parametrize("beside", [0, 10**6])
def test_a_large_table_moves_beside_the_network_in_any_batch(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late gradients are for batches of few tokens all the same: what they read would be much memory."""
    monkeypatch.setattr(train_fused, "BESIDE", beside)
    data = generate(TINY, users=100, full=False, device=CPU)
    step = Parts(TINY.config("hstu-trope", "train.negatives=8"), data).fused()
    for largest, is_open in ((step.table.weight.numel() + 1, beside > 0), (step.table.weight.numel(), True)):
        monkeypatch.setattr(train_fused, "BESIDE_LARGE", largest)
        step(0, 0, 0)
        assert {each.is_open for each in (step.aside, step.soon, step.small, step.own, step.last)} == {is_open}
        assert step.late.is_open == (beside > 0)


def slowed(beside: Aside) -> None:
    """Let every piece of work begin late, by about as long as a small step takes."""
    work = beside.work

    @contextmanager
    def slow_work(*touched: Tensor) -> Iterator[None]:
        with work(*touched):
            torch.cuda._sleep(1_000_000)
            yield

    beside.work = slow_work  # type: ignore[method-assign]


# Models whose step has work beside the network: heads of three widths, of which two have attention's kernel for short
# sequences, and a network without biases.
BESIDE = [("hstu-trope", 2, 64), ("hstu-trope", 1, 128), ("hstu-trope", 2, 16), ("transformer-trope", 2, 64)]


def beside_the_network(name: str, heads: int, head_dim: int) -> tuple[Config, Sequences]:
    """A step with a table that takes as long as the network."""
    size = {"users": 2_000, "items": 200_000, "width": 128, "max_len": 50, "batch": 64}
    shape = dataclasses.replace(TINY, heads=heads, head_dim=head_dim, **size)
    data = generate(shape, users=64 * 8, full=True, device=torch.device("cuda"))
    return shape.config(name, "train.negatives=32"), data


@on_gpu
@pytest.mark.parametrize("slow", ["aside", "small", "soon", "own", "last", "late"])
@pytest.mark.parametrize("model", BESIDE[::3], ids=str)
def test_a_stream_that_is_late_changes_nothing(model: tuple[str, int, int], slow: str) -> None:
    """The same kernels, each stream in turn far behind the others: whoever does not wait for it, or whose memory is
    used again too soon, is wrong every time."""
    config, data = beside_the_network(*model)
    cuda = torch.device("cuda")
    in_time, late = (trained(config, data, 12, cuda, is_bf16=True, slow=each) for each in ("", slow))
    assert all(torch.equal(*pair) for pair in zip(in_time, late, strict=True))


@on_gpu
@pytest.mark.parametrize("model", BESIDE, ids=str)
def test_what_goes_on_beside_the_network_touches_nothing_of_it(
    model: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race would differ from run to run."""
    config, data = beside_the_network(*model)
    cuda = torch.device("cuda")
    first, again = (trained(config, data, 40, cuda, is_bf16=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    monkeypatch.setattr(train_fused, "BESIDE", 0)
    behind = trained(config, data, 40, cuda, is_bf16=True)
    # Another kernel may add in another order, and AdamW makes much of a gradient near 0.
    torch.testing.assert_close(first[-2], behind[-2], rtol=1e-3 if model[0] == "hstu-trope" else 1e-2, atol=0)
    tables = [pair for pair in zip(first, behind, strict=True) if pair[0].dim() > 1]
    assert all(float((a - b).norm()) <= 0.02 * float(b.norm()) for a, b in tables)
