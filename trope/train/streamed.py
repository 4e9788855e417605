"""`StreamFeed`: training batches of a dataset that is not in memory as a whole (`trope.data.stream`).

A stream is an order of windows and nothing else: batch i is windows i*B .. (i+1)*B of the epoch's order, as in memory,
and `whole_order` gives the same order to a store in memory. Blocks follow each other while a thread reads the next one.
The windows that a block leaves over, fewer than a batch, are copied into the room behind the next block's events.

Shapes: B batch, W windows of a block, N events.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trope.config import Config
from trope.data.ahead import Ahead
from trope.data.next_moments import next_moments
from trope.data.sequences import Sequences
from trope.data.stream import EVENT_BYTES, Loaded, Stream
from trope.data.windows import Windows, flatten_ranges
from trope.kernels.batch import Source
from trope.train.block_order import Cursor, EpochOrder, epoch_order, shuffled
from trope.train.distributed import Group
from trope.train.parts import parts_of
from trope.train.step import Feed, seed_for

# Of a window in a block: where it begins and ends, its length, its place in the order, and what is computed of them.
_WINDOW_BYTES = 128
# Of an event, to find and draw the targets of next-moment.
_MOMENT_BYTES = 96


class PlannedBlock(NamedTuple):
    """A block of an epoch. first: the place of its first window in the epoch."""

    epoch: int
    number: int
    shards: tuple[int, ...]
    first: int


class Held(NamedTuple):
    """A block in memory, with its windows in the order in which they are trained on.

    data: its events, and behind them those of the windows that the block before it left over. windows: [W] in order.
    lengths: [W] on the host, targets of each. following: [N] see `Sequences.training_batch`. first: the place of its
    first window in the epoch. events: its own, without what was left over.
    """

    data: Sequences
    windows: Windows
    lengths: Tensor
    following: Tensor | None
    first: int
    events: int

    def to(self, device: torch.device) -> Held:
        """The same on a device; lengths stay on the host."""
        following = None if self.following is None else self.following.to(device)
        windows = Windows(*(bound.to(device) for bound in self.windows))
        return self._replace(data=self.data.to(device), windows=windows, following=following)

    @property
    def end(self) -> int:
        """The place in the epoch behind its last window."""
        return self.first + len(self.lengths)


class StreamFeed(Feed):
    """Training batches by number, from a stream. A block has as many shards as the memory allows."""

    def __init__(self, stream: Stream, config: Config, group: Group) -> None:
        self.stream, self.config, self.parts = stream, config, parts_of(config, group)
        max_len = config.model.max_len
        self._has_moments = config.model.predicts == "next-moment"
        event_bytes = EVENT_BYTES + _MOMENT_BYTES * self._has_moments
        event_bytes += _WINDOW_BYTES // config.train.stride if config.train.stride else 0
        # What is left over: a window's events, and with next-moment its targets too.
        self._spare = (config.train.batch - 1) * (max_len + 1) * (1 + self._has_moments)
        self.window = stream.window(event_bytes, self._spare)
        self.counts = [self._count(shard) for shard in range(len(stream.sizes))]
        self.size = sum(self.counts)
        if not self.size:
            what = "moments to train on" if self._has_moments else "training events"
            raise ValueError(f"{stream.path} has no user with two {what}; nothing can be learned from it")
        self.steps = math.ceil(self.size / config.train.batch)
        self._generator = torch.Generator(stream.device)
        self._ahead = Ahead(self._load, self._cut_windows, stream.device)
        self._held: Held | None = None
        self._epoch, self._number = -1, -1
        self._filled: tuple[Source | None, int, int] = (None, -1, -1)  # with which block
        self._plan: EpochOrder

    def cursor(self, epoch: int, index: int) -> Cursor:
        """Where batch `index` of an epoch begins; for a checkpoint."""
        order = self._order_of(epoch)
        place = min(index * self.config.train.batch, self.size - 1)
        block = order.block_of(place)
        return Cursor(epoch, block, place - order.starts[block], self.window)

    def follow(self, cursor: list[int] | None) -> None:
        """Go on as a checkpoint says: with the blocks that its run began with. None: a run that begins now."""
        if cursor is None:
            return
        given = Cursor(*cursor)
        if not 1 <= given.window <= self.window:
            raise ValueError(
                f"the run was begun with {given.window} shards of {self.stream.path} in a block, --memory allows "
                f"{self.window}; resume it with more --memory"
            )
        self.window = given.window

    def rows(self, epoch: int, index: int) -> tuple[Sequences, Windows, Tensor]:
        """The store to cut batch `index` from, its windows, and how many targets each has, on the host."""
        low = index * self.config.train.batch
        high = min(low + self.config.train.batch, self.size)
        held = self._seek(epoch, low, high)
        chosen = slice(low - held.first, high - held.first)
        self.following = held.following
        if high == self.size:  # validation needs the memory
            self._held = None
            self._ahead.drop()
        windows = Windows(held.windows.starts[chosen], held.windows.ends[chosen])
        return held.data, windows, held.lengths[chosen]

    def tokens(self, epoch: int, index: int) -> int:
        """How many targets batch `index` of an epoch has."""
        return int(self.rows(epoch, index)[2].sum())

    def source(self) -> Source:
        """Where a fused step cuts its batches from: room for the largest block, which `aim` fills."""
        sizes = self.stream.sizes
        events = sum(sorted((size.events for size in sizes), reverse=True)[: self.window]) + self._spare
        windows = sum(sorted(self.counts, reverse=True)[: self.window]) + self.config.train.batch - 1
        kinds = {"items": torch.int32, "times": torch.int64, "following": torch.int64}
        room = {name: torch.zeros(events, dtype=kind, device=self.stream.device) for name, kind in kinds.items()}
        starts, ends = (torch.zeros(windows, dtype=torch.int64, device=self.stream.device) for _ in range(2))
        order = torch.arange(windows, device=self.stream.device)  # a block's windows are in order already
        following = room["following"] if self._has_moments else None
        return Source(room["items"], room["times"], starts, ends, order, following)

    def aim(self, source: Source, epoch: int, index: int, is_next: bool) -> int | None:
        """Make batch `index` of an epoch one that `source` holds; see `Feed.aim`."""
        low = index * self.config.train.batch
        held = self._seek(epoch, low, min(low + self.config.train.batch, self.size))
        if is_next and self._filled[0] is source and self._filled[1:] == (epoch, self._number):
            return None
        self._filled = (source, epoch, self._number)
        pairs = [(source.items, held.data.items), (source.times, held.data.times), (source.following, held.following)]
        for room, values in pairs:
            if room is not None and values is not None:
                room[: len(values)] = values
        windows = len(held.lengths)
        source.starts_W[:windows], source.ends_W[:windows] = held.windows.starts, held.windows.ends
        source.starts_W[windows:], source.ends_W[windows:] = 0, 1  # rows without targets
        return low - held.first

    def close(self) -> None:
        """End the thread that reads ahead, and let go of everything that is as large as a block."""
        # It holds `_ahead`, which holds its methods, so it stays in memory until Python looks for such circles.
        self._held = self.following = None
        self._filled = (None, -1, -1)
        self._ahead.close()

    def _seek(self, epoch: int, low: int, high: int) -> Held:
        """Hold windows `low` until `high` of an epoch."""
        if epoch != self._epoch:
            self._plan = self._order_of(epoch)
        if epoch != self._epoch or self._held is None or low < self._held.first or low >= self._held.end:
            self._held = None
            self._take(epoch, self._plan.block_of(low), None)
        while self._held is not None and self._held.end < high:
            behind = self._behind(self._number)
            assert behind is not None
            self._take(epoch, behind, _left_over(self._held, low))
        assert self._held is not None
        return self._held

    def _take(self, epoch: int, number: int, left_over: LeftOver | None) -> None:
        """Make a block the one that is held, and begin to read the one behind it."""
        self._held = None
        held = self._ahead.take(self._planned(epoch, number)).to(self.stream.device)
        self._held = held if left_over is None else _with(held, left_over)
        self._epoch, self._number = epoch, number
        if (behind := self._behind(number)) is not None:
            self._ahead.start(self._planned(epoch, behind))

    def _planned(self, epoch: int, number: int) -> PlannedBlock:
        """A block of the epoch that `_plan` is of."""
        return PlannedBlock(epoch, number, tuple(self._plan.blocks[number]), self._plan.starts[number])

    def _behind(self, number: int) -> int | None:
        """The next block that has windows; None behind the last one."""
        place = self._plan.starts[number + 1]
        return self._plan.block_of(place) if place < self.size else None

    def _order_of(self, epoch: int) -> EpochOrder:
        return epoch_order(self.counts, self.window, self.config.train.seed, epoch)

    def _load(self, planned: PlannedBlock) -> Loaded:
        return self.stream.load(planned.shards, spare=self._spare)

    def _cut_windows(self, planned: PlannedBlock, loaded: Loaded) -> Held:
        """The block's windows, shuffled."""
        epoch, number = planned.epoch, planned.number
        block, train = self.stream.block(loaded), self.config.train
        data, following, lengths_U = block.data, None, None
        if self._has_moments:
            moments = next_moments(data)
            lengths_U = moments.inputs + 1
            generator = torch.Generator(data.device).manual_seed(seed_for(train.seed, "targets", epoch, number))
            following = torch.empty(data.num_events + self._spare, dtype=torch.int64, device=data.device)
            following[: data.num_events] = moments.draw(generator)
        windows = data.train_windows(self.config.model.max_len, train.stride, lengths_U)
        windows = windows.take(shuffled(len(windows.starts), train.seed, epoch, number).to(data.device))
        lengths = (windows.ends - windows.starts - 1).cpu()
        return Held(block.roomy, windows, lengths, following, planned.first, data.num_events)

    def _count(self, shard: int) -> int:
        """How many training windows a shard has."""
        names = ("offsets", "splits", "items", "times") if self._has_moments else ("offsets", "splits")
        data = self.stream.read([shard], names).data
        lengths_U = next_moments(data).inputs + 1 if self._has_moments else None
        return len(data.train_windows(self.config.model.max_len, self.config.train.stride, lengths_U).starts)


