"""Where events are kept. A store is shared by servers; each follows it from the position that it has read.

Positions rise with every event. What `append` has returned for is kept: on disk in SQLite, in Redis as durable as that
server is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from trope.server.schema import Event, ItemId


class Stored(NamedTuple):
    """An event in the store."""

    position: int
    user: str
    item: ItemId
    time: int


class Past(NamedTuple):
    """An event of one user's history."""

    position: int
    item: ItemId
    time: int


class StoreError(OSError):
    """The store does not answer, or cannot write; one line says why."""


class Store(Protocol):
    """What a server needs of a store. Every method may be called from any thread."""

    def append(self, posts: Sequence[Sequence[Event]]) -> list[int]:
        """Keep the events of several posts, and return how many of each were new: a known `event_id` is not.

        All of them are flushed together. When it raises, none counts as kept.
        """

    def after(self, position: int, most: int, since: int = 0) -> list[Stored]:
        """The next events behind a position, at most `most`, in order.

        since: leave out those with an earlier time; the store may return them all the same.
        """

    def last_position(self) -> int:
        """Of the newest event; 0 in an empty store."""

    def histories(self, users: Sequence[str], most: int) -> list[list[Past]]:
        """The last `most` events of each user, in the order they were stored."""

    def describe(self) -> str:
        """What this store is, and how durable, in a few words."""

    def close(self) -> None:
        """End it; nothing is lost."""
