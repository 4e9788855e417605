"""The batching queue: who asks alone is answered at once, who asks together is answered together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE

from trope.server.limits import Limits
from trope.server.metrics import Metrics
from trope.server.queue import BatchQueue
from trope.server.refusal import Refused
from trope.server.schema import Event
from trope.server.store import StoreError
from trope.server.worker import TOGETHER, Call, Deliver, Job, Outcome, Post, Worker

LONG = PATIENCE


class Fake:
    """A worker that notes how many jobs it gets at a time, and does none while `may_go` is not set."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def run(self, jobs: Sequence[Job], deliver: Deliver) -> None:
        self.sizes.append(len(jobs))
        assert self.may_go.wait(PATIENCE)
        deliver([(place, place) for place in range(len(jobs))])


def run(wait: float, talk: Any) -> Fake:
    """Start a queue, let `talk(queue, worker)` use it, end it."""
    worker = Fake()

    async def whole() -> None:
        queue = BatchQueue(worker, Limits(wait=wait), Metrics())  # type: ignore[arg-type]
        queue.start()
        await talk(queue, worker)
        await queue.close()

    asyncio.run(whole())
    return worker


async def together(queue: BatchQueue, worker: Fake, count: int) -> None:
    """The first job holds the worker, so that the others gather."""
    worker.may_go.clear()
    first = queue.do(Call(lambda _: None))
    while len(worker.sizes) == 0:
        await asyncio.sleep(0.001)
    others = [queue.do(Call(lambda _: None)) for _ in range(count)]
    worker.may_go.set()
    await asyncio.gather(first, *others)


def test_those_who_were_answered_together_are_waited_for() -> None:
    async def talk(queue: BatchQueue, worker: Fake) -> None:
        await together(queue, worker, 3)
        asked = []
        for _ in range(3):
            asked.append(queue.do(Call(lambda _: None)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)

    began = time.monotonic()
    assert run(LONG, talk).sizes == [1, 3, 3]
    assert time.monotonic() - began < LONG / 2  # it does not wait longer than for the third


def test_who_asks_alone_does_not_wait() -> None:
    async def talk(queue: BatchQueue, worker: Fake) -> None:
        for _ in range(3):
            await queue.do(Call(lambda _: None))

    began = time.monotonic()
    assert run(LONG, talk).sizes == [1, 1, 1]
    assert time.monotonic() - began < LONG / 2


def test_those_who_do_not_come_back_are_waited_for_once() -> None:
    async def talk(queue: BatchQueue, worker: Fake) -> None:
        await together(queue, worker, 5)
        for _ in range(2):
            await queue.do(Call(lambda _: None))

    assert run(0.02, talk).sizes == [1, 5, 1, 1]


def test_an_end_while_it_waits_answers_what_is_there() -> None:
    async def talk(queue: BatchQueue, worker: Fake) -> None:
        await together(queue, worker, 5)
        asked = queue.do(Call(lambda _: None))
        await asyncio.sleep(0.01)
        await queue.close()
        assert await asked == 0

    began = time.monotonic()
    assert run(LONG, talk).sizes == [1, 5, 1]
    assert time.monotonic() - began < LONG / 2


class Counting:
    """A store that notes how many events it gets at a time, and fails from some time on."""

    def __init__(self, fails_at: int) -> None:
        self.sizes: list[int] = []
        self.fails_at = fails_at

    def append(self, posts: Sequence[Sequence[Event]]) -> list[int]:
        self.sizes.append(sum(map(len, posts)))
        if len(self.sizes) == self.fails_at:
            raise StoreError("the store is gone")
        return [len(post) for post in posts]


class NoModel:
    version = "none"
    recommender = SimpleNamespace(device=torch.device("cpu"))

    def follow(self) -> None:
        pass


@pytest.mark.parametrize("fails_at", [0, 3])
def test_large_posts_are_stored_in_parts(fails_at: int) -> None:
    """A store that takes seconds for all of them would be given up, though it stores them."""
    store, found = Counting(fails_at), {}
    worker = Worker({"": NoModel()}, store, Metrics())  # type: ignore[dict-item, arg-type]
    sizes = [10, TOGETHER // 2, TOGETHER // 2, TOGETHER, TOGETHER // 4, TOGETHER // 4, 7]

    def deliver(outcomes: list[tuple[int, Outcome]]) -> None:
        found.update(outcomes)

    worker.run([Post([Event("ann", 1, 6)] * size) for size in sizes], deliver)
    groups = [sizes[:2], sizes[2:3], sizes[3:4], sizes[4:]]
    assert store.sizes == [sum(group) for group in groups][: fails_at or None]
    assert [isinstance(found[place], Refused) for place in range(7)] == [bool(fails_at) and x > 2 for x in range(7)]
    assert (worker.failure is None) == (fails_at == 0)
