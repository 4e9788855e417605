"""Bad input: a ValueError that says what is wrong, what was found and what to do."""

import math
import warnings

import pytest
import torch

from trope import IndexRoPE, TORoPE, TRoPE, frequency_bank, query_times

TIMES = torch.tensor([[1_500_000_000, 1_500_000_100, 1_500_000_200]])
Q = torch.randn(1, 3, 2, 8)


def rope(**options: object) -> TRoPE:
    return TRoPE(8, **options)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (TIMES.float(), r"int64 Unix seconds .* got torch.float32; keep times as integers"),
        (TIMES.to(torch.bfloat16), r"got torch.bfloat16"),
        (TIMES.tolist(), r"must be a tensor of Unix seconds, got list"),
        (
            TIMES * 1_000,
            r"got 1500000200000, which looks like milliseconds \(2017-07-14\); integer-divide by 1,000 \(//\)",
        ),
        (TIMES * 1_000_000, r"looks like microseconds"),
        (TIMES * 1_000_000_000, r"looks like nanoseconds"),
        (TIMES * 5, r"must lie before 2101, got 7500001000"),
        (TIMES.double() * 1e291, r"must lie before 2101, got 1\.5000002e\+300; check the unit"),
        (TIMES * 0 + (2**63 - 1), r"must lie before 2101, got 9223372036854775807; check the unit"),
        (TIMES * 0, r"positive Unix seconds, got 0; zero or negative usually means a missing timestamp"),
        (-TIMES, r"positive Unix seconds, got -1500000200"),
        (torch.where(TIMES.max() == TIMES, math.nan, TIMES.double()), r"must be finite, got nan; drop such events"),
        (torch.where(TIMES.max() == TIMES, math.inf, TIMES.double()), r"must be finite, got inf"),
        (TIMES[:, :1], r"one entry per event, shape \(1, 3\), got \(1, 1\)"),
        (None, r"needs the events' times, got None"),
    ],
)
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE])
def test_times(encoding: type, times: object, message: str) -> None:
    if isinstance(times, list):
        with pytest.raises(ValueError, match=message):
            query_times(times)
        return
    with pytest.raises(ValueError, match=message):
        encoding(8)(Q, Q, times)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (Q[0], Q[0], r"q must be \[B, L, H, D\] .* got shape \(3, 2, 8\)"),
        (Q[..., :6], Q[..., :6], r"q has head dim 6, but this module was made with head_dim=8"),
        (Q, Q[:, :2], r"must agree in batch, positions, dtype and device \(heads may differ\)"),
        (Q, Q.bfloat16(), r"got .* torch.float32 .* torch.bfloat16"),
        (Q.long(), Q.long(), r"q must be bfloat16, float16, float32 or float64, got torch.int64"),
    ],
)
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
def test_queries_and_keys(encoding: type, q: torch.Tensor, k: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoding(8)(q, k, TIMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": torch.tensor([4])}, r"between 0 and L = 3, got 4 to 4; cut the histories"),
        ({"lengths": torch.tensor([-1])}, r"between 0 and L = 3, got -1"),
        ({"lengths": torch.tensor([1, 2])}, r"lengths must be integers \[1\], got shape \(2,\)"),
        ({"lengths": [2]}, r"lengths must be a tensor of integers, got list; use torch.as_tensor"),
        ({"lengths": torch.tensor([2]).numpy()}, r"lengths must be a tensor of integers, got ndarray"),
        ({"lengths": torch.tensor([2.0])}, r"lengths must be integers \[1\], got .* torch.float32"),
        ({"t_now": torch.tensor([1_500_000_199])}, r"must not lie before the last event, got 1500000199 < 1500000200"),
        ({"t_now": torch.tensor([1_600_000_000_000])}, r"t_now must be Unix seconds, .* milliseconds"),
        ({"t_now": torch.tensor([1.6e9])}, r"t_now must be int64 Unix seconds .* got torch.float32"),
        ({"t_now": torch.tensor([math.nan], dtype=torch.float64)}, r"t_now must be finite"),
        ({"t_now": torch.tensor(1_600_000_000)}, r"one moment per sequence, shape \(1,\), got \(\)"),
        ({"t_now": torch.tensor([1_600_000_000] * 2)}, r"one moment per sequence, shape \(1,\), got \(2,\)"),
    ],
)
def test_ends_of_sequences(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope()(Q, Q, TIMES, **arguments)
    with pytest.raises(ValueError, match=message):
        query_times(TIMES, **arguments)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2], r"end at T = 3, got \[0, 2\]"),
        ([1, 3], r"start at 0"),
        ([0, 3, 2, 3], r"never fall"),
        ([[0, 3]], r"offsets must be integers \[B \+ 1\], got shape \(1, 2\)"),
    ],
)
def test_offsets(offsets: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope()(Q[0], Q[0], TIMES[0], offsets=torch.tensor(offsets))


def test_offsets_are_a_tensor() -> None:
    with pytest.raises(ValueError, match="offsets must be a tensor of integers, got list"):
        rope()(Q[0], Q[0], TIMES[0], offsets=[0, 3])


def test_lengths_and_offsets_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="got both"):
        query_times(TIMES[0], lengths=torch.tensor([3]), offsets=torch.tensor([0, 3]))


