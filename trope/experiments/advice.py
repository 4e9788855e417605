"""What to say before many models are trained: settings that nobody chose and that do not fit the data or the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from trope.data.protocols import MOSTLY_TIED, say_ties, tied_share
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.experiments.pool import Run
from trope.experiments.sizes import CPU_SIZE, names


def advice(data: Sequences | Stream, runs: Sequence[Run], device: str) -> list[str]:
    """A line for each; runs: those to train. device: cpu or cuda."""
    said = []
    if any("model.predicts" not in names(run.settings) for run in runs):  # all presets predict the next event
        share = _tied_share(data)
        if share > MOSTLY_TIED:
            said.append(say_ties(share, data.protocol.name))
    wide = [run.config.model.width for run in runs if "model.width" not in names(run.settings)]
    if device == "cpu" and wide:
        smaller = " ".join(f"--set {setting}" for setting in CPU_SIZE)
        said.append(f"model.width is {max(wide)}, which is slow on a CPU; a size that fits one: {smaller}")
    return said


def _tied_share(data: Sequences | Stream) -> float:
    if isinstance(data, Sequences):
        return tied_share(data.times.cpu().numpy(), data.offsets.cpu().numpy())
    return sum(data.over_blocks(lambda user, block: _tied_share(block) * block.num_events)) / data.num_events
