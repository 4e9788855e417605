"""How much one request and one client may ask for."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most that a server accepts."""

    body: int = 4 << 20
    """Bytes of a request's body."""
    upload: float = 10.0
    """Seconds in which a body must arrive; a server that ends waits for requests under way."""
    events: int = 10_000
    """Events of one post."""
    questions: int = 256
    """Questions in one body."""
    moments: int = 800
    """Moments of one question, and steps of a sweep."""
    rows: int = 2_048
    """Questions times moments in one body."""
    k: int = 1_000
    """Items of one list."""
    listed: int = 20_480
    """Items of all lists of one body: moments times k."""
    allowed: int = 1_000_000
    """Items to choose from in one body: moments times entries of allow lists."""
    new_items: int = 256
    """Moments of one body with `new_items`: each ranks all of them, which may be 100,000."""
    looks: int = 31
    """Moments of one body whose attention is told with `explain`: each costs an encode."""
    history: int = 10_000
    """Events of a history; of a known user the last ones count."""
    items: int = 10_000
    """Entries of an allow or deny list."""
    id_length: int = 256
    """Characters of an id."""
    waiting: int = 1_024
    """Requests that may wait for the worker."""
    batch: int = 64
    """Requests that are answered together."""
    wait: float = 0.004
    """Seconds that the worker waits at most for as many requests as it answered last."""


class TokenBuckets:
    """A rate limit for each client: `rate` requests a second on average, twice as many at once.

    clock: seconds that only rise.
    """

    MOST_CLIENTS = 10_000

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, 2 * rate, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and when they were counted

    def take(self, client: str) -> bool:
        """Whether the client may ask now."""
        now = self._clock()
        left, since = self._buckets.get(client, (max(1.0, self.burst), now))
        left = min(max(1.0, self.burst), left + (now - since) * self.rate)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > self.MOST_CLIENTS:  # the one that has not asked for the longest time
            self._buckets.popitem(last=False)
        return allowed
