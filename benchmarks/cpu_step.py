"""Training steps of the demo's two models on the CPU: the median and the fastest fifth, in milliseconds.

    python benchmarks/cpu_step.py data/demo     # the dataset that `make demo` prepares

To compare two commits, run it in a checkout of each by turns: other work on the machine moves these numbers by a tenth.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from trope.cli.demo import MODELS, SETTINGS
from trope.data.sequences import Sequences
from trope.environment import commit
from trope.settings import preset
from trope.train.distributed import process_group
from trope.train.loop import Trainer

WARM_UP, STEPS = 5, 50


def main() -> None:
    data = Sequences.load(sys.argv[1])
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    for model in MODELS:
        with process_group("cpu") as group, tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(data, preset(model, settings), Path(folder) / "run", group, resume=False)
            trainer.model.train()
            times = []
            for _ in range(WARM_UP + STEPS):
                start = time.perf_counter()
                trainer.step()
                times.append(time.perf_counter() - start)
        times = sorted(times[WARM_UP:])
        fastest, median = times[len(times) // 5], times[len(times) // 2]
        threads = torch.get_num_threads()
        print(f"{commit()} {model}: p20 {1e3 * fastest:.1f} ms, p50 {1e3 * median:.1f} ms, {threads} threads")


if __name__ == "__main__":
    main()
