"""The fused HSTU attention against the reference: values and all gradients, padded and jagged, odd shapes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trope.kernels import attention
from trope.kernels.attention import Gaps, hstu_attention, time_gaps
from trope.kernels.sequence_bounds import SequenceBounds

pytest.importorskip("triton.language", reason="needs the package triton")
from trope.kernels.attention import arguments as attention_arguments
from trope.kernels.attention import bias_gradient as attention_bias_gradient
from trope.kernels.attention import kept as attention_kept
from trope.kernels.attention import op as attention_op
from trope.kernels.attention import runs as attention_runs
from trope.kernels.attention import short as attention_short

FIRST = 1_600_000_000


def spans_of(kind: str, lengths: list[int], max_len: int) -> tuple[SequenceBounds, int]:
    """Sequences padded, jagged, or jagged with tokens of nobody behind them; and the number of tokens."""
    lengths_B = torch.tensor(lengths)
    if kind == "padded":
        return SequenceBounds.padded(lengths_B, max_len), len(lengths) * max_len
    offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0))
    bounds = SequenceBounds.jagged(offsets, max_len)
    if kind == "jagged":
        return bounds, int(offsets[-1])
    return bounds._replace(is_complete=False), int(offsets[-1]) + 5


def inside(bounds: SequenceBounds, tokens: int) -> Tensor:
    """Which tokens belong to a sequence."""
    is_inside = torch.zeros(tokens, dtype=torch.bool)
    for start, length in zip(bounds.starts_B.tolist(), bounds.lengths_B.tolist(), strict=True):
        is_inside[start : start + length] = True
    return is_inside


def make_times(bounds: SequenceBounds, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rising times with gaps from a second to a year, equal times among them; the query looks from the next."""
    gaps = (torch.rand(tokens, generator=generator) * math.log(3e7)).exp().long() * (
        torch.rand(tokens, generator=generator) > 0.2
    )
    times = FIRST + gaps.cumsum(0)
    return times, times.roll(-1).where(torch.arange(tokens) < tokens - 1, times)


def run(
    backend: str, dtype: torch.dtype, bounds: SequenceBounds, inputs: list[Tensor], times: tuple[Tensor, Tensor],
    has_position: bool, has_time: bool, weight: Tensor, last: int = 128,
) -> list[Tensor]:  # fmt: skip
    """y and the gradients of q, k, v and the weights."""
    q, k, v, position, time = (x.clone().requires_grad_() for x in inputs)
    # q, k and v as attention gets them: views into one joint tensor.
    joint = torch.stack([q, k, v], dim=1).to(dtype)
    views = joint.unbind(1)
    gaps: Gaps | None = None
    if has_time:
        gaps = time_gaps(*times, bounds, last, like=joint, backend=backend)  # type: ignore[arg-type]
    weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    y = hstu_attention(
        *views, bounds, 7, position.to(weights_dtype) if has_position else None,
        time.to(weights_dtype) if has_time else None, gaps, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    (y.double() * weight).sum().backward()
    learned = [q, k, v, *([position] if has_position else []), *([time] if has_time else [])]
    gradients = [x.grad for x in learned]
    assert all(g is not None for g in gradients)
    return [y.detach().double() * (weight != 0), *gradients]  # type: ignore[list-item]


CASES = [
    ("padded", [5, 1, 7], 7, 1, 16, True, True),
    ("jagged", [33, 1, 0, 18], 40, 2, 16, True, True),
    ("loose", [17, 35], 35, 1, 30, True, True),
    ("jagged", [20, 40], 40, 3, 16, False, True),
    ("jagged", [34], 50, 1, 32, True, False),
    ("padded", [40, 0], 40, 1, 16, False, False),
    ("jagged", [33, 20], 40, 8, 32, True, True),  # programs of several heads, in two groups
    ("jagged", [33, 20], 40, 2, 80, True, True),  # heads that keep the gradient of their scores
    ("padded", [33, 20], 40, 2, 80, False, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 64], ids=["several tiles", "one tile"])
@pytest.mark.parametrize(
    ("kind", "lengths", "max_len", "heads", "dim", "position", "time", "cached"),
    [(*case, cached) for case in CASES for cached in (True, False) if case[-1] or cached],  # no bias, nothing to cache
)
def test_values_and_gradients(
    dtype: torch.dtype, block: int, kind: str, lengths: list[int], max_len: int, heads: int, dim: int, position: bool,
    time: bool, cached: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention_arguments, "BLOCK", block)
    monkeypatch.setattr(attention_bias_gradient, "STRIP_BYTES", 1 << (28 if cached else 12))  # in one slice, in many
    monkeypatch.setattr(attention, "CACHE_BYTES", 1 << 28 if cached else 0)
    monkeypatch.setattr(attention_short, "NARROWEST", 16 if cached else 64)  # the interpreter has no narrow head wrong
    generator = torch.Generator().manual_seed(len(lengths) + dim)
    bounds, tokens = spans_of(kind, lengths, max_len)
    is_inside = inside(bounds, tokens)
    random = [torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64) for _ in range(4)]
    # What the kernels get is what the reference gets: rounded once, before either.
    q, k, v, weight = (x.to(dtype).double() * 0.7 for x in random)
    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    w_position = torch.randn(2 * 50 - 1, generator=generator, dtype=torch.float64).float().double()
    w_time = torch.randn(129, generator=generator, dtype=torch.float64).float().double()
    weight = weight * is_inside[:, None, None]
    times = make_times(bounds, tokens, generator)
    arguments = (bounds, [q, k, v, w_position, w_time], times, position, time, weight)
    exact = run("torch", torch.float64, *arguments)
    ours = run("triton", dtype, *arguments)
    theirs = run("torch", dtype, *arguments)
    names = ["y", "dq", "dk", "dv"] + ["d position"] * position + ["d time"] * time
    for name, truth, our, their in zip(names, exact, ours, theirs, strict=True):
        size = truth.abs().max().item() or 1.0
        reference_error = (their - truth).abs().max().item()
        tolerance = 3 * reference_error + (2e-6 if dtype == torch.float32 else 4e-3) * size
        assert (our - truth).abs().max().item() <= tolerance, name


