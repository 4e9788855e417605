"""Shows the progress of trainings: a live table on a terminal, plain lines in a file or a scheduler's log."""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trope.data.printable import printable
from trope.experiments.pool import Outcome, Run
from trope.experiments.progress import Progress

REFRESH_SECONDS, LINE_SECONDS = 1.0, 60.0
"""Seconds between two drawings of the table, and between two plain lines about a run."""
_STYLES = {"training": "bold", "failed": "red", "done": "green"}


class LiveTable:
    """Shows the state of runs; a context manager around `run_all`.

    runs: all runs, including those that were finished before.
    """

    def __init__(self, runs: Sequence[Run], console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.states = {run.folder: "done before" if run.is_finished else "waiting" for run in runs}
        self.progress = {run.folder: Progress.of(run).update() for run in runs}
        self.reasons: dict[object, str] = {}
        self._began: dict[object, float] = {}  # of the runs that this command trains
        self._took: dict[object, float] = {}
        self._drawn = time.monotonic()
        self._live: Live | None = None

    def began(self, run: Run) -> None:
        """Note that a run was started."""
        self.states[run.folder], self._began[run.folder] = "training", time.monotonic()
        if self._live is None:
            self._say(run, "training")

    def ended(self, outcome: Outcome) -> None:
        """Note that a run ended or failed."""
        run = outcome.run
        self.states[run.folder] = "done" if outcome.failure is None else "failed"
        self._took[run.folder] = outcome.seconds
        progress = self.progress[run.folder].update()
        if outcome.failure is not None:
            self.reasons[run.folder] = outcome.failure
        done = sum(state.startswith("done") for state in self.states.values())
        if self._live is None:
            self._say(run, outcome.failure or f"{how_far(progress)}, {outcome.seconds:.0f} s", f"{done}/{len(self)}")

    def tick(self) -> None:
        """Draw the table or print lines, if enough time has passed."""
        if time.monotonic() - self._drawn < (REFRESH_SECONDS if self._live else LINE_SECONDS):
            return
        self._drawn = time.monotonic()
        for folder, state in self.states.items():
            if state == "training":
                progress = self.progress[folder].update()
                if self._live is None:
                    self._say(progress.run, f"{how_far(progress)}, {self._seconds(folder):.0f} s")
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """The table of all runs that are not waiting."""
        waiting = sum(state == "waiting" for state in self.states.values())
        title = f"{len(self) - waiting} of {len(self)} runs started or done"
        table = Table(title=title, title_justify="left", box=None)
        best = " or ".join(dict.fromkeys(f"best {progress.criterion}" for progress in self.progress.values()))
        for heading in ("run", "state", "epoch", best, "seconds", "reason"):
            number = heading not in ("run", "state", "reason")
            table.add_column(heading, justify="right" if number else "left", overflow="fold")
        # A screen has no room for hundreds of runs: the first that ended are hidden.
        shown = [folder for folder, state in self.states.items() if state != "waiting"]
        quiet = [folder for folder in shown if self.states[folder].startswith("done")]
        hidden = set(quiet[: max(0, len(shown) + 4 - self.console.height)])
        for folder in shown:
            if folder not in hidden:
                table.add_row(*self._cells(self.progress[folder], self.states[folder], self.reasons.get(folder, "")))
        if hidden:
            table.caption, table.caption_justify = f"and {len(hidden)} more that are done", "left"
        return table

    def _cells(self, progress: Progress, state: str, reason: str) -> list[Text]:
        best = "" if progress.best is None else f"{100 * progress.best:.2f}"
        shown = "refitting" if state == "training" and progress.is_refitting else state
        texts = [
            progress.run.folder.name, shown, f"{progress.epoch}/{progress.epochs}", best,
            f"{self._seconds(progress.run.folder):.0f}", reason,
        ]  # fmt: skip
        return [Text(printable(text), _STYLES.get(state, "")) for text in texts]

    def _seconds(self, folder: Path) -> float:
        """How long this command has trained a run, pulse and test included; of one done before, its training."""
        if folder in self._took or folder not in self._began:
            return self._took.get(folder, self.progress[folder].seconds)
        return time.monotonic() - self._began[folder]

    def _say(self, run: Run, said: str, count: str = "") -> None:
        self.console.print(Text(printable(f"{count:>7}  {run.folder.name:<24} {said}")))

    def __len__(self) -> int:
        return len(self.states)

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self._live = Live(self.table(), console=self.console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            self._live.__exit__(kind, error, trace)


def how_far(progress: Progress) -> str:
    """Epochs and the best validation, in words."""
    text = f"epoch {progress.epoch}/{progress.epochs}"
    if progress.best is not None:
        text += f", best validation {progress.criterion} {100 * progress.best:.2f} % at epoch {progress.best_epoch}"
    if progress.is_refitting:
        text += ", refitting"
    return text
