"""How much hangs on rounding: Grocery's holdout with the readout's kernel and with its plain path, same seeds.

    python benchmarks/readout_rounding.py data/amazon-grocery-5core-2014-holdout --csv results/readout-rounding.csv

The two paths compute the same function and differ in the last bits of a sum. Training amplifies that: validation may
choose another epoch, and the refit then trains for another number of epochs. All trainings run side by side.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from trope import environment
from trope.data.sequences import Sequences
from trope.rotary import TimeReadout
from trope.runs import METRICS
from trope.settings import preset
from trope.train.loop import train

PATHS = ("kernel", "plain")


def _plain(readout: TimeReadout, x_TE: Tensor, delta_TE: Tensor, start_TW: Tensor, moments_T: Tensor) -> Tensor:
    start_TE = F.pad(start_TW, (0, x_TE.shape[1] - start_TW.shape[1]))  # the fused step gives the turning dims alone
    return readout.forward(x_TE + delta_TE, moments_T, start_TE)


def train_one(data: Path, path: str, seed: int, out: Path) -> None:
    """Train, refit and test one model."""
    if path == "plain":
        TimeReadout.of_sum = _plain  # type: ignore[method-assign]
    config = preset("hstu-trope", [f"train.seed={seed}", "train.refit=true"])
    train(Sequences.load(data), config, out, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--csv", type=Path, help="table to write")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("PATH", "SEED", "OUT"), help="train one model; used by this script")
    options = parser.parse_args()
    if options.one:
        path, seed, out = options.one
        train_one(options.data, path, int(seed), Path(out))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = {(path, seed): Path(folder) / f"{path}-{seed}" for path in PATHS for seed in range(options.seeds)}
        line = [sys.executable, __file__, str(options.data), "--one"]
        started = [subprocess.Popen([*line, path, str(seed), str(out)]) for (path, seed), out in runs.items()]
        codes = [process.wait() for process in started]  # all of them, also behind one that failed
        if any(codes):
            raise SystemExit("a training failed")
        with options.csv.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            machine = environment.describe()
            table.writerow(["path", "seed", "best_epoch", "valid_HR@10", "test_Recall@10", "test_NDCG@10", *machine])
            for (path, seed), out in runs.items():
                found = json.loads((out / METRICS).read_text())
                scores = (found["valid"]["HR@10"], found["test"]["Recall@10"], found["test"]["NDCG@10"])
                table.writerow([path, seed, found["best_epoch"], *scores, *machine.values()])
    print(options.csv.read_text())


if __name__ == "__main__":
    main()