class LeftOver(NamedTuple):
    """The last windows of a block, with their events, and with the events of their targets where those are named."""

    items: Tensor
    times: Tensor
    windows: Windows  # as places among these events
    lengths: Tensor
    following: Tensor | None  # of each of these events, as a place among them
    first: int


def _left_over(held: Held, place: int) -> LeftOver:
    """The windows from a place of the epoch on."""
    starts, ends = (bound[place - held.first :] for bound in held.windows)
    places, _, offsets = flatten_ranges(starts, ends)
    windows, following = Windows(offsets[:-1], offsets[1:]), None
    if held.following is not None:
        # A window's last event is no input, and names no target; its entry is never read.
        following = torch.arange(len(places), 2 * len(places), device=places.device)
        places = torch.cat((places, held.following[places]))
    lengths = held.lengths[place - held.first :]
    return LeftOver(held.data.items[places], held.data.times[places], windows, lengths, following, place)


def _with(held: Held, left_over: LeftOver) -> Held:
    """A block with the windows that the block before it left over in front, their events behind its own."""
    data, start = held.data, held.events
    room = slice(start, start + len(left_over.items))
    data.items[room], data.times[room] = left_over.items, left_over.times
    if held.following is not None and left_over.following is not None:
        held.following[start : start + len(left_over.following)] = left_over.following + start
    windows = Windows(
        torch.cat((left_over.windows.starts + start, held.windows.starts)),
        torch.cat((left_over.windows.ends + start, held.windows.ends)),
    )
    lengths = torch.cat((left_over.lengths, held.lengths))
    return Held(data, windows, lengths, held.following, left_over.first, held.events)


def make_feed(data: Sequences | Stream, config: Config, group: Group) -> Feed:
    """The training batches of a store in memory, or of a stream."""
    return StreamFeed(data, config, group) if isinstance(data, Stream) else Feed(data, config, group)


def go_on(feed: Feed, cursor: list[int] | None, steps: int) -> None:
    """Let a feed go on as a checkpoint says. steps: done so far; those to come must be in the same order.

    cursor: of the checkpoint, None for a store in memory.
    """
    is_stream = isinstance(feed, StreamFeed)
    if steps and is_stream != (cursor is not None):
        begun, now = ("without", "without") if is_stream else ("with", "with as much")
        raise ValueError(
            f"the run was begun {begun} --memory, which orders the training data otherwise; resume it {now} --memory"
        )
    if isinstance(feed, StreamFeed):
        feed.follow(cursor)


def check_streamed(stream: Stream) -> None:
    """Refuse now what could not be counted after hours of training or ranking: it looks at the files of all shards."""
    stream.in_time("test")
