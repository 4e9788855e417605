"""Report the progress of a preparation: the name of the stage, and the share of it that is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

StageReport = Callable[[str, float | None], None]
"""A callback: gets the stage's name and the share done from 0 to 1, or None if unknown."""
_INTERVAL_S = 0.25


class Stages:
    """Reports each stage as it begins. While a long query runs, a thread asks the engine for the share done.

    report: the callback, None for silence. ask: returns the share of the running query that is done, or None.
    """

    def __init__(self, report: StageReport | None, ask: Callable[[], float | None]) -> None:
        self._report = report or (lambda stage, share: None)
        self._ask = ask
        self._stage = "start"
        self._asking = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, stage: str) -> None:
        """Begin a stage of long queries."""
        self._stage, self._asking = stage, True
        self._report(stage, None)

    def done(self, stage: str, share: float) -> None:
        """Report the share done of a stage that knows it."""
        self._stage, self._asking = stage, False
        self._report(stage, share)

    def __enter__(self) -> Stages:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            if self._asking and (share := self._ask()) is not None:
                self._report(self._stage, share)
