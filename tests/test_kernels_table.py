"""The item table's fused update: reference against autograd and torch.optim.AdamW, kernel against the reference.

`torch.empty` is filled with NaN here, so an output element that no program wrote fails the comparison. Tolerances come
from the float64 run: a small multiple of what the torch reference in float32 is off.
"""

import pytest
import torch
import torch.nn.functional as F

from trope.kernels.adamw import factors_of
from trope.kernels.softmax import sampled_softmax
from trope.kernels.table import InputEntries, ScoreEntries, invert, table_gradient, unit_vectors, update_table

table_triton = pytest.importorskip("trope.kernels.table.triton", reason="needs the package triton")

HYPER = (1e-2, 0.9, 0.98, 1e-8, 0.1)
SHAPES = [  # T, E, V, C: entries per item from few to many, rows that fill no program
    (1, 64, 3, 2),
    (7, 50, 23, 3),
    (7, 50, 3, 12),
    (9, 128, 61, 3),
    (12, 128, 13, 9),
    (40, 64, 7, 5),
    (3, 512, 10, 6),
    (3, 1024, 4, 3),
]


class Problem:
    """A table, its moments, and a batch's entries, in float64; exactly representable in what the kernel takes."""

    def __init__(self, shape, device, dtype=torch.float32, seed=0, state="full"):
        T, E, V, C = shape
        rng = torch.Generator().manual_seed(seed)
        self.shape, self.device, self.dtype = shape, device, dtype
        self.table = torch.randn(V + 1, E, generator=rng).double()
        self.table[0] = 0
        self.moments = [(torch.rand(V + 1, E, generator=rng) * scale).double() for scale in (0.1, 0.01)]
        if state == "row":
            self.moments[1] = self.moments[1][:, 0].clone()
        # Items above V - V // 4 are in nobody's batch; 0 is padding; item 1 is input and candidate.
        last = V - V // 4
        self.candidates = torch.randint(0, last + 1, (T, C), generator=rng, dtype=torch.int32)
        self.items = torch.randint(0, last + 1, (T,), generator=rng, dtype=torch.int32)
        self.candidates[0, :2] = 1  # twice in one row
        self.items[0] = 1
        self.coefs = torch.randn(T, C, generator=rng).double()
        self.out = F.normalize(torch.randn(T, E, generator=rng), dim=1).to(dtype).double()
        self.grad = torch.randn(T, E, generator=rng).to(dtype).double()

    def entries(self, backend, dtype):
        V = self.shape[2]
        half = self.dtype if dtype == torch.float32 else dtype
        scores = ScoreEntries(
            *invert(self.candidates.to(self.device), V, backend),
            self.coefs.to(self.device, dtype), self.out.to(self.device, half),
        )  # fmt: skip
        items = self.items.to(self.device)
        inputs = InputEntries(items, *invert(items, V, backend), self.grad.to(self.device, half), 1.7)
        return scores, inputs

    def gradient(self, backend, dtype=torch.float32):
        return table_gradient(self.table.to(self.device, dtype), *self.entries(backend, dtype), backend).double().cpu()

    def update(self, backend, dtype=torch.float32, step=3, parts=("all",)):
        """New weights, moments and unit vectors, and the squared norm, in float64; `parts` one after the other."""
        table = torch.nn.Parameter(self.table.to(self.device, dtype).clone())
        moments = [moment.to(self.device, dtype).clone() for moment in self.moments]
        unit = torch.full_like(table.data, 7, dtype=self.dtype if dtype == torch.float32 else dtype)
        hyper = torch.tensor([*HYPER, step], device=self.device)
        scores, inputs = self.entries(backend, dtype)
        norm_sq = torch.zeros(1, device=self.device, dtype=dtype)
        for part in parts:
            known = inputs._replace(grad_TE=None) if part == "others" else inputs
            found = update_table(table, *moments, unit, scores, known, factors_of(hyper, backend), backend, part)
            assert found.ndim == 1
            norm_sq += found.sum()
        return [tensor.detach().double().cpu() for tensor in (table, *moments, unit, norm_sq)]


