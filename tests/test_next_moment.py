"""`model.predicts=next-moment`: what shares a time predicts the user's next later time, and looks from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data_logs import loose, prepared, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from training import tiny

from trope import query_times
from trope.data.next_moments import next_moments
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.kernels.batch import BatchShape, Source, gather_batch
from trope.models.recommender import SequentialRecommender
from trope.train.distributed import Group
from trope.train.loop import train
from trope.train.step import Feed

CPU, START = torch.device("cpu"), 1_500_000_000
# Of each user the events at each moment: [2, 1] is a basket of two, then one of one.
SIZES = st.lists(st.lists(st.integers(1, 4), max_size=5), min_size=1, max_size=5)


def baskets(sizes: list[list[int]], train_share: float = 1.0) -> Sequences:
    """Users with baskets of these sizes, items counted through; the first share of each user's events is training."""
    times = [START + 3_600 * moment for user in sizes for moment, size in enumerate(user) for _ in range(size)]
    lengths = torch.tensor([sum(user) for user in sizes])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    items = torch.arange(1, len(times) + 1, dtype=torch.int32)
    data = Sequences.leave_one_out(items, torch.tensor(times or [START]), offsets, max(1, len(times)), Path("baskets"))
    data.train_end = (lengths * train_share).int()
    return data


def later(times: list[int], t_now: int) -> list[int]:
    """The definition."""
    return [next((other for other in times if other > time), t_now) for time in times]


