"""How far a run is, read from its folder while another process writes it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

from trope.experiments.pool import Run
from trope.runs import LOG, METRICS, REFIT


@dataclass
class Progress:
    """What a run's log says; `update` reads what was added since.

    epoch: whole epochs done. best, best_epoch: of the criterion in validation so far. seconds: of training, in all.
    is_refitting: whether validation has chosen, and the second training of `train.refit` is under way.
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
        """Of a run that may not have begun."""
        return cls(run, run.config.train.epochs, run.config.train.criterion)

    def update(self) -> Progress:
        """Read on; a run that is finished is read from its metrics.json, whole."""
        if self.run.is_finished:
            found = json.loads((self.run.folder / METRICS).read_text(encoding="utf-8"))
            self.epoch, self.seconds = found["epochs"], found["seconds"]
            self.best, self.best_epoch = found["valid"][self.criterion], found["best_epoch"]
            self.is_refitting = False
            return self
        self.is_refitting = (self.run.folder / REFIT).is_dir()
        try:
            with (self.run.folder / LOG).open("rb") as file:
                self._read_on(file)
        except OSError:
            pass  # it has not begun, or cannot; `run_all` says why
        return self

    def _read_on(self, file: Any) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._file or found.st_size < self._read:  # a resumed run writes its log anew
            self._file, self._read, self.epoch, self.best, self.best_epoch = found.st_ino, 0, 0, None, 0
        file.seek(self._read)
        whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.split(b"\n"):
            with contextlib.suppress(json.JSONDecodeError):  # a line that a kill cut short
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        self.epoch, self.seconds = row["epoch"], row["seconds"]
        score = row.get(self.criterion)
        if score is not None and (self.best is None or score > self.best):
            self.best, self.best_epoch = score, row["epoch"]
