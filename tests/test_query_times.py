"""The shift: every way to hold a batch gives each sequence the rotations it would get alone."""

import pytest
import torch
from conftest import draw_times
from hypothesis import given, settings
from hypothesis import strategies as st

from trope import IndexRoPE, TORoPE, TRoPE, query_times

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def naive(times: list[int], t_now: int | None) -> list[int]:
    """The definition: the next event's time, and for the last event t_now or its own time."""
    return [*times[1:], times[-1] if t_now is None else t_now] if times else []


def histories(lengths: list[int]) -> list[list[int]]:
    rng = torch.Generator().manual_seed(sum(lengths))
    return [draw_times((n,), rng).tolist() for n in lengths]


@given(lengths=LENGTHS, given_now=st.booleans(), padding=st.integers(0, 2))
def test_padded_and_jagged_agree_with_the_definition(lengths: list[int], given_now: bool, padding: int) -> None:
    rows = histories(lengths)
    t_now = torch.tensor([1_700_000_000 + i for i in range(len(rows))]) if given_now else None
    wanted = [naive(row, 1_700_000_000 + i if given_now else None) for i, row in enumerate(rows)]

    padded = torch.zeros(len(rows), max(lengths) + padding, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    got = query_times(padded, torch.tensor(lengths), t_now)
    for i, want in enumerate(wanted):
        assert got[i, : len(want)].tolist() == want
        assert not got[i, len(want) :].any()  # padding stays padding

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    flat = torch.tensor([t for row in rows for t in row], dtype=torch.int64)
    assert query_times(flat, offsets=offsets, t_now=t_now).tolist() == [t for want in wanted for t in want]


@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
@settings(max_examples=30)
@given(lengths=LENGTHS, given_now=st.booleans())
def test_every_batch_form_rotates_like_each_sequence_alone(encoding: type, lengths: list[int], given_now: bool) -> None:
    rope = encoding(4)
    rng = torch.Generator().manual_seed(1)
    rows = histories(lengths)
    qk = [[torch.randn(n, 2, 4, dtype=torch.float64, generator=rng) for n in lengths] for _ in range(2)]
    now = [1_700_000_000 + i for i in range(len(rows))]
    alone = [
        rope(q[None], k[None], torch.tensor([row]), t_now=torch.tensor([now[i]]) if given_now else None)
        for i, (q, k, row) in enumerate(zip(*qk, rows, strict=True))
        if row
    ]
    t_now = torch.tensor(now) if given_now else None

    jagged = rope(
        torch.cat(qk[0]), torch.cat(qk[1]), torch.tensor([t for row in rows for t in row], dtype=torch.int64),
        t_now=t_now, offsets=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip
    for side in range(2):
        assert torch.equal(jagged[side], torch.cat([torch.empty(0, 2, 4), *(a[side][0] for a in alone)]))

    L = max(lengths) + 1
    padded = [torch.stack([torch.cat([x, x.new_full((L - len(x), 2, 4), 7.0)]) for x in side]) for side in qk]
    times = torch.stack([torch.tensor(row + [0] * (L - len(row))) for row in rows])
    rotated = rope(*padded, times, torch.tensor(lengths), t_now)
    full = [i for i, n in enumerate(lengths) if n]
    for side in range(2):
        for i, a in zip(full, alone, strict=True):
            assert torch.equal(rotated[side][i, : lengths[i]], a[side][0])


def test_the_last_query_looks_from_t_now(rng: torch.Generator) -> None:
    """The same history for two moments: only the last query of each row differs."""
    rope = TRoPE(8)
    q, k = (torch.randn(2, 5, 1, 8, generator=rng) for _ in range(2))
    times, lengths = draw_times((2, 5), rng), torch.tensor([3, 5])
    april, december = torch.tensor([1_617_235_200] * 2), torch.tensor([1_638_316_800] * 2)
    (q1, k1), (q2, k2) = rope(q, k, times, lengths, april), rope(q, k, times, lengths, december)
    assert torch.equal(k1, k2)
    changed = (q1 != q2).any(-1).any(-1)
    assert changed.tolist() == [[False, False, True, False, False], [False, False, False, False, True]]


def test_float64_times_keep_their_fraction() -> None:
    times = torch.tensor([[1.5e9 + 0.25, 1.5e9 + 0.75]], dtype=torch.float64)
    assert query_times(times).tolist() == [[1.5e9 + 0.75, 1.5e9 + 0.75]]
    assert query_times(times, t_now=torch.tensor([1_500_000_010])).tolist() == [[1.5e9 + 0.75, 1.5e9 + 10]]
