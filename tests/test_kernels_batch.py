"""Batches cut as flat tokens: the kernel against the reference, and both against the store's own batches."""

from __future__ import annotations

import pytest
import torch

from trope.kernels.batch import BatchShape, Source, gather_batch

pytest.importorskip("triton", reason="needs the package triton")


def make_source(lengths: list[int]) -> Source:
    """Windows of some lengths (events), one behind the other, in a shuffled order."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor(lengths).cumsum(0)
    total = int(ends[-1])
    items = torch.randint(1, 100, (total,), generator=generator, dtype=torch.int32)
    times = 1_500_000_000 + torch.randint(0, 1000, (total,), generator=generator).cumsum(0)
    return Source(items, times, ends - torch.tensor(lengths), ends, torch.randperm(len(lengths), generator=generator))


@pytest.mark.parametrize("lengths", [[2, 6, 3, 5, 2, 4, 6], [6] * 4, [2]])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_batch_of_an_epoch(backend: str, lengths: list[int]) -> None:
    source, rows, max_len = make_source(lengths), 3, 5
    cursor = torch.zeros(1, dtype=torch.int64)
    for first in range(0, len(lengths), rows):
        chosen = source.order_W[first : first + rows].tolist()
        real = sum(lengths[w] - 1 for w in chosen)
        plan = BatchShape(rows, max_len, real + 7, 4, spare_rows=2)
        got = gather_batch(source, plan, cursor, backend=backend)  # type: ignore[arg-type]
        assert cursor.item() == first + rows
        assert got.weight.item() == pytest.approx(1 / real)
        place = 0
        for row, w in enumerate(chosen):
            length = lengths[w] - 1
            assert got.bounds.starts_B[row] == place and got.bounds.lengths_B[row] == length
            here, event = slice(place, place + length), slice(int(source.starts_W[w]), int(source.ends_W[w]) - 1)
            following = slice(event.start + 1, event.stop + 1)
            assert torch.equal(got.items_T[here], source.items[event])
            assert torch.equal(got.times_T[here], source.times[event])
            assert torch.equal(got.query_times_T[here], source.times[following])
            assert torch.equal(got.candidates_TC[here, 0], source.items[following])
            assert got.index_T[here].tolist() == list(range(length))
            place += length
        is_real = got.items_T != 0
        assert is_real.sum() == real and (got.candidates_TC[~is_real, 0] == 0).all()
        # Every token belongs to some row, and padding to rows of its own.
        assert got.bounds.lengths_B.sum() == plan.tokens and (got.bounds.lengths_B <= max_len).all()
        assert (got.times_T[~is_real] == 0).all()


def test_the_kernel_is_the_reference() -> None:
    source = make_source([4, 2, 6, 5])
    plan = BatchShape(3, 5, 15, 2, spare_rows=3)
    one, two = (
        [gather_batch(source, plan, cursor, backend=backend) for _ in range(2)]  # type: ignore[arg-type]
        for backend, cursor in (
            ("torch", torch.zeros(1, dtype=torch.int64)),
            ("triton", torch.zeros(1, dtype=torch.int64)),
        )
    )
    for expected, got in zip(one, two, strict=True):
        for name in ("items_T", "times_T", "query_times_T", "index_T", "weight"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert torch.equal(got.candidates_TC[:, 0], expected.candidates_TC[:, 0])
        real = expected.bounds.lengths_B > 0
        assert torch.equal(got.bounds.lengths_B, expected.bounds.lengths_B)
        assert torch.equal(got.bounds.starts_B[real], expected.bounds.starts_B[real])