@given(sizes=SIZES, padding=st.integers(0, 2))
def test_queries_look_from_the_next_later_time(sizes: list[list[int]], padding: int) -> None:
    rows = [[START + 60 * moment for moment, size in enumerate(user) for _ in range(size)] for user in sizes]
    now = [START + 10_000 + i for i in range(len(rows))]
    wanted = [later(row, t) for row, t in zip(rows, now, strict=True)]
    lengths, t_now = torch.tensor([len(row) for row in rows]), torch.tensor(now)
    padded = torch.zeros(len(rows), int(lengths.max()) + padding, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    if padded.shape[1]:
        got = query_times(padded, lengths, t_now, later=True)
        assert [got[i, : len(row)].tolist() for i, row in enumerate(rows)] == wanted
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    flat = torch.tensor([time for row in rows for time in row], dtype=torch.int64)
    if len(flat):
        got = query_times(flat, offsets=offsets, t_now=t_now, later=True)
        assert got.tolist() == [time for row in wanted for time in row]


def test_without_t_now_the_last_moment_looks_from_itself() -> None:
    times = torch.tensor([[START, START, START + 9, START + 9]])
    assert query_times(times, later=True).tolist() == [[START + 9] * 4]


@given(sizes=SIZES, train_share=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_targets_are_of_the_next_training_moment(sizes: list[list[int]], train_share: float) -> None:
    data = baskets(sizes, train_share)
    if not sum(map(sum, sizes)):
        return
    moments = next_moments(data)
    for user in range(data.num_users):
        begin = int(data.offsets[user])
        end = begin + int(data.train_end[user])
        inputs = 0
        for event in range(begin, end):
            times = data.times[event:end]
            following = [event + i for i, time in enumerate(times.tolist()) if time > times[0]]
            wanted = [place for place in following if data.times[place] == data.times[following[0]]]
            inputs += bool(wanted)
            got = list(range(int(moments.first[event]), int(moments.first[event] + moments.size[event])))
            assert got == (wanted or [event])
        assert int(moments.inputs[user]) == inputs


def test_every_line_of_the_next_basket_is_drawn_and_epochs_differ() -> None:
    data = baskets([[2, 3, 1, 4]] * 8)
    feed = Feed(data, tiny("model.predicts=next-moment"), Group(0, 1, CPU))
    drawn = []
    for epoch in range(40):
        feed.order(epoch)
        assert feed.following is not None
        drawn.append(feed.following.clone())
        work = feed(epoch, 0, epoch)
        batch = work.batch
        valid = torch.arange(8) < batch.lengths[:, None]
        t_now = batch.target_times.gather(1, batch.lengths[:, None] - 1)[:, 0]
        looking_from = query_times(batch.times, batch.lengths, t_now, later=True)
        assert torch.equal(looking_from[valid], batch.target_times[valid])
        assert (batch.target_times[valid] > batch.times[valid]).all()
        assert batch.lengths.tolist() == [6] * 8  # all but the last basket
    stacked = torch.stack(drawn)
    assert set(stacked[:, 0].tolist()) == {2, 3, 4} and set(stacked[:, 5].tolist()) == {6, 7, 8, 9}
    assert len({tuple(each.tolist()) for each in drawn}) > 30
    again = Feed(data, tiny("model.predicts=next-moment"), Group(0, 1, CPU))
    again.order(7)
    assert torch.equal(again.following, drawn[7]), "an epoch draws what it draws, whatever was drawn before"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_batches_are_the_stores_own(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="needs the package triton")
    data = baskets([[2, 3, 1, 4], [1, 1], [3, 2], [2, 2, 2]])
    feed = Feed(data, tiny("model.predicts=next-moment"), Group(0, 1, CPU))
    feed.order(0)
    windows = feed.windows
    order = torch.arange(len(windows.starts))
    source = Source(data.items, data.times, windows.starts, windows.ends, order, feed.following)
    expected = data.training_batch(windows, 8, feed.following)
    plan = BatchShape(len(order), 8, int(expected.lengths.sum()), 2)
    got = gather_batch(source, plan, torch.zeros(1, dtype=torch.int64), backend)  # type: ignore[arg-type]
    valid = torch.arange(8) < expected.lengths[:, None]
    assert torch.equal(got.items_T.long(), expected.items[valid])
    assert torch.equal(got.candidates_TC[:, 0].long(), expected.targets[valid])
    assert torch.equal(got.query_times_T, expected.target_times[valid])


def test_padded_and_jagged_encode_alike() -> None:
    torch.manual_seed(0)
    plain = ("model.dropout=0", "model.gate_floor=none")
    model = SequentialRecommender(tiny("model.predicts=next-moment", *plain), 20, (START, START + 9_000))
    model.eval()
    times = torch.tensor([[START, START, START + 60, START + 60], [START, START + 5, START + 5, START + 5]])
    items, lengths, t_now = torch.randint(1, 21, (2, 4)), torch.tensor([4, 3]), torch.tensor([START + 600] * 2)
    with torch.no_grad():
        padded = model.encode(items, times, lengths, t_now)
        flat = torch.arange(4) < lengths[:, None]
        jagged = model.encode_jagged(items[flat], times[flat], torch.tensor([0, 4, 7]), t_now)
        event = SequentialRecommender(tiny(*plain), 20, (START, START + 9_000))
        event.load_state_dict(model.state_dict())
        event.eval()
        other = event.encode(items, times, lengths, t_now)
    torch.testing.assert_close(jagged, padded[flat])
    assert not torch.allclose(other[0, 0], padded[0, 0], atol=1e-5), "in a basket the first line looks from later"


def test_it_learns_what_follows_baskets_whose_lines_are_sorted(tmp_path: Path) -> None:
    """Baskets of three lines by number, all of a kind; the next basket is of the next kind.

    The next line, which the file's order makes easy, is of the same kind: who learns that is wrong about the basket.
    """
    generator = torch.Generator().manual_seed(0)
    rows, kinds = [], 8
    for user in range(150):
        kind, number = (int(torch.randint(*bounds, (1,), generator=generator)) for bounds in ((0, kinds), (4, 8)))
        for basket in range(number):
            lines = torch.randperm(4, generator=generator)[:3].sort().values.tolist()
            rows += [(user + 1, 1 + 4 * ((kind + basket) % kinds) + line, START + 86_400 * basket) for line in lines]
    log = write_parquet(tmp_path / "log.parquet", rows)
    data = prepared(log, tmp_path / "data", loose(protocol=Protocol("next-basket")))
    # What is asked here is what is predicted. The readout would not help: many tests lie after all training days.
    size = (
        "model.width=32", "model.head_dim=16", "model.max_len=24", "model.dropout=0", "model.gate_floor=1",
        "rotary.readout=0",
    )  # fmt: skip
    recipe = ("train.epochs=4", "train.lr=0.005", "train.negatives=16")
    found = {}
    for predicts in ("next-moment", "next-event"):
        config = tiny(*size, *recipe, f"model.predicts={predicts}")
        found[predicts] = train(data, config, tmp_path / predicts, device="cpu", progress=False)["test"]["Recall@10"]
    assert found["next-moment"] > 0.99 and found["next-event"] < 0.95