def test_padding_may_hold_anything() -> None:
    times = torch.cat((TIMES, torch.tensor([[0, -1, 10**18]])), dim=1)
    assert query_times(times, torch.tensor([3])).tolist()[0][:3] == [1_500_000_100, 1_500_000_200, 1_500_000_200]


def test_looking_back_needs_a_flag() -> None:
    t_now = torch.tensor([1_400_000_000])
    assert query_times(TIMES, t_now=t_now, allow_past=True)[0, -1] == 1_400_000_000
    rope()(Q, Q, TIMES, t_now=t_now, allow_past=True)


def test_t_now_can_be_required() -> None:
    with pytest.raises(ValueError, match=r"t_now is required here .* got None; pass the moment to recommend for"):
        rope(require_t_now=True)(Q, Q, TIMES)
    rope(require_t_now=True)(Q, Q, TIMES, t_now=torch.tensor([1_600_000_000]))


def test_values_can_be_trusted() -> None:
    rope(check_values=False)(Q, Q, TIMES * 0)
    rope(check_values=False)(Q, Q, TIMES.flip(1))


@pytest.mark.parametrize("encoding", [TRoPE, TORoPE])
def test_times_are_in_order(encoding: type) -> None:
    q = torch.randn(2, 3, 2, 8)
    times = torch.cat((TIMES, TIMES[:, [0, 2, 1]]))
    said = r"times must not fall within a sequence, got 1500000100 after 1500000200 at place 2 of row 1; sort .*" + (
        r"check_values=False"
    )
    with pytest.raises(ValueError, match=said):
        encoding(8)(q, q, times)
    with pytest.raises(ValueError, match=said):
        encoding(8, layout="halves").cos_sin(times)
    with pytest.raises(ValueError, match=said):
        query_times(times)
    # Padding may hold anything, and times that are equal are in order.
    encoding(8)(q, q, times, torch.tensor([3, 2]))
    encoding(8)(q, q, TIMES[:, [0, 0, 2]].expand(2, 3))


def test_jagged_times_are_in_order_within_each_sequence() -> None:
    flat = torch.cat((TIMES[0], TIMES[0]))
    query_times(flat, offsets=torch.tensor([0, 3, 3, 6]))
    with pytest.raises(ValueError, match=r"got 1500000000 after 1500000200 at place 3 of row 1; sort"):
        query_times(flat, offsets=torch.tensor([0, 0, 6]))
    with pytest.raises(ValueError, match=r"got 1500000100\.5 after 1500000200\.5 at place 1 of row 1; sort"):
        query_times(flat[[0, 2, 1, 2]].double() + 0.5, offsets=torch.tensor([0, 1, 4]))


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 8)),
        ((2, 4, 5, 8), (2, 1, 5, 8)),  # fewer heads in the key
        ((2, 5, 5, 8), (2, 1, 5, 8)),  # as many heads as positions: the key tells
    ],
)
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE])
def test_heads_before_positions(encoding: type, q: tuple[int, ...], k: tuple[int, ...]) -> None:
    times = 1_500_000_000 + torch.arange(5).expand(2, 5)
    with pytest.raises(ValueError, match=r"\[B, L, H, D\] .* look like \[B, H, L, D\]; pass q\.transpose\(1, 2\)"):
        encoding(8)(torch.randn(q), torch.randn(k), times)
    rotated_q, rotated_k = encoding(8)(torch.randn(q).transpose(1, 2), torch.randn(k).transpose(1, 2), times)
    assert rotated_q.shape[1] == rotated_k.shape[1] == 5


