"""The store: batches against a plain Python loop, and a folder that is damaged in every way."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data_logs import Event, events, loose, prepared, random_log, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.data.folder import checksum_of
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences

QUICK = settings(max_examples=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    return prepared(write_parquet(path / "log.parquet", random_log()), path / "out").path


@pytest.fixture
def data(folder: Path) -> Sequences:
    return Sequences.load(folder)


def training_events(data: Sequences, user: int) -> list[tuple[int, int]]:
    first, count = int(data.offsets[user]), int(data.train_end[user])
    span = slice(first, first + count)
    return list(zip(data.items[span].tolist(), data.times[span].tolist(), strict=True))


def naive_windows(data: Sequences, max_len: int, stride: int | None) -> list[list[tuple[int, int]]]:
    windows = []
    for user in range(data.num_users):
        own, end = training_events(data, user), int(data.train_end[user])
        while end >= 2:
            windows.append(own[max(0, end - max_len - 1) : end])
            if stride is None or end <= max_len + 1:
                break
            end -= stride
    return windows


@QUICK
@given(rows=events(min_size=30), max_len=st.integers(1, 8), stride=st.one_of(st.none(), st.integers(1, 8)))
def test_windows_equal_a_plain_loop(rows: list[Event], max_len: int, stride: int | None) -> None:
    if stride is not None:
        stride = min(stride, max_len)
    with tempfile.TemporaryDirectory() as path:
        log = write_parquet(Path(path) / "log.parquet", [*rows, *[(1, n, rows[0][2]) for n in (1, 2, 3)]])
        data = prepared(log, Path(path) / "out")
        expected = naive_windows(data, max_len, stride)
        windows = data.train_windows(max_len, stride)
        batch = data.training_batch(windows, max_len)
        assert batch.lengths.tolist() == [len(window) - 1 for window in expected]
        for row, window in enumerate(expected):
            size = len(window) - 1
            assert (
                list(zip(batch.items[row, :size].tolist(), batch.times[row, :size].tolist(), strict=True))
                == window[:-1]
            )
            targets = zip(batch.targets[row, :size].tolist(), batch.target_times[row, :size].tolist(), strict=True)
            assert list(targets) == window[1:]
            assert not batch.items[row, size:].any()
            assert not batch.targets[row, size:].any()
            assert (batch.times[row, size:] == window[-1][1]).all()


def test_full_stride_makes_every_event_a_target_once(data: Sequences) -> None:
    batch = data.training_batch(data.train_windows(4, stride=4), 4)
    real = torch.arange(4) < batch.lengths[:, None]
    expected = [event for user in range(data.num_users) for event in training_events(data, user)[1:]]
    found = zip(batch.targets[real].tolist(), batch.target_times[real].tolist(), strict=True)
    assert sorted(found) == sorted(expected)


def test_an_epoch_holds_every_window_once_in_a_seeded_order(data: Sequences) -> None:
    def epoch(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [row for batch in data.train_batches(5, 7, generator=generator) for row in batch.items.tolist()]

    assert epoch(1) == epoch(1) != epoch(2)
    assert sorted(epoch(1)) == sorted(data.training_batch(data.train_windows(5), 5).items.tolist())
    assert all(len(batch.items) == 7 for batch in data.train_batches(5, 7, drop_last=True))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_sees_the_history_and_asks_for_what_follows(data: Sequences, split: str) -> None:
    back = {"valid": 2, "test": 1}[split]
    rows = 0
    for batch in (data.eval_batch(split, users, 6) for users in data.eval_users(split).split(8)):
        for row, user in enumerate(batch.users.tolist()):
            target = int(data.offsets[user + 1]) - back
            history = data.items[max(int(data.offsets[user]), target - 6) : target].tolist()
            assert batch.items[row, : int(batch.lengths[row])].tolist() == history
            assert not batch.items[row, len(history) :].any()
            positives = batch.positives[batch.positive_offsets[row] : batch.positive_offsets[row + 1]]
            assert positives.tolist() == [data.items[target]]
            assert batch.t_now[row] == data.times[target]
            rows += 1
    assert rows == data.meta["counts"][f"{split}_users"] == len(data.eval_users(split))


def test_seen_items_by_filter(data: Sequences) -> None:
    users = data.eval_users("test")[:3]
    for name, size in (("none", 0), ("window", 4), ("history", 10**6)):
        items, offsets = data.seen("test", users, 4, name)
        for row, user in enumerate(users.tolist()):
            start, end = int(data.offsets[user]), int(data.offsets[user + 1]) - 1
            assert items[offsets[row] : offsets[row + 1]].tolist() == data.items[max(start, end - size) : end].tolist()
    with pytest.raises(ValueError, match="filter_seen must be one of"):
        data.seen("test", users, 4, "all")


@QUICK
@given(rows=events(min_size=30), max_len=st.integers(1, 8), back=st.integers(0, 3))
def test_histories_before_a_moment_equal_a_plain_loop(rows: list[Event], max_len: int, back: int) -> None:
    """One moment for all and one for each user, at the very second of an event or beside it."""
    with tempfile.TemporaryDirectory() as path:
        log = write_parquet(Path(path) / "log.parquet", [*rows, *[(1, n, rows[0][2]) for n in (1, 2, 3)]])
        data = prepared(log, Path(path) / "out")
        users = torch.arange(data.num_users).flip(0)
        own = [slice(*data.offsets[user : user + 2].tolist()) for user in users]
        moments = torch.stack([data.times[span][-min(back, len(data.times[span]))] for span in own]) + back % 2
        for moment in (moments, int(moments[0]), 0, 2**40):
            counts = data.count_before(users, moment)
            limits = torch.as_tensor(moment).expand(len(users))
            known = [
                [pair for pair in zip(data.items[span].tolist(), data.times[span].tolist(), strict=True) if pair[1] < t]
                for span, t in zip(own, limits.tolist(), strict=True)
            ]
            assert counts.tolist() == [len(pairs) for pairs in known]
            items, times, offsets = data.whole_histories(users, counts)
            assert list(zip(items.tolist(), times.tolist(), strict=True)) == [pair for pairs in known for pair in pairs]
            assert offsets.diff().tolist() == counts.tolist()
            some = counts > 0
            history = data.histories(users[some], counts[some], max_len)
            for row, pairs in enumerate(pairs[-max_len:] for pairs in known if pairs):
                padding = max_len - len(pairs)
                assert history.items_BL[row].tolist() == [item for item, _ in pairs] + [0] * padding
                assert history.times_BL[row].tolist() == [time for _, time in pairs] + [pairs[-1][1]] * padding
                assert history.lengths_B[row] == len(pairs)


def test_nobody_has_no_events(data: Sequences) -> None:
    assert data.count_before(torch.tensor([], dtype=torch.int64), 5).tolist() == []


def test_holdout_and_baskets_have_sets_of_positives(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", random_log(600, spread=100))
    for protocol in (Protocol("holdout", window=10), Protocol("next-basket")):
        data = prepared(log, tmp_path / protocol.name, loose(protocol=protocol))
        batch = data.eval_batch("test", data.eval_users("test"), 50)
        sizes = batch.positive_offsets.diff()
        assert int(sizes.min()) >= 1
        assert int(sizes.max()) > 1
        assert len(batch.positives) == len(batch.positive_times) == int(sizes.sum())


def test_moving_to_a_device_keeps_the_batches(data: Sequences) -> None:
    moved = data.to("cpu")
    assert torch.equal(next(iter(moved.train_batches(5, 9))).items, next(iter(data.train_batches(5, 9))).items)
    assert moved.num_items == data.num_items
    assert moved.time_span == data.time_span


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_the_gpu_are_the_same(data: Sequences) -> None:
    for ours, theirs in zip(data.train_batches(5, 9), data.to("cuda").train_batches(5, 9), strict=True):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("max_len", "stride"), [(0, None), (4, 0), (4, 5)])
def test_impossible_windows_are_refused(data: Sequences, max_len: int, stride: int | None) -> None:
    with pytest.raises(ValueError, match="max_len"):
        data.train_windows(max_len, stride)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_flipped_bit_is_found(copy: Path) -> None:
    path = copy / "items.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="does not match its checksum"):
        Sequences.load(copy)


def test_a_truncated_array_is_found_even_unverified(copy: Path) -> None:
    path = copy / "times.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="truncated or from another dataset"):
        Sequences.load(copy, verify=False)


def test_a_missing_array_is_found(copy: Path) -> None:
    (copy / "splits.npy").unlink()
    with pytest.raises(FileNotFoundError, match="is missing although"):
        Sequences.load(copy)


@pytest.mark.parametrize("change", [{"protocol": {"name": "loo-paper"}}, {"counts": {"items": 3}}])
def test_an_edited_meta_is_found(copy: Path, change: dict) -> None:
    meta = json.loads((copy / "meta.json").read_text()) | change
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="does not match its own checksum"):
        Sequences.load(copy)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "damaged"), ("[]", "a list instead"), ('{"format": 9}', "format 9")]
)
def test_a_foreign_meta_is_refused(copy: Path, text: str, message: str) -> None:
    (copy / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Sequences.load(copy)


def test_a_folder_without_meta_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a prepared dataset"):
        Sequences.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not there; a prepared dataset is made by `trope prepare`"):
        Sequences.load(tmp_path / "nowhere")


def test_pickled_arrays_are_never_loaded(copy: Path) -> None:
    bomb = np.array([{"a": 1}], dtype=object)
    np.save(copy / "items.npy", bomb, allow_pickle=True)
    meta = json.loads((copy / "meta.json").read_text())
    meta["arrays"]["items"]["bytes"] = (copy / "items.npy").stat().st_size
    meta["checksum"] = checksum_of(meta)
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="bject"):
        Sequences.load(copy, verify=False)


def test_the_store_needs_no_data_engine(folder: Path) -> None:
    code = (
        "import sys\n"
        "engine = ('ibis', 'duckdb', 'pyarrow', 'pyspark', 'pandas', 'rich', 'typer', 'tqdm')\n"
        "sys.modules.update(dict.fromkeys(engine))\n"
        f"from trope.data.sequences import Sequences; print(Sequences.load({str(folder)!r}).num_users)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == Sequences.load(folder).num_users
