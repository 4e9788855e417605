"""`Ahead`: the next thing is read on a thread while the present one is in use.

On a CPU the thread runs no torch operation. A second thread that computes with torch has a second team of OpenMP
threads, and libgomp lets threads spin only while there are no more of them than cores. With both teams every operation
of a step begins by waking sleeping threads, also when nothing is read: a small model lost a sixth of its speed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
T = TypeVar("T")


class Ahead(Generic[K, R, T]):
    """Makes things by their keys, at most one ahead of need.

    Nothing is kept once it was taken: with one in use and one being made, two are in memory.

    Args:
        read: the part that waits for a disk, without torch; on the thread.
        finish: makes the thing of a key and what was read. It may compute with torch: in `take`, and on the thread
            where a GPU has the work.
        device: of the work.
    """

    def __init__(self, read: Callable[[K], R], finish: Callable[[K, R], T], device: torch.device) -> None:
        self._read, self._finish, self._is_split = read, finish, device.type == "cpu"
        self._pool = ThreadPoolExecutor(1, "trope-ahead")
        self._next: tuple[K, Future[Callable[[], T]]] | None = None

    def start(self, key: K) -> None:
        """Begin to make the thing that `take` will be asked for next."""
        self.drop()
        self._next = (key, self._pool.submit(self._begin, key))

    def take(self, key: K) -> T:
        """The thing of this key: the one that was started, or made now."""
        begun, self._next = self._next, None
        if begun is None or begun[0] != key:
            self._drop(begun)
            return self._finish(key, self._read(key))
        return begun[1].result()()

    def _begin(self, key: K) -> Callable[[], T]:
        """What is left to do in `take`; on the thread."""
        read = self._read(key)
        if self._is_split:
            return lambda: self._finish(key, read)
        made = self._finish(key, read)
        return lambda: made

    def drop(self) -> None:
        """Forget what was started."""
        begun, self._next = self._next, None
        self._drop(begun)

    def _drop(self, begun: tuple[K, Future[Callable[[], T]]] | None) -> None:
        if begun is not None and not begun[1].cancel():
            begun[1].exception()  # wait: what is made meanwhile would be a third one in memory

    def __enter__(self) -> Ahead[K, R, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self.drop()
        self._pool.shutdown(wait=True)
