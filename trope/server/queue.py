"""The batching queue: requests wait here, one thread takes all that wait and does them together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from trope.server.limits import Limits
from trope.server.metrics import Metrics
from trope.server.refusal import Refused
from trope.server.worker import Job, Outcome, Worker

Entry = tuple[Job, "asyncio.Future[Any]"]


class BatchQueue:
    """Hands jobs from the event loop to the worker's thread, and outcomes back.

    While the worker is busy jobs gather, so that a busy server has large batches without waiting for them.
    """

    def __init__(self, worker: Worker, limits: Limits, metrics: Metrics) -> None:
        self.worker, self.limits, self.metrics = worker, limits, metrics
        self._entries: deque[Entry] = deque()
        self._wake = threading.Event()
        self._is_idle = self._is_closing = self._is_busy = False
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

    async def do(self, job: Job) -> Any:
        """The outcome of a job; refused where too many wait already."""
        if not self.is_open:
            raise Refused("the server is shutting down; ask another one", 503, retry_after=1)
        if len(self._entries) >= self.limits.waiting:
            raise Refused(f"{self.limits.waiting:,} requests are waiting already; try again soon", 503, retry_after=1)
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._entries.append((job, future))
        if self._is_idle:
            self._wake.set()
        return await future

    async def close(self) -> None:
        """Do what waits, then end."""
        self._is_closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while True:
            batch = self._take()
            if not batch:
                return
            started = time.perf_counter()
            self._run(batch)
            self.metrics.batches.observe(len(batch))
            self.metrics.batch_seconds.observe(time.perf_counter() - started)

    def _take(self) -> list[Entry]:
        """The next batch, not empty until the queue is closed and done."""
        while not self._entries:
            if self._is_closing:
                return []
            self._is_idle = True
            if not self._entries and not self._is_closing:  # one may have come before we said that we are idle
                self._wake.wait()
            self._wake.clear()
            self._is_idle = False
        # Who asks alone does not wait for others.
        if self._is_busy and len(self._entries) < self.limits.batch and not self._is_closing:
            time.sleep(self.limits.wait)
        batch = [self._entries.popleft() for _ in range(min(len(self._entries), self.limits.batch))]
        self._is_busy = len(batch) > 1
        return batch

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
