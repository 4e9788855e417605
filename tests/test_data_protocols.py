"""Splits: no protocol lets training see what it is tested on, and each cuts where it says."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from data_logs import START, Event, events, loose, prepared, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.data.protocols import PROTOCOLS, Protocol, Splits, basket_starts, count_before, pieces, split, tied_share

DAY = 86_400


def log_of(lengths: list[int], gaps: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and rising times of users with these lengths."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    steps = np.resize(gaps, offsets[-1])
    times = [START + np.cumsum(steps[a:b]) for a, b in pairwise(offsets)]
    return offsets, np.concatenate(times)


@settings(max_examples=200)
@given(
    st.sampled_from(PROTOCOLS),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 0, 60, 3_600, DAY]), min_size=1, max_size=20),
)
def test_no_training_event_is_later_than_what_is_predicted(name: str, lengths: list[int], gaps: list[int]) -> None:
    offsets, times = log_of(lengths, gaps)
    protocol = Protocol(name)
    if name == "holdout":
        try:
            protocol = Protocol(name, window=DAY // 2).resolve(int(times.min()), int(times.max()))
        except ValueError:
            return  # the log is too short for a window of validation and one of test
    cuts = split(protocol, offsets, times, None)
    for user, length in enumerate(lengths):
        train_end, valid_end, test_start, test_end = (int(cut[user]) for cut in cuts)
        assert 0 <= train_end <= valid_end <= test_end <= length
        assert train_end <= test_start <= test_end
        own = times[offsets[user] : offsets[user + 1]]
        for first, last in ((train_end, valid_end), (test_start, test_end)):
            if last > first > 0:
                assert own[:train_end].max() <= own[first:last].min()
                assert own[:first].max() <= own[first:last].min()
        if name == "holdout":
            assert protocol.cutoff is not None
            assert (own[:train_end] < protocol.cutoff - DAY // 2).all()
            assert (own[:test_start] < protocol.cutoff).all()
            assert (own[test_start:test_end] >= protocol.cutoff).all()
        if name in ("loo-strict", "next-basket"):
            assert valid_end == test_start


@settings(max_examples=8)
@given(rows=events(min_size=40), cut=st.integers(4, 6))
def test_a_prepared_holdout_trains_on_the_past_only(rows: list[Event], cut: int) -> None:
    rows = [*rows, *[(1, 1, START + n) for n in range(9)]]
    with tempfile.TemporaryDirectory() as folder:
        log = write_parquet(Path(folder) / "log.parquet", rows)
        protocol = Protocol("holdout", cutoff=START + cut, window=2)
        data = prepared(log, Path(folder) / "out", loose(protocol=protocol))
        batch = next(iter(data.train_batches(50, 100)))
        assert int(batch.target_times.max()) < START + cut - 2
        assert data.time_span[1] < START + cut - 2
        for name, first in (("valid", START + cut - 2), ("test", START + cut)):
            users = data.eval_users(name)
            if not len(users):
                continue
            seen = data.eval_batch(name, users, 50)
            assert (seen.t_now == first).all()
            assert int(seen.times.max()) < first
            assert int(seen.positive_times.min()) >= first
            assert int(seen.positive_times.max()) < first + 2


def test_leave_one_out_cuts() -> None:
    offsets, times = log_of([1, 2, 3, 5], [60])
    strict = split(Protocol("loo-strict"), offsets, times, None)
    assert [cut.tolist() for cut in strict] == [[1, 2, 1, 3], [1, 2, 2, 4], [1, 2, 2, 4], [1, 2, 3, 5]]
    paper = split(Protocol("loo-paper"), offsets, times, None)
    assert [cut.tolist() for cut in paper] == [[1, 1, 2, 4], [1, 2, 3, 5], [1, 1, 2, 4], [1, 2, 3, 5]]


def test_next_basket_takes_whole_baskets() -> None:
    offsets = np.array([0, 6, 8])
    baskets = np.array([0, 0, 1, 1, 1, 2, 3, 3])
    cuts = split(Protocol("next-basket"), offsets, np.zeros(8, np.int64), baskets)
    # The second user has one basket only, which leaves nothing to train on: no evaluation.
    assert cuts == Splits(*(pytest.approx(row) for row in ([2, 2], [5, 2], [5, 2], [6, 2])))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=30), st.integers(1, 12))
def test_pieces_cover_every_user_once(lengths: list[int], size: int) -> None:
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ranges = list(pieces(offsets, size))
    assert [first for first, _ in ranges] == [0, *[last for _, last in ranges[:-1]]]
    assert ranges[-1][1] == len(lengths)
    assert all(offsets[last] - offsets[first] <= size or last == first + 1 for first, last in ranges)


def test_piecewise_counts_equal_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, 50).tolist()
    offsets, times = log_of(lengths, random.integers(0, 3, 40).tolist())
    whole = count_before(times, offsets, START + 5), *basket_starts(times, offsets)
    monkeypatch.setattr("trope.data.protocols.pieces", lambda offsets: pieces(offsets, 10))
    for pieced, expected in zip(
        (count_before(times, offsets, START + 5), *basket_starts(times, offsets)), whole, strict=True
    ):
        np.testing.assert_array_equal(pieced, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "loo"}, "unknown protocol 'loo'"),
        ({"name": "loo-strict", "cutoff": 5}, "belongs to protocol 'holdout'"),
        ({"name": "holdout", "window": 0}, "longer than 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Protocol(**settings)


def test_a_cutoff_outside_the_log_is_refused() -> None:
    for cutoff in (START, START + 100 * DAY):
        with pytest.raises(ValueError, match="leaves no training or no test events"):
            Protocol("holdout", cutoff=cutoff).resolve(START, START + 10 * DAY)
    with pytest.raises(
        ValueError, match=r"runs from 2020-09-13 12:26:40 UTC \(1600000000\) to 2020-09-23 12:26:40 UTC"
    ):
        Protocol("holdout", cutoff=1000 * START).resolve(START, START + 10 * DAY)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.lists(st.sampled_from([0, 60]), min_size=1, max_size=20),
    st.integers(1, 12),
)
def test_ties_are_counted_within_users(lengths: list[int], gaps: list[int], size: int) -> None:
    offsets, times = log_of(lengths, gaps)
    own = [times[a:b].tolist() for a, b in pairwise(offsets)]
    tied = sum(user.count(time) > 1 for user in own for time in user)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trope.data.protocols.pieces", lambda offsets: pieces(offsets, size))
        assert tied_share(times, offsets) == tied / len(times)