def test_a_bias_that_is_not_kept_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_arguments, "BLOCK", 16)
    bounds, tokens = spans_of("jagged", [33, 20], 40)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tokens, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    weights = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (79, 129)]
    times = make_times(bounds, tokens, generator)
    found, written = [], []
    with_sheet = attention_op.with_sheet
    monkeypatch.setattr(attention_op, "with_sheet", lambda *given: written.append(1) or with_sheet(*given))
    for budget in (1 << 28, 2 * 48 * 48 * 4 - 1):  # of all sheets' bytes, one too few
        monkeypatch.setattr(attention, "CACHE_BYTES", budget)
        found.append(
            run("triton", torch.float32, bounds, [*inputs, *weights], times, True, True, torch.ones(tokens, 2, 16))
        )
    assert len(written) == 1 + 2
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_bounds_that_were_expanded_or_strided() -> None:
    """One history asked at many moments is expanded: all rows share one length in memory."""
    generator = torch.Generator().manual_seed(0)
    for bounds, same in (
        (SequenceBounds.padded(torch.tensor([3]).expand(4), 5), SequenceBounds.padded(torch.tensor([3, 3, 3, 3]), 5)),
        (SequenceBounds.jagged(torch.tensor([[0, 7], [5, 7], [20, 7]])[:, 0], 15),
         SequenceBounds.jagged(torch.tensor([0, 5, 20]), 15)),
    ):  # fmt: skip
        q, k, v = (torch.randn(20, 1, 16, generator=generator) for _ in range(3))
        got, want = (hstu_attention(q, k, v, each, 4, backend="triton") for each in (bounds, same))
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("cached", [True, False])
def test_times_that_are_a_column_of_events(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items and times side by side, [T, 2]: the times lie two numbers apart."""
    monkeypatch.setattr(attention, "CACHE_BYTES", 1 << 28 if cached else 0)
    generator = torch.Generator().manual_seed(0)
    bounds, tokens = spans_of("jagged", [9, 5], 9)
    q, k, v, weight = (torch.randn(tokens, 1, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [q, k, v, *(torch.randn(size, generator=generator, dtype=torch.float64) for size in (17, 129))]
    times = make_times(bounds, tokens, generator)
    columns = [torch.stack((torch.zeros_like(each), each), dim=1)[:, 1] for each in times]
    found = (
        run("triton", torch.float32, bounds, inputs, each, True, True, weight)  # type: ignore[arg-type]
        for each in (tuple(columns), times)
    )
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("shared", "dtype", "learns", "most"),
    [
        (232_448, torch.float32, True, 512),  # Hopper
        (166_912, torch.float32, True, 256),  # A100: 168 KiB for a gradient of heads of 128 numbers in float32
        (166_912, torch.float32, False, 512),
        (101_376, torch.bfloat16, True, 256),  # RTX 30 and 40, L4
        (101_376, torch.float32, False, 256),
        (101_376, torch.float32, True, 0),  # 128 KiB for the narrowest heads, two to a program
    ],
)
def test_the_widest_head_follows_the_shared_memory(shared: int, dtype: torch.dtype, learns: bool, most: int) -> None:
    assert attention.widest_head(shared, dtype, learns) == most


@pytest.mark.parametrize(
    ("dim", "dtype", "fits"),
    [(128, torch.float32, True), (130, torch.float32, False), (256, torch.bfloat16, True), (257, torch.float16, False)],
)
def test_heads_that_do_not_fit_the_shared_memory_take_the_reference(
    dim: int, dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "resolve_backend", lambda backend, x: "torch" if backend == "torch" else "triton")
    ran = []
    monkeypatch.setattr(attention_op.FusedAttention, "apply", lambda q, *_: ran.append("triton") or q)
    bounds, tokens = spans_of("padded", [7, 3], 7)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, dim, generator=generator).to(dtype) for _ in range(3))
    weights, times = torch.randn(129, generator=generator), make_times(bounds, tokens, generator)
    gaps = time_gaps(*times, bounds, 128, like=q)
    got = hstu_attention(q, k, v, bounds, 7, None, weights, gaps)
    assert ran == ["triton"] * fits
    if not fits:
        by_torch = time_gaps(*times, bounds, 128, like=q, backend="torch")
        assert torch.equal(got, hstu_attention(q, k, v, bounds, 7, None, weights, by_torch, backend="torch"))


def test_tokens_of_no_sequence_are_zero() -> None:
    x = torch.ones(6, 1, 16)
    bounds = SequenceBounds(torch.tensor([1]), torch.tensor([3]), 4)
    for backend in ("torch", "triton"):
        y = hstu_attention(x, x, x, bounds, 4, backend=backend)  # type: ignore[arg-type]
        assert (y[[0, 4, 5]] == 0).all() and (y[1:4] != 0).all()


def test_times_out_of_order_are_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_arguments, "BLOCK", 16)
    generator = torch.Generator().manual_seed(3)
    bounds, tokens = spans_of("jagged", [30], 30)
    inputs = [torch.randn(tokens, 1, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    inputs += [torch.randn(59, generator=generator, dtype=torch.float64) for _ in range(2)]
    times = torch.randint(FIRST, FIRST + 10**8, (2, tokens), generator=generator).unbind()
    weight = torch.randn(tokens, 1, 16, generator=generator, dtype=torch.float64)
    arguments = (bounds, inputs, times, True, True, weight, 58)
    for truth, ours in zip(
        run("torch", torch.float64, *arguments), run("triton", torch.float32, *arguments), strict=True
    ):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("runs", [4, 16, 64])
def test_sums_by_runs_are_sums_by_bucket(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to the time weights' gradient, on gaps so short that a tile has most of its buckets in reach."""
    monkeypatch.setattr(attention_arguments, "BLOCK", 16)
    monkeypatch.setattr(attention_runs, "RUNS", runs)
    generator = torch.Generator().manual_seed(5)
    bounds, tokens = spans_of("jagged", [40, 7], 40)
    inputs = [torch.randn(tokens, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    inputs += [torch.randn(79, generator=generator, dtype=torch.float64) for _ in range(2)]
    times = FIRST + torch.randint(0, 5, (tokens,), generator=generator).cumsum(0)
    weight = torch.randn(tokens, 2, 16, generator=generator, dtype=torch.float64)
    arguments = (bounds, inputs, (times, times + 2), True, True, weight, 78)
    *_, truth = run("torch", torch.float64, *arguments)
    *_, ours = run("triton", torch.float32, *arguments)
    assert 6 < (truth != 0).sum() <= 16
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strip_bytes", [1 << 28, 3 * 32 * 160 * 4], ids=["one slice", "slices within sequences"])
@pytest.mark.parametrize(
    ("kind", "lengths", "heads", "dim", "position", "time"),
    [
        ("jagged", [130, 0, 1, 97], 3, 30, True, True),
        ("padded", [31, 150], 1, 16, False, True),
        ("loose", [65, 64], 2, 16, True, False),
    ],
)
def test_dq_comes_with_the_sum_over_heads(
    strip_bytes: int, kind: str, lengths: list[int], heads: int, dim: int, position: bool, time: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In float32, where the kernel is not used otherwise, so that only its order of sums differs from the reference."""
    monkeypatch.setattr(attention_arguments, "BLOCK", 32)
    monkeypatch.setattr(attention_bias_gradient, "STRIP_BYTES", strip_bytes)
    monkeypatch.setitem(attention_kept.LAUNCH, "BLOCK_N", 16)
    monkeypatch.setattr(attention_kept, "is_joint", lambda *_: True)
    for unused in ("query_from_kept", "_query_from_kept_kernel"):
        monkeypatch.delattr(attention_kept, unused)
    generator = torch.Generator().manual_seed(dim)
    bounds, tokens = spans_of(kind, lengths, 150)
    q, k, v, weight = (torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64) for _ in range(4))
    weights = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (299, 129)]
    weight = weight * inside(bounds, tokens)[:, None, None]
    arguments = (bounds, [q, k, v, *weights], make_times(bounds, tokens, generator), position, time, weight)
    for truth, ours in zip(
        run("torch", torch.float64, *arguments), run("triton", torch.float32, *arguments), strict=True
    ):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5 * max(1.0, float(truth.abs().max())))


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "tiles", "shared", "fits"),
    [
        (8, 32, torch.bfloat16, 8, attention.HOPPER, True),
        (3, 80, torch.bfloat16, 2, attention.HOPPER, False),  # 3 x 128 numbers
        (16, 16, torch.bfloat16, 2, attention.HOPPER, False),
        (8, 32, torch.float32, 8, attention.HOPPER, False),
        (8, 32, torch.bfloat16, 1, attention.HOPPER, False),
        (8, 32, torch.bfloat16, 8, attention.AMPERE, False),
    ],
)
def test_which_heads_have_dq_with_their_sum(
    heads: int, dim: int, dtype: torch.dtype, tiles: int, shared: int, fits: bool
) -> None:
    assert attention_kept.is_joint(torch.zeros(1, heads, dim, dtype=dtype), tiles, shared) == fits


@pytest.mark.parametrize("few", [0, 2, 4, 64])
@pytest.mark.parametrize("times", ["far", "out of order", "past the runs"])
def test_tiles_of_few_buckets(times: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time weights' gradient does not depend on how many buckets are summed one at a time."""
    monkeypatch.setattr(attention_arguments, "BLOCK", 16)
    monkeypatch.setattr(attention_runs, "FEW", few)
    monkeypatch.setattr(attention_runs, "RUNS", 32 if times == "past the runs" else 64)
    monkeypatch.setattr(attention_bias_gradient, "STRIP_BYTES", 4 * 16 * 80 * 4)  # slices that begin within a sequence
    generator = torch.Generator().manual_seed(few)
    bounds, tokens = spans_of("jagged", [70, 0, 21], 70)
    inputs = [torch.randn(tokens, 1, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    inputs += [torch.randn(size, generator=generator, dtype=torch.float64) for size in (139, 73)]
    steps = torch.randint(40_000, 90_000, (tokens,), generator=generator)
    if times == "out of order":
        steps = steps * torch.randint(0, 2, (tokens,), generator=generator).mul(4).sub(1)
    seconds = FIRST + steps.cumsum(0)
    weight = torch.randn(tokens, 1, 16, generator=generator, dtype=torch.float64)
    arguments = (bounds, inputs, (seconds, seconds + 9), True, True, weight, 72)
    *_, truth = run("torch", torch.float64, *arguments)
    *_, ours = run("triton", torch.float32, *arguments)
    assert (truth != 0).sum() > 8
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


def test_budgets_grow_with_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total_memory=64 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert attention_arguments.at_least(1 << 28, 128, cpu) == 1 << 28
    assert attention_arguments.at_least(1 << 28, 128, gpu) == 1 << 29
    assert attention_arguments.at_least(1 << 28, 512, gpu) == 1 << 28
    assert attention_arguments.at_least(0, 128, gpu) == 0


def test_the_reference_is_the_formula() -> None:
    """Written out for one query: y_i = 1/n sum_j silu(q_i k_j + w[j - i] + w[bucket]) v_j."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    position, time = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (7, 129))
    times = torch.tensor([0, 10, 1000, 86_400]) + FIRST
    looking_from = torch.tensor([10, 1000, 86_400, 90_000]) + FIRST
    bounds = SequenceBounds.padded(torch.tensor([4]), 4)
    gaps = time_gaps(times, looking_from, bounds, 128, like=q)
    y = hstu_attention(q, k, v, bounds, 5, position, time, gaps)
    for i in range(4):
        expected = torch.zeros(2, dtype=torch.float64)
        for j in range(i + 1):
            bucket = int(math.log(max(abs(int(looking_from[i] - times[j])), 1)) / 0.301)
            score = q[i, 0] @ k[j, 0] + position[3 + j - i] + time[bucket]
            expected += score * torch.sigmoid(score) * v[j, 0] / 5
        torch.testing.assert_close(y[i, 0], expected)


def test_more_sequences_than_a_launch_takes_are_refused() -> None:
    bounds, x = SequenceBounds.padded(torch.ones(65_536, dtype=torch.int64), 1), torch.zeros(65_536, 1, 16)
    with pytest.raises(ValueError, match="at most 65,535 histories at a time, got 65,536"):
        hstu_attention(x, x, x, bounds, 1, backend="triton")
    with pytest.raises(ValueError, match="at most 65,535 histories at a time, got 65,536"):
        time_gaps(torch.zeros(65_536), torch.zeros(65_536), bounds, 128, like=x, backend="triton")


def test_weights_without_gaps_are_refused() -> None:
    x = torch.zeros(4, 1, 2)
    with pytest.raises(ValueError, match="both its weights and the gaps"):
        hstu_attention(x, x, x, SequenceBounds.padded(torch.tensor([4]), 4), 4, None, torch.zeros(129))
