"""`Sequences`: a prepared dataset on one device, and the batches of training, evaluation and serving cut from it.

It needs torch and numpy only. Arrays are memory-mapped until `to(device)` copies them. `Sequences` knows where each
user's events and splits begin and end; `trope.data.windows` cuts the histories.

Shapes: B batch, L positions, T jagged tokens, U all users, W windows, S positives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trope.data import folder as files
from trope.data.catalogue import write_catalogue
from trope.data.checks import check_events, check_users, read_protocol
from trope.data.protocols import Protocol
from trope.data.recut import check_refit, own_validation, validation_as_training
from trope.data.run_data import check_run_data, describe_data, folder_of_run, ids_of
from trope.data.shard_files import read_arrays
from trope.data.windows import (
    History,
    Windows,
    check_max_len,
    flatten_ranges,
    last_events,
    masked_items,
    padded_places,
    seen_counts,
)  # fmt: skip

SPLITS = ("valid", "test")


class Batch(NamedTuple):
    """Training inputs, and for each position the event to predict: its item, and its time (the query's time)."""

    items: torch.Tensor  # [B, L] int64, 0 is padding
    times: torch.Tensor  # [B, L] int64 Unix seconds
    lengths: torch.Tensor  # [B]
    targets: torch.Tensor  # [B, L]
    target_times: torch.Tensor  # [B, L]


class EvalBatch(NamedTuple):
    """Histories, the moment to recommend for, and the items the users then chose (the positives).

    Row b owns positives positive_offsets[b] .. positive_offsets[b+1].
    """

    users: torch.Tensor  # [B]
    items: torch.Tensor  # [B, L]
    times: torch.Tensor  # [B, L]
    lengths: torch.Tensor  # [B]
    t_now: torch.Tensor  # [B]
    positives: torch.Tensor  # [S]
    positive_times: torch.Tensor  # [S]
    positive_offsets: torch.Tensor  # [B+1]


class Sequences:
    """Every user's events in order, with the split that the dataset was prepared with."""

    def __init__(self, path: Path, meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.path = path
        self.meta = meta
        self.protocol = Protocol(**meta["protocol"])
        self._tensors = tensors
        self.items, self.times, self.offsets = tensors["items"], tensors["times"], tensors["offsets"]
        self.train_end, self.valid_end, self.test_start, self.test_end = tensors["splits"]

    @classmethod
    def load(cls, path: str | Path, verify: bool = True) -> Sequences:
        """Open a folder made by `trope prepare`. Shards are all read; `trope.data.stream` reads some.

        verify: compare every array with its SHA-256, and look at every event: items, times, order, splits (reads all
            of it twice). Without it only sizes, types, and what is stored by user are checked, which is quick.
        """
        path = Path(path)
        meta = files.read_meta(path)
        protocol = read_protocol(path, meta)
        arrays = read_arrays(path, meta, verify)
        check_users(path, meta, arrays)
        if verify:
            check_events(path, meta, arrays, protocol)
        return cls(path, meta, {name: torch.from_numpy(array) for name, array in arrays.items()})

    @classmethod
    def of_run(cls, run: Path, path: Path | None = None) -> Sequences:
        """Open the dataset that a run was trained on; another one is refused, since dense ids differ by dataset.

        path: where the dataset is now, if it has moved since.
        """
        path = folder_of_run(run, path)
        found = cls.load(path)
        check_run_data(run, path, found.meta)
        return found

    @classmethod
    def leave_one_out(
        cls, items: torch.Tensor, times: torch.Tensor, offsets: torch.Tensor, num_items: int, name: Path
    ) -> Sequences:
        """Events that are in memory already, split `loo-strict`. For benchmarks and tests: nothing is checked.

        items: int32, 1 .. num_items. times: int64 Unix seconds, rising within a user. offsets: [U+1].
        """
        ends = offsets.diff().to(torch.int32)
        splits = torch.stack((ends - 2, ends - 1, ends - 1, ends))
        meta = {
            "protocol": {"name": "loo-strict"}, "counts": {"items": num_items}, "checksum": f"in memory: {name}",
            "time_span": {"train": [int(times.min()), int(times.max())]},
        }  # fmt: skip
        return cls(name, meta, {"items": items, "times": times, "offsets": offsets, "splits": splits})

    def describe(self) -> dict[str, Any]:
        """What identifies the dataset, and its path. A run records it in data.json."""
        return describe_data(self)

    def write_catalogue(self, folder: Path) -> None:
        """Copy the items' original ids and names into `folder`, so that a run can be served without the dataset.

        How often each was chosen in training is written beside them.
        """
        write_catalogue(self.path, self.meta, folder, self.training_counts().cpu().numpy())

    def to(self, device: torch.device | str) -> Sequences:
        """The same data with every array on `device`."""
        return Sequences(self.path, self.meta, {name: tensor.to(device) for name, tensor in self._tensors.items()})

    def with_splits(self, splits: torch.Tensor, **meta: Any) -> Sequences:
        """The same events with other splits, [4, U] as in `splits.npy`, and other entries of meta.json."""
        return Sequences(self.path, {**self.meta, **meta}, {**self._tensors, "splits": splits})

    @property
    def validates_on_test(self) -> bool:
        """Whether validation events are test events (protocol loo-paper)."""
        return bool((self.valid_end > self.test_start).any())

    def with_own_validation(self) -> Sequences:
        """The same data, where they validate on the test, with each user's last training event as validation instead.

        What is fitted on validation would otherwise be fitted on the test.
        """
        return self.with_splits(own_validation(self._tensors["splits"]))

    def with_validation(self) -> Sequences:
        """The same data with validation events moved into training; the validation split is then empty."""
        check_refit(self.path, self.protocol, self.validates_on_test)
        span = self.span_of(self.valid_end) or self.time_span
        splits = validation_as_training(self._tensors["splits"])
        return self.with_splits(splits, time_span={**self.meta["time_span"], "train": list(span)})

    def span_of(self, ends_U: torch.Tensor) -> tuple[int, int] | None:
        """First and last time of each user's first `ends_U` events; None where nobody has one."""
        is_there = ends_U > 0
        if not bool(is_there.any()):
            return None
        begins, ends = self.offsets[:-1][is_there], (self.offsets[:-1] + ends_U)[is_there]
        return int(self.times[begins].min()), int(self.times[ends - 1].max())

    @property
    def device(self) -> torch.device:
        """Where batches are cut."""
        return self.items.device

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_items(self) -> int:
        """Items in the catalogue; their dense ids are 1 .. num_items."""
        return int(self.meta["counts"]["items"])

    @property
    def num_events(self) -> int:
        return len(self.items)

    @property
    def time_span(self) -> tuple[int, int]:
        """First and last time of the training events, Unix seconds."""
        first, last = self.meta["time_span"]["train"]
        return int(first), int(last)

    @property
    def baskets(self) -> torch.Tensor | None:
        """Basket number of each event, where the source has baskets."""
        return self._tensors.get("baskets")

    def training_counts(self) -> torch.Tensor:
        """How often each item was chosen in training, int64 [V]."""
        counts = torch.zeros(self.num_items + 1, dtype=torch.int64, device=self.device)
        for places in self.training_places():
            counts += torch.bincount(self.items[places].long(), minlength=self.num_items + 1)
        return counts[1:]

    def training_places(self) -> Iterator[torch.Tensor]:
        """Places in the store of the training events, of some users at a time, since a log may be large."""
        for users in torch.arange(self.num_users, device=self.device).split(1 << 16):
            begins = self.offsets[users]
            yield flatten_ranges(begins, begins + self.train_end[users]).places_T

    def ids(self, name: str) -> files.Ids | None:
        """Original `user_ids`, `item_ids` (position 0 is dense item 1), `item_names` or `basket_ids`, if stored."""
        return ids_of(self, name)

    def train_windows(self, max_len: int, stride: int | None = None, lengths: torch.Tensor | None = None) -> Windows:
        """Windows of up to `max_len` + 1 training events.

        stride: None for one window per user, its last events; a number for all windows, every `stride` events back
        from the last. With `stride=max_len` every training event but a user's first is a target exactly once.
        lengths: [U] how many of each user's events to cut from, instead of all its training events.
        """
        check_max_len(max_len)
        if stride is not None and not 1 <= stride <= max_len:
            raise ValueError(f"stride must be from 1 to max_len {max_len} so that no event is skipped, got {stride}")
        begins, lengths = self.offsets[:-1], self.train_end.long() if lengths is None else lengths
        # A window needs one input and one target.
        counts = (lengths >= 2).long()
        if stride is not None:
            counts *= 1 + (lengths - (max_len + 1)).clamp(min=0).add(stride - 1).div(stride, rounding_mode="floor")
        users = torch.repeat_interleave(counts)
        steps_back = torch.arange(len(users), device=self.device) - (counts.cumsum(0) - counts)[users]
        ends = begins[users] + lengths[users] - steps_back * (stride or 0)
        return Windows(torch.maximum(begins[users], ends - (max_len + 1)), ends)

    def training_batch(self, windows: Windows, max_len: int, following: torch.Tensor | None = None) -> Batch:
        """The padded batch of some windows.

        following: [N] for each event of the store the place of its target; None takes the event after it.
        """
        # L+1 events at once: the inputs are the first L of them, the targets the last L.
        places = padded_places(windows.starts, windows.ends, max_len + 1)
        inputs, targets = places[:, :-1], places[:, 1:] if following is None else following[places[:, :-1]]
        lengths = windows.ends - windows.starts - 1
        return Batch(
            masked_items(self.items, inputs, lengths),
            self.times[inputs],
            lengths,
            masked_items(self.items, targets, lengths),
            self.times[targets],
        )

    def train_batches(
        self,
        max_len: int,
        batch_size: int,
        stride: int | None = None,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """One epoch of padded batches.

        generator: a CPU generator that shuffles the windows, the same way on every device; None keeps their order.
        """
        windows = self.train_windows(max_len, stride)
        total = len(windows.starts)
        order = torch.arange(total) if generator is None else torch.randperm(total, generator=generator)
        order = order.to(self.device)
        for first in range(0, total - batch_size + 1 if drop_last else total, batch_size):
            yield self.training_batch(windows.take(order[first : first + batch_size]), max_len)

    def first_events(self, counts_U: torch.Tensor) -> torch.Tensor:
        """Places in the store of each user's first `counts_U` events; `train_end` gives the training events."""
        return flatten_ranges(self.offsets[:-1], self.offsets[:-1] + counts_U).places_T

    def count_before(self, users: torch.Tensor, moments: torch.Tensor | int) -> torch.Tensor:
        """How many events each user has strictly before a moment, int64 [B].

        users: [B]. moments: Unix seconds, one for all or [B].
        """
        low, high = self.offsets[users], self.offsets[users + 1]
        most = int((high - low).max()) if len(users) else 0
        # One bisection for all users: each step halves what is left of every user's range.
        for _ in range(most.bit_length()):
            middle = (low + high) // 2
            is_before = (low < high) & (self.times[middle.clamp(max=self.num_events - 1)] < moments)
            low, high = torch.where(is_before, middle + 1, low), torch.where(is_before, high, middle)
        return low - self.offsets[users]

    def histories(self, users: torch.Tensor, counts: torch.Tensor, max_len: int) -> History:
        """The last `max_len` of each user's first `counts` events, right-padded; `counts` are at least 1."""
        begins = self.offsets[users]
        return last_events(self.items, self.times, begins, begins + counts, max_len)

    def whole_histories(
        self, users: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All of each user's first `counts` events, without padding: items [T], times [T] and offsets [B+1]."""
        begins = self.offsets[users]
        places, _, offsets = flatten_ranges(begins, begins + counts)
        return self.items[places].long(), self.times[places], offsets

    def split_range(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `valid` or `test` begins and ends among each user's events, [U] each; the history lies before it."""
        if split not in SPLITS:
            raise ValueError(f"split must be 'valid' or 'test', got {split!r}")
        return (self.train_end, self.valid_end) if split == "valid" else (self.test_start, self.test_end)

    def can_evaluate(self, split: str) -> bool:
        """Whether `valid` or `test` has a user."""
        return len(self.eval_users(split)) > 0

    def eval_users(self, split: str) -> torch.Tensor:
        """The users of `valid` or `test`: those with a positive in it and at least one event before it."""
        start, end = self.split_range(split)
        return torch.nonzero((start > 0) & (end > start)).flatten()

    def eval_batch(self, split: str, users: torch.Tensor, max_len: int) -> EvalBatch:
        """Histories of the last `max_len` events before the split, and the positives in it.

        t_now is the time of the first positive; for `holdout` the start of the window, the same for everyone.
        """
        begins = self.offsets[users]
        start, end = (begins + bound[users] for bound in self.split_range(split))
        history = last_events(self.items, self.times, begins, start, max_len)
        fixed = self.protocol.t_now(split)
        t_now = self.times[start] if fixed is None else torch.full_like(start, fixed)
        positives, _, offsets = flatten_ranges(start, end)
        return EvalBatch(users, *history, t_now, self.items[positives].long(), self.times[positives], offsets)

    def seen(
        self, split: str, users: torch.Tensor, max_len: int, filter_seen: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Items to leave out of the users' rankings, as (items [T], offsets [B+1]).

        filter_seen: `none`; `window` for the last `max_len` events; `history` for all events before the split.
        """
        lengths = self.split_range(split)[0][users].long()
        ends = self.offsets[users] + lengths
        places, _, offsets = flatten_ranges(ends - seen_counts(lengths, max_len, filter_seen), ends)
        return self.items[places].long(), offsets