@pytest.mark.parametrize("state", ["full", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_and_gradient(shape: tuple, dtype: torch.dtype, state: str, device: str) -> None:
    problem = Problem(shape, device, dtype, state=state)
    exact, reference, kernel = (
        [*problem.update(*how), problem.gradient(*how)]
        for how in (("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32))
    )
    names = ("table", "exp_avg", "exp_avg_sq", "unit", "norm_sq", "gradient")
    for name, want, ref, got in zip(names, exact, reference, kernel, strict=True):
        assert got.shape == want.shape
        # The interpreter truncates to bf16, a GPU rounds: up to twice the reference's error in the unit vectors.
        assert (got - want).norm() <= 2.5 * (ref - want).norm() + 1e-6 * want.norm() + 1e-7, name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("state", ["full", "row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_parts_are_the_whole_in_any_order(shape: tuple, state: str, backend: str, device: str) -> None:
    """Each row is in one of the parts, and comes out as in one pass: with the same bits on a CPU, and on a GPU but for
    the last, where each part's kernel is compiled by itself."""
    problem = Problem(shape, device, state=state)
    *want, norm_sq = problem.update(backend)
    for parts in (("others", "inputs"), ("inputs", "others")):
        *got, its_norm_sq = problem.update(backend, parts=parts)
        close = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-7}
        for mine, whole in zip(got, want, strict=True):
            torch.testing.assert_close(mine, whole, **close)
        torch.testing.assert_close(its_norm_sq, norm_sq, rtol=1e-5, atol=0)


def test_many_parts_of_the_squared_norm_are_added_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem((40, 64, 7, 5), device)
    *_, norm_sq = problem.update("triton")
    monkeypatch.setattr(table_triton, "MOST_PARTS", 1)
    torch.testing.assert_close(problem.update("triton")[-1], norm_sq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("part", ["others", "inputs"])
def test_a_part_leaves_the_other_rows_alone(part: str, backend: str, device: str) -> None:
    problem = Problem((7, 50, 23, 3), device)
    inputs = torch.zeros(24, dtype=torch.bool)
    inputs[problem.items.long()] = True
    inputs[0] = False
    mine = inputs if part == "inputs" else ~inputs & (torch.arange(24) > 0)
    assert 0 < mine.sum() < 23
    before = [problem.table, *problem.moments, torch.full_like(problem.table, 7)]
    for new, old in zip(problem.update(backend, parts=(part,)), before, strict=False):
        moved = (new != old.float().double()).any(dim=1)
        assert torch.equal(moved, mine)


def test_a_row_shorter_than_the_length_that_is_divided_by(device: str) -> None:
    problem = Problem((7, 50, 23, 3), device)
    problem.table[1] = (problem.table[1] * 0.7e-6 / problem.table[1].norm()).float()
    want, got = problem.gradient("torch", torch.float64)[1], problem.gradient("triton")[1]
    assert want.norm() > 1e5
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.norm()))


@pytest.mark.parametrize("state", ["full", "row"])
def test_row_0_stays_and_rows_without_entries_decay(state: str, device: str) -> None:
    problem = Problem((7, 50, 23, 3), device, state=state)
    table, exp_avg, exp_avg_sq, unit, _ = problem.update("triton")
    assert not table[0].any() and (unit[0] == 7).all()
    assert torch.equal(exp_avg[0], problem.moments[0][0]) and torch.equal(exp_avg_sq[0], problem.moments[1][0])
    for row in (19, 22):  # no entries
        torch.testing.assert_close(exp_avg[row], 0.9 * problem.moments[0][row], rtol=1e-6, atol=0)
        torch.testing.assert_close(exp_avg_sq[row], 0.98 * problem.moments[1][row], rtol=1e-6, atol=0)
        assert (table[row] != problem.table[row].float().double()).all()
    assert not problem.gradient("triton")[[0, 19, 22]].any()


class ByRow:
    """AdamW with one second moment a row, row by row."""

    def __init__(self, tables, lr, betas, eps, weight_decay):
        (self.table,) = tables
        self.hyper, self.count = (lr, *betas, eps, weight_decay), 0
        self.m, self.v = torch.zeros_like(self.table.data), [0.0] * len(self.table)

    def zero_grad(self):
        self.table.grad = None

    def step(self):
        lr, beta1, beta2, eps, weight_decay = self.hyper
        self.count += 1
        for row, (w, g) in enumerate(zip(self.table.data, self.table.grad, strict=True)):
            self.m[row] = beta1 * self.m[row] + (1 - beta1) * g
            self.v[row] = beta2 * self.v[row] + (1 - beta2) * float(g @ g) / len(g)
            root = (self.v[row] / (1 - beta2**self.count)) ** 0.5
            w -= lr * weight_decay * w + lr * self.m[row] / (1 - beta1**self.count) / (root + eps)


@pytest.mark.parametrize("state", ["full", "row"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(7, 50, 23, 4), (24, 50, 6, 5)], ids=["few", "many"])
def test_three_steps_are_autograd_and_adamw(shape: tuple, backend: str, state: str, device: str) -> None:
    """The softmax, the inversion and the update together against nothing but torch, with one table in two places."""
    T, E, V, C = shape
    dtype = torch.float64 if backend == "torch" else torch.float32
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(V + 1, E, generator=rng).double()
    start[0] = 0
    hyper = torch.tensor([*HYPER, 0.0], device=device)
    lr, beta1, beta2, eps, weight_decay, _ = hyper.tolist()
    want = torch.nn.Parameter(start.clone())
    optimizer = (torch.optim.AdamW if state == "full" else ByRow)([want], lr, (beta1, beta2), eps, weight_decay)
    table = start.to(device, dtype)
    unit = unit_vectors(table, dtype, backend)
    moments = [torch.zeros_like(table), torch.zeros_like(table if state == "full" else table[:, 0])]
    weight = torch.tensor([1 / T], device=device)
    mix = torch.randn(E, E, generator=rng).double() / E**0.5  # stands for the network
    for _ in range(3):
        candidates = torch.randint(1, V, (T, C), generator=rng)
        candidates[1, 0] = 0
        candidates[2, 2] = candidates[2, 0]
        candidates[3, 2] = candidates[3, 1]
        items = torch.randint(0, V, (T,), generator=rng)
        items[0] = candidates[0, 1]

        optimizer.zero_grad()
        out = F.normalize(want[items] * 2.5 @ mix, dim=1, eps=1e-6)
        logits = torch.einsum("te,tce->tc", out, F.normalize(want, dim=1, eps=1e-6)[candidates]) / 0.05
        logits = logits.masked_fill((candidates == candidates[:, :1]) & (torch.arange(C) > 0), -torch.inf)
        is_live = candidates[:, 0] != 0
        losses = F.cross_entropy(logits[is_live], torch.zeros(int(is_live.sum()), dtype=torch.long), reduction="none")
        (losses.sum() / T).backward()
        want.grad[0] = 0  # the padding row's
        norm_sq = want.grad.square().sum()
        optimizer.step()

        net = mix.to(device, dtype)
        x = table[items.to(device)] * 2.5 @ net
        result = sampled_softmax(x, candidates.to(device), unit, weight, 0.05, backend=backend)
        torch.testing.assert_close(result.loss_T.double().cpu()[is_live], losses.detach(), rtol=1e-4, atol=1e-4)
        scores = ScoreEntries(*invert(candidates.to(device), V, backend), result.coefs_TC, result.out_TE)
        inputs = InputEntries(items.to(device), *invert(items.to(device), V, backend), result.grad_x_TE @ net.T, 2.5)
        hyper[5] += 1
        got_norm_sq = update_table(table, *moments, unit, scores, inputs, factors_of(hyper, backend), backend)
        tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 1e-4}
        torch.testing.assert_close(got_norm_sq.double().cpu().sum(), norm_sq, **tolerance)
        torch.testing.assert_close(table.double().cpu(), want.detach(), **tolerance)
        torch.testing.assert_close(unit.double().cpu()[1:], F.normalize(want.detach(), dim=1)[1:], **tolerance)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("num_items", [5, 700, 70_000])
@pytest.mark.parametrize("shape", [(1,), (40,), (31, 5)], ids=str)
def test_invert(shape: tuple, num_items: int, backend: str, device: str, rng: torch.Generator) -> None:
    items = torch.randint(0, num_items + 1, shape, generator=rng, dtype=torch.int32)
    items.view(-1)[0] = num_items
    order, first = (part.cpu() for part in invert(items.to(device), num_items, backend))
    assert first.dtype == torch.int32 and first.shape == (num_items + 2,)
    flat = items.flatten().tolist()
    assert first[0] == 0 and first[-1] == len(flat)
    for item in {0, 1, *flat}:
        owned = order[first[item] : first[item + 1]].tolist()
        assert owned == [entry for entry, other in enumerate(flat) if other == item]
    assert (first.diff() >= 0).all()


def test_invert_takes_int64(device: str) -> None:
    for num_items in (9, 70_000):
        items = torch.tensor([3, 9, 0, 3], device=device)
        for got, want in zip(invert(items, num_items, "triton"), invert(items.int(), num_items, "torch"), strict=True):
            assert torch.equal(got.long(), want.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (10, 50), (5, 512), (3, 2)], ids=str)
def test_unit_vectors(shape: tuple, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    table = torch.randn(shape, generator=rng)
    table[0] = 0
    got = unit_vectors(table.to(device), dtype, "triton").double().cpu()
    torch.testing.assert_close(got, F.normalize(table.double(), dim=1), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_invert_refuses_more_entries_than_its_search_can_add() -> None:
    from trope.kernels.table import triton as table_triton

    with pytest.raises(AssertionError, match="binary search"):
        table_triton.invert(torch.empty(2**30 + 1, dtype=torch.int32, device="meta"), 100)


def test_updates_are_deterministic(device: str) -> None:
    problem = Problem((40, 64, 7, 5), device, torch.bfloat16)
    for first, second in zip(problem.update("triton"), problem.update("triton"), strict=True):
        assert torch.equal(first, second)


def test_both_regimes_are_tested() -> None:
    from trope.kernels.table import triton as table_triton

    tiles = [table_triton._tile(E, T * C / (V + 1)) for T, E, V, C in SHAPES]
    assert {tile["ROWS"] for tile in tiles} >= {1, 2, 4} and {tile["CHUNK"] for tile in tiles} >= {2, 32}
    assert any(V % tile["ROWS"] for (_, _, V, _), tile in zip(SHAPES, tiles, strict=True))
