"""The progress of a run, read from its folder while another process trains it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

from trope.experiments.pool import Run
from trope.figures.run_files import parse_row
from trope.runs import LOG, REFIT, read_metrics


@dataclass
class Progress:
    """The state of a run by its log; `update` reads the lines that were added.

    epoch: finished epochs. best, best_epoch: best validation so far by the criterion. seconds: of training in total.
    is_refitting: whether the second training of `train.refit` is under way.
    """

    run: Run
    epochs: int
    criterion: str
    epoch: int = 0
    best: float | None = None
    best_epoch: int = 0
    seconds: float = 0.0
    is_refitting: bool = False
    _file: int = field(default=0, repr=False)
    _read: int = field(default=0, repr=False)

    @classmethod
    def of(cls, run: Run) -> Progress:
        """The progress of a run that may not have started."""
        return cls(run, run.config.train.epochs, run.config.train.criterion)

    def update(self) -> Progress:
        """Read the new lines of the log; a finished run is read from its metrics.json."""
        if self.run.is_finished:
            found = read_metrics(self.run.folder)
            self.epoch, self.seconds = found["epochs"], found["seconds"]
            self.best, self.best_epoch = found["valid"][self.criterion], found["best_epoch"]
            self.is_refitting = False
            return self
        self.is_refitting = (self.run.folder / REFIT).is_dir()
        try:
            with (self.run.folder / LOG).open("rb") as file:
                self._read_on(file)
        except OSError:
            pass  # the run has not started, or it failed: `run_all` reports why
        return self

    def _read_on(self, file: Any) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._file or found.st_size < self._read:  # a resumed run rewrites its log
            self._file, self._read, self.epoch, self.best, self.best_epoch = found.st_ino, 0, 0, None, 0
        file.seek(self._read)
        whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.split(b"\n"):
            # A line that a kill cut short, or that is damaged: a table of progress does not stop a training for it.
            with contextlib.suppress(ValueError):
                self._take(parse_row(line))

    def _take(self, row: dict[str, Any]) -> None:
        self.epoch, self.seconds = row["epoch"], row.get("seconds", self.seconds)
        score = row.get(self.criterion)
        if score is not None and (self.best is None or score > self.best):
            self.best, self.best_epoch = score, row["epoch"]