def test_jagged_heads_before_tokens() -> None:
    q = torch.randn(4, 6, 8)
    with pytest.raises(ValueError, match=r"\[T, H, D\] .* look like \[H, T, D\]; pass q\.transpose\(0, 1\)"):
        rope()(q, q, 1_500_000_000 + torch.arange(6), offsets=torch.tensor([0, 2, 6]))


def test_as_many_heads_as_positions_are_told_by_their_strides() -> None:
    """The shapes fit either way. A tensor that was split into heads and transposed gets a warning, no refusal."""
    times = 1_500_000_000 + torch.arange(5)[None]
    q = torch.randn(1, 5, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope()(q, q, times)
    with pytest.warns(UserWarning, match=r"5 positions and 5 heads .* look like \[B, H, L, D\]"):
        rope()(q.transpose(1, 2), q.transpose(1, 2), times)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, r"rotary_dim must be even and between 2 and head_dim = 7, got 7"),
        ({"head_dim": 8, "rotary_dim": 3}, r"must be even .* got 3"),
        ({"head_dim": 8, "rotary_dim": 10}, r"between 2 and head_dim = 8, got 10"),
        ({"head_dim": 8, "layout": "pairs"}, r"layout must be one of 'interleaved', 'halves', got 'pairs'"),
        ({"head_dim": 8, "backend": "cuda"}, r"backend must be one of 'auto', 'torch', 'triton', got 'cuda'"),
        ({"head_dim": 8, "phase": "fp64"}, r"phase must be one of 'exact', 'fp32'"),
        ({"head_dim": 8, "bank": "moon"}, r"bank must be one of"),
        ({"head_dim": 8, "conditioning": "none"}, r"conditioning must be one of"),
        ({"head_dim": 8, "position": "days"}, r"position must be one of"),
        ({"head_dim": 8, "alpha_init": "zeros"}, r"alpha_init must be one of"),
        ({"head_dim": 8, "time_span": (1, 10**12)}, r"is it in milliseconds"),
        ({"head_dim": 8, "time_span": (1, math.inf)}, r"time_span must be two whole Unix seconds, got \(1, inf\)"),
        ({"head_dim": 8, "time_span": (math.nan, 5)}, r"time_span must be two whole Unix seconds, got \(nan, 5\)"),
        ({"head_dim": 8, "time_span": (5, 5)}, r"time_span must be \(first, last\) with first < last"),
        ({"head_dim": 8, "time_span": (1, 5), "conditioning": "paper"}, r"takes no time_span"),
        ({"head_dim": 8, "bank": "calendar", "multiscale": False}, r"needs times, multiscale=True"),
        ({"head_dim": 8, "beta_min": 10.0, "beta_max": 1.0}, r"0 < beta_min <= beta_max"),
    ],
)
def test_construction(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TRoPE(**options)


def test_int32_seconds_are_seconds() -> None:
    module = rope()
    for short, long in zip(module(Q, Q, TIMES.int()), module(Q, Q, TIMES), strict=True):
        assert torch.equal(short, long)


def test_other_constructions() -> None:
    with pytest.raises(ValueError, match="time_share must lie between 0 and 1"):
        TORoPE(8, time_share=1.5)
    with pytest.raises(ValueError, match="at least one plane"):
        frequency_bank(0)


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"backend='triton' needs a CUDA tensor, got one on cpu; use backend='auto'"):
        rope(backend="triton")(Q, Q, TIMES)


def test_triton_computes_in_float32(device: str) -> None:
    q = Q.to(device, torch.float64)
    with pytest.raises(ValueError, match="computes in float32, got a float64 tensor"):
        rope(backend="triton").to(device)(q, q, TIMES.to(device))
