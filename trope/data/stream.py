"""`Stream`: a sharded dataset that stays on disk. A few shards at a time are in memory, within a number of bytes.

`Stream.read` gives some shards as `Sequences`, which cuts histories and windows as ever. Who reads shards in which
order is decided elsewhere: `trope.train.streamed` shuffles them, `Stream.over_blocks` goes through them in order.
At most two blocks are in memory: one in use, and the next one, which a thread reads meanwhile.

Arrays are read into memory and not mapped: mapped pages would be read at random while a step waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from trope.data import folder as files
from trope.data.ahead import Ahead
from trope.data.by_time import EventRuns
from trope.data.catalogue import write_catalogue
from trope.data.checks import check_shard, check_shard_users, read_protocol
from trope.data.in_time import InTime
from trope.data.protocols import Protocol
from trope.data.recut import all_as_training, check_refit, own_validation, validation_as_training
from trope.data.run_data import check_run_data, describe_data, folder_of_run, ids_of
from trope.data.sequences import SPLITS, Sequences
from trope.data.shard_files import SameFiles, one_line_if_unreadable, read_shards, shard_sizes

# What a block takes in memory: items and times of an event; offsets and splits of a user, and what is computed of them.
EVENT_BYTES = 12
USER_BYTES = 192
_OF_USERS = frozenset(("offsets", "splits"))
_NAMES = ("items", "times", "offsets", "splits")
T = TypeVar("T")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Loaded(NamedTuple):
    """Arrays of some shards, one shard behind the other, as they were on disk. events: of these shards."""

    arrays: dict[str, np.ndarray]
    events: int


class Block(NamedTuple):
    """Some shards in memory.

    data: their users and events. roomy: the same with unused room behind the events, on the same memory.
    """

    data: Sequences
    roomy: Sequences


class Stream:
    """A sharded dataset, read within `memory` bytes.

    verify: compare each shard with its SHA-256, and look at its events, when its events are read for the first time.
    """

    def __init__(
        self, path: Path, meta: dict[str, Any], memory: int, device: torch.device | str = "cpu", verify: bool = True
    ) -> None:
        self.path, self.meta, self.memory = path, meta, memory
        self.protocol = Protocol(**meta["protocol"])
        self.device = torch.device(device)
        self.sizes = shard_sizes(path, meta)
        self.most_shards = len(self.sizes)  # of a block, however much memory there is
        self.validates_on_test = self.protocol.name == "loo-paper"
        self._cuts: tuple[Callable[[Tensor], Tensor], ...] = ()  # what is done to the splits of each block
        self._trains_on_validation = self._trains_on_all = False
        self._span: tuple[int, int] | None = None
        self._unseen = set(range(len(self.sizes))) if verify else set()
        self._same = SameFiles()
        self._runs: list[EventRuns] = []  # one, once it was asked for; shared by copies
        self._verify = verify

    @classmethod
    def open(cls, path: str | Path, memory: int | None, verify: bool = True) -> Stream:
        """Open a folder made by `trope prepare --shard-users`. memory: None for what two of its shards take."""
        path = Path(path)
        meta = files.read_meta(path)
        read_protocol(path, meta)
        if not files.is_sharded(meta):
            raise ValueError(f"{path} has no shards, so it is loaded as a whole; prepare it with --shard-users")
        stream = cls(path, meta, memory or 0, verify=verify)
        if memory is None:
            stream.memory = 2 * max(EVENT_BYTES * size.events + USER_BYTES * size.users for size in stream.sizes)
        stream.window()  # refuse now what cannot be read later
        return stream

    @classmethod
    def of_run(cls, run: Path, memory: int | None, path: Path | None = None) -> Stream:
        """Open the dataset that a run was trained on; another one is refused. path: where it is, if it has moved."""
        path = folder_of_run(run, path)
        found = cls.open(path, memory)
        check_run_data(run, path, found.meta)
        return found

    def to(self, device: torch.device | str) -> Stream:
        """The same stream with its blocks used on `device`."""
        moved = copy(self)
        moved.device = torch.device(device)
        return moved

    def with_own_validation(self) -> Stream:
        """As `Sequences.with_own_validation`."""
        other = copy(self)
        other._cuts, other.validates_on_test = (*self._cuts, own_validation), False
        return other

    def with_validation(self) -> Stream:
        """As `Sequences.with_validation`. The time span takes a pass over all events when it is first asked for."""
        check_refit(self.path, self.protocol, self.validates_on_test)
        other = copy(self)
        other._cuts, other._trains_on_validation = (*self._cuts, validation_as_training), True
        return other

    def all_training(self) -> Stream:
        """As `trope.data.views.all_training`. The time span takes a pass over all events when it is first asked for."""
        other = copy(self)
        other._trains_on_all, other._span = True, None
        return other

    def in_blocks_of(self, shards: int) -> Stream:
        """The same stream, whose blocks have no more shards than this."""
        other = copy(self)
        other.most_shards = shards
        return other

    def describe(self) -> dict[str, Any]:
        """As `Sequences.describe`."""
        return describe_data(self)

    def ids(self, name: str) -> files.Ids | None:
        """As `Sequences.ids`; all of them are in memory."""
        return ids_of(self, name)

    def write_catalogue(self, folder: Path) -> None:
        """Write the items' ids, names and counts in training, as `Sequences.write_catalogue`; one pass over all.

        A run that begins calls it. So it also looks at the events by time, which are read when training has ended;
        not where nothing is left to test.
        """
        counts = self.training_counts().cpu().numpy()
        if not self._trains_on_all:
            self.in_time("test").runs.check()
        write_catalogue(self.path, self.meta, folder, counts)

    def training_counts(self) -> Tensor:
        """As `Sequences.training_counts`; one pass over all events."""
        counts = torch.zeros(self.num_items, dtype=torch.int64, device=self.device)
        for found in self.over_blocks(lambda user, block: block.training_counts()):
            counts += found
        return counts

    @property
    def num_users(self) -> int:
        return int(self.meta["counts"]["users"])

    @property
    def num_items(self) -> int:
        """Items in the catalogue; their dense ids are 1 .. num_items."""
        return int(self.meta["counts"]["items"])

    @property
    def num_events(self) -> int:
        return int(self.meta["counts"]["events"])

    @property
    def time_span(self) -> tuple[int, int]:
        """First and last time of the training events, Unix seconds."""
        if not (self._trains_on_validation or self._trains_on_all):
            first, last = self.meta["time_span"]["train"]
            return int(first), int(last)
        if self._span is None:
            found = [span for span in self.over_blocks(lambda user, block: block.span_of(block.train_end)) if span]
            self._span = min(first for first, _ in found), max(last for _, last in found)
        return self._span

    def can_evaluate(self, split: str) -> bool:
        """Whether `valid` or `test` has a user."""
        if split not in SPLITS:
            raise ValueError(f"split must be 'valid' or 'test', got {split!r}")
        if self._trains_on_all:
            return False
        if self._cuts:
            shards = range(len(self.sizes))
            return any(self.read([shard], ("offsets", "splits")).data.can_evaluate(split) for shard in shards)
        return int(self.meta["counts"][f"{split}_users"]) > 0

    def window(self, event_bytes: int = EVENT_BYTES, spare: int = 0) -> int:
        """How many shards a block may have so that two of any blocks fit in memory, at least 1.

        event_bytes: of an event in memory. spare: room for so many events more in each block.
        """
        free = self.memory // 2 - spare * event_bytes
        largest = sorted((event_bytes * size.events + USER_BYTES * size.users for size in self.sizes), reverse=True)
        fitting = sum(needed <= free for needed in accumulate(largest))
        if not fitting:
            least = 2 * (largest[0] + spare * event_bytes)
            raise ValueError(
                f"{self.path} needs at least {say_bytes(least)} for two of its shards, --memory allows "
                f"{say_bytes(self.memory)}; allow more, or prepare it with fewer --shard-users"
            )
        return min(fitting, self.most_shards)

    def in_time(self, split: str) -> InTime:
        """The events of the histories of `valid`, which are the training events, or of `test`, in the order of time."""
        assert not self._trains_on_all, "events of the test are on disk by user only"
        if not self._runs:
            self._runs.append(EventRuns(self.path, self.meta, self._verify))
        # Where validation is the test, training holds all before it.
        with_validation = split == "test" or self._trains_on_validation or self.validates_on_test
        return InTime(self._runs[0], with_validation, self.device)

    def read(self, shards: Sequence[int], names: Collection[str] = _NAMES, spare: int = 0) -> Block:
        """Some shards, one behind the other, on the host; who uses a block moves it to `device`.

        names: which arrays; those left out are empty. spare: room for so many events more.
        """
        return self.block(self.load(shards, names, spare))

    def load(self, shards: Sequence[int], names: Collection[str] = _NAMES, spare: int = 0) -> Loaded:
        """The part of `read` for a thread that reads ahead: numpy alone, see `trope.data.ahead`."""
        for number in shards:
            self.check(number, names)
        arrays = read_shards(self.path, self.meta, shards, names, spare, verify=False)
        return Loaded(arrays, sum(self.sizes[number].events for number in shards))

    def block(self, loaded: Loaded) -> Block:
        """The other part of `read`: the shards that were loaded, as users and events."""
        tensors = {name: torch.from_numpy(array) for name, array in loaded.arrays.items()}
        for cut in self._cuts:
            tensors["splits"] = cut(tensors["splits"])
        if self._trains_on_all:
            tensors["splits"] = all_as_training(tensors["offsets"])
        for name in {"items", "times"} - tensors.keys():
            tensors[name] = torch.empty(0, dtype=torch.int64)
        roomy = Sequences(self.path, self.meta, tensors)
        exact = {name: tensors[name][: loaded.events] for name in ("items", "times")}
        return Block(Sequences(self.path, self.meta, {**tensors, **exact}), roomy)

    def over_blocks(self, work: Callable[[int, Sequences], T]) -> Iterator[T]:
        """What `work` makes of all users in order, a block at a time; it also gets the number of the first user.

        A function and not a loop over blocks, whose variable would keep a third block in memory.
        """
        window = self.window()
        groups = [range(low, min(low + window, len(self.sizes))) for low in range(0, len(self.sizes), window)]
        user = 0

        def read(number: int) -> Loaded:
            return self.load(groups[number])

        def finish(number: int, loaded: Loaded) -> Sequences:
            return self.block(loaded).data

        with Ahead(read, finish, self.device) as ahead:
            for number in range(len(groups)):
                block = ahead.take(number).to(self.device)
                if number + 1 < len(groups):
                    ahead.start(number + 1)
                result, users = work(user, block), block.num_users
                del block
                yield result
                user += users

    def check(self, number: int, names: Collection[str] = _NAMES) -> None:
        """Refuse a damaged shard the first time that its events are read, and later one that was replaced since.

        names: what will be read. Without events among them, only offsets and splits are looked at: all shards are
        asked how many windows they have before the first step.
        """
        folder, meta = files.shard_folder(self.path, number), {"arrays": self.meta["shards"][number]}
        every = [name for name in files.ARRAYS if name in meta["arrays"]]
        has_events = not _OF_USERS.issuperset(names)
        with one_line_if_unreadable(folder):
            self._same.check(folder, every)
            if number not in self._unseen:
                return
            arrays = {name: files.read_array(folder, name, meta) for name in every if has_events or name in _OF_USERS}
        if has_events:
            check_shard(folder, self.num_items, arrays, self.protocol)
            self._unseen.discard(number)
        else:
            check_shard_users(folder, arrays, self.sizes[number].events)


def open_dataset(path: Path) -> Sequences | Stream:
    """A dataset for who needs some users at a time: a sharded one stays on disk."""
    return Stream.open(path, None) if files.is_sharded(files.read_meta(path)) else Sequences.load(path)


def data_of_run(run: Path, path: Path | None = None) -> Sequences | Stream:
    """The same of the dataset that a run was trained on; another one is refused."""
    found = open_dataset(folder_of_run(run, path))
    check_run_data(run, found.path, found.meta)
    return found


def parse_bytes(text: str, flag: str) -> int:
    """A number of bytes such as 500MB, 2GB or 8GiB; K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    count = 0.0 if found is None else float(found[1]) * _UNITS[found[2].upper()]
    if not 1 <= count < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{flag} must be a number of bytes such as 500MB or 8GB, got {shown!r}")
    return int(count)


def say_bytes(count: int) -> str:
    """`1.5 GiB`, rounded up: whoever allows as much as is said allows enough."""
    power = min((count.bit_length() - 1) // 10, 3)
    unit = 1 << 10 * power
    parts = 10 ** max(4 - len(str(count // unit)), 0)  # four digits
    return f"{-(-count * parts // unit) / parts:.10g} {('', 'Ki', 'Mi', 'Gi')[power]}B"
