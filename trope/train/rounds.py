"""`Rounds`: when the processes of a training ask each other whether to stop or to save."""

from __future__ import annotations

import time

import torch

from trope.train.distributed import Group
from trope.train.process import StopRequest

# torchrun kills a process 30 seconds after it sent SIGTERM, and the checkpoint has to be written by then.
SECONDS = 5.0
MOST_STEPS = 50  # a round waits for the device, which is worth nothing next to so many steps


class Rounds:
    """Rounds at the same steps in all processes, about `SECONDS` apart. A process alone looks after each step.

    Attributes:
        is_late: whether the last round found that it is time for a checkpoint; by the clock of the first process.
    """

    def __init__(self, group: Group, stop: StopRequest, checkpoint_seconds: float) -> None:
        self.group, self.stop, self.checkpoint_seconds = group, stop, checkpoint_seconds
        self.is_late = False
        self._steps, self._interval = 0, 1  # steps since the last round, and from one round to the next
        self.saved()

    def saved(self) -> None:
        """A checkpoint has just been written: neither its seconds nor those of a validation are of steps."""
        self._saved_at = self._began = time.monotonic()

    def is_due(self, is_last: bool) -> bool:
        """Whether to ask after the step that was just done. is_last: of its epoch; a long validation may follow."""
        self._steps += 1
        return is_last or self.group.size == 1 or self._steps >= self._interval

    def ask(self) -> int:
        """The signal that asked any process to stop, 0 for none; all processes call this together."""
        is_late, signum = time.monotonic() - self._saved_at >= self.checkpoint_seconds, self.stop.signum
        if self.group.size == 1:
            self.is_late = is_late
            return signum
        # Clocks differ, so only the first process fills in what clocks say. The others' zeros change nothing.
        mine = [signum, int(is_late), self._measured()] if self.group.is_first else [signum, 0, 0]
        signum, late, self._interval = self.group.largest(mine)
        self.is_late = bool(late)
        self._steps, self._began = 0, time.monotonic()
        return signum

    def _measured(self) -> int:
        """Steps in `SECONDS`, as the steps since the last round went; as before where there were none."""
        if not self._steps:
            return self._interval
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)  # or it would be the time to launch them
        seconds = (time.monotonic() - self._began) / self._steps
        return min(MOST_STEPS, max(1, int(SECONDS / max(seconds, 1e-9))))
