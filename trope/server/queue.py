"""The batching queue: requests wait here, one thread takes all that wait and does them together."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from trope.server.heap import HeapTrim
from trope.server.limits import Limits
from trope.server.metrics import Metrics
from trope.server.refusal import Refused
from trope.server.worker import Job, Outcome, Worker

Entry = tuple[Job, "asyncio.Future[Any]"]
_NEVER = sys.maxsize


class BatchQueue:
    """Hands jobs from the event loop to the worker's thread, and outcomes back.

    While the worker is busy jobs gather, so that a busy server has large batches without waiting for them. Clients that
    ask again when they are answered come back together: the worker waits a moment for as many as it answered last.
    """

    def __init__(self, worker: Worker, limits: Limits, metrics: Metrics) -> None:
        self.worker, self.limits, self.metrics = worker, limits, metrics
        self._entries: deque[Entry] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._wanted = _NEVER  # entries at which the worker is to be woken
        self._expected = 0  # entries of the last batch
        self._thread = threading.Thread(target=self._work, name="trope-worker", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.watch_queue(self._entries.__len__)

    def start(self) -> None:
        """Begin; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether jobs are accepted and done."""
        return self._thread.is_alive() and not self._is_closing

    def do(self, job: Job) -> asyncio.Future[Any]:
        """The outcome of a job, to be awaited; refused where too many wait already."""
        if not self.is_open:
            raise Refused("the server is shutting down; ask another one", 503, retry_after=1)
        if len(self._entries) >= self.limits.waiting:
            raise Refused(f"{self.limits.waiting:,} requests are waiting already; try again soon", 503, retry_after=1)
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._entries.append((job, future))
        if len(self._entries) >= self._wanted:
            self._wake.set()
        return future

    async def close(self) -> None:
        """Do what waits, then end."""
        self._is_closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        trim_heap = HeapTrim()
        while True:
            batch = self._take()
            if not batch:
                return
            started = time.perf_counter()
            self._run(batch)
            self.metrics.batches.observe(len(batch))
            self.metrics.batch_seconds.observe(time.perf_counter() - started)
            trim_heap()

    def _take(self) -> list[Entry]:
        """The next batch, not empty until the queue is closed and done."""
        while not self._entries:
            if self._is_closing:
                return []
            self._sleep_until(1, None)
        # Who asks alone does not wait for others.
        self._sleep_until(min(self._expected, self.limits.batch), self.limits.wait)
        batch = [self._entries.popleft() for _ in range(min(len(self._entries), self.limits.batch))]
        self._expected = len(batch)
        return batch

    def _sleep_until(self, entries: int, seconds: float | None) -> None:
        """Wait for so many entries, for so long at most, or until the queue is closed."""
        self._wake.clear()
        self._wanted = entries
        if len(self._entries) < entries and not self._is_closing:  # they may have come before we said how many
            self._wake.wait(seconds)
        self._wanted = _NEVER

    def _run(self, batch: Sequence[Entry]) -> None:
        left = dict(enumerate(future for _, future in batch))

        def deliver(outcomes: list[tuple[int, Outcome]]) -> None:
            pairs = [(left.pop(place), outcome) for place, outcome in outcomes]
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_settle, pairs)

        try:
            self.worker.run([job for job, _ in batch], deliver)
        except Exception as error:  # our own mistake: those who wait must learn of it, and the next batch be done
            deliver([(place, error) for place in list(left)])
        if left:
            deliver([(place, RuntimeError("the worker gave no outcome")) for place in list(left)])


def _settle(pairs: list[tuple[asyncio.Future[Any], Outcome]]) -> None:
    for future, outcome in pairs:
        if future.done():  # the client has gone
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
