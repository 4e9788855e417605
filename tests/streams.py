"""Streams for tests: how much memory makes blocks of some shards, and a store in memory in the order of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.train import loop
from trope.train.block_order import whole_order
from trope.train.distributed import Group
from trope.train.loop import train
from trope.train.step import Feed, Work
from trope.train.streamed import StreamFeed

CPU = torch.device("cpu")
ALONE = Group(0, 1, CPU)
MUCH = 10**9


def memory_for(path: Path, shards: int, config: Config) -> int:
    """Bytes that make blocks of so many shards."""
    stream = Stream.open(path, MUCH)
    feed = StreamFeed(stream, config, ALONE)
    low, high = 1, MUCH
    while low < high:
        stream.memory = (low + high) // 2
        try:
            enough = StreamFeed(stream, config, ALONE).window >= shards
        except ValueError:
            enough = False
        low, high = (low, stream.memory) if enough else (stream.memory + 1, high)
    feed.close()
    return low


def same_work(one: Work, other: Work) -> bool:
    pairs = zip((*one.batch, one.places_T, one.negatives), (*other.batch, other.places_T, other.negatives), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and one.share == other.share


class BlockFeed(Feed):
    """The feed of a store in memory, in the order of a stream."""

    def __init__(self, data: Sequences, config: Config, like: StreamFeed, group: Group = ALONE) -> None:
        super().__init__(data, config, group)
        self.like = like

    def _shuffle(self, epoch: int) -> None:
        super()._shuffle(epoch)
        order = whole_order(self.like.counts, self.like.window, self.config.train.seed, epoch)
        self._order, self._ordered_lengths_W = order.to(self.data.device), self._lengths_W[order]
        self._tokens = [int(part.sum()) for part in self._ordered_lengths_W.split(self.config.train.batch)]


def train_in_memory(path: Path, config: Config, memory: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Train with all data in memory, in the order of a stream within `memory` bytes."""

    def make_feed(data: Sequences, config: Config, group: object) -> BlockFeed:
        stream = Stream.open(path, memory)
        if config.model.pulse and stream.validates_on_test:
            stream = stream.with_own_validation()
        if not data.can_evaluate("valid"):
            stream = stream.with_validation()
        like = StreamFeed(stream, config, ALONE)
        like.close()
        return BlockFeed(data, config, like)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_feed", make_feed)
        return train(Sequences.load(path), config, run, "cpu", progress=False)
