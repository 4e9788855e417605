"""`Ahead`: the next thing is made on a thread while the present one is in use."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ahead(Generic[K, T]):
    """Makes things by their keys, at most one ahead of need.

    Nothing is kept once it was taken: with one in use and one being made, two are in memory.
    """

    def __init__(self, make: Callable[[K], T]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(1, "trope-ahead")
        self._next: tuple[K, Future[T]] | None = None

    def start(self, key: K) -> None:
        """Begin to make the thing that `take` will be asked for next."""
        self.drop()
        self._next = (key, self._pool.submit(self._make, key))

    def take(self, key: K) -> T:
        """The thing of this key: the one that was started, or made now."""
        begun, self._next = self._next, None
        if begun is None or begun[0] != key:
            self._drop(begun)
            return self._make(key)
        return begun[1].result()

    def drop(self) -> None:
        """Forget what was started."""
        begun, self._next = self._next, None
        self._drop(begun)

    def _drop(self, begun: tuple[K, Future[T]] | None) -> None:
        if begun is not None and not begun[1].cancel():
            begun[1].exception()  # wait: what is made meanwhile would be a third one in memory

    def __enter__(self) -> Ahead[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self.drop()
        self._pool.shutdown(wait=True)
