"""What a run says of itself: a progress bar, log.jsonl, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm

from trope.data.printable import printable
from trope.runs import LOG, TENSORBOARD, log_row, write_text
from trope.train.checkpoint import TrainState

FILE_SECONDS = 60.0
"""Seconds between two frames of the bar where it is written to a file."""


def how_often() -> dict[str, float]:
    """Arguments of tqdm. A file keeps every frame of a bar; tqdm's monitor would force one after `maxinterval`."""
    return {} if sys.stderr.isatty() else {"mininterval": FILE_SECONDS, "maxinterval": FILE_SECONDS}


class RunLog:
    """The log of one run.

    Args:
        run: the run folder.
        state: where the run starts from; lines from after it, by a process that was killed, are dropped.
        total: steps of the whole run, if it is not stopped early.
        progress: show a bar.
        active: whether this process writes at all; of several, only the first does.
    """

    def __init__(self, run: Path, state: TrainState, total: int, progress: bool, active: bool = True) -> None:
        self._file: TextIO | None = None
        self._board: Any = None
        if active:
            path = run / LOG
            if path.exists():
                write_text(path, "".join(_lines_until(path, state)))
            self._file = path.open("a", encoding="utf-8")
            self._board = _tensorboard(run / TENSORBOARD, state.step)
        hidden = not (progress and active)
        self._bar = tqdm(total=total, initial=state.step, disable=hidden, unit="it", dynamic_ncols=True, **how_often())
        self._shown: dict[str, str] = {}
        if state.best is not None:
            self.show(best=f"{state.best:.4f}")

    def show(self, **values: str) -> None:
        """Put values behind the bar."""
        self._shown |= values
        self._bar.set_postfix(self._shown, refresh=False)

    def advance(self, epoch: int, epochs: int) -> None:
        """One step further."""
        self._bar.set_description(f"epoch {epoch}/{epochs}", refresh=False)
        self._bar.update()

    def write(self, state: TrainState, **values: Any) -> None:
        """One line of log.jsonl, and its numbers to TensorBoard."""
        if self._file is None:
            return
        row = {"step": state.step, "epoch": state.epoch, **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, state.step)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def say_resumed(run: Path, state: TrainState, epochs: int) -> str:
    """Where a run goes on, in a line."""
    return f"{printable(run)} goes on in epoch {state.epoch + 1} of {epochs}, after step {state.step:,}"


def _lines_until(path: Path, state: TrainState) -> list[str]:
    """The lines that the run as resumed has behind it; a line that was cut short or damaged is dropped."""
    rows = [(line, log_row(line)) for line in path.read_bytes().splitlines(keepends=True)]
    return [line.decode() for line, row in rows if row and row["step"] <= state.step and row["epoch"] <= state.epoch]


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer that forgets what came after `step`, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)
