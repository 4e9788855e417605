"""Does another version of the code do the same? Checksums of prepared data, loss curves and metrics, to the last digit.

    python benchmarks/same_behaviour.py --code OLD_CHECKOUT --out /tmp/before.json
    python benchmarks/same_behaviour.py --code . --out /tmp/after.json --against /tmp/before.json

Only commands are used, so the two versions may be laid out differently. Everything runs on the CPU, one thread, in
a few minutes. What a run needs to be compared goes into the JSON file; times of day and durations do not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZE = (
    "model.width=32", "model.heads=2", "model.head_dim=16", "model.max_len=20", "train.epochs=3",
    "train.batch=32",
)  # fmt: skip
PREPARED = {
    "loo-strict": ("--protocol", "loo-strict"),
    "holdout": ("--protocol", "holdout", "--window", "60d"),
    "next-basket": ("--protocol", "next-basket"),
}
RUNS = {
    **{name: ("loo-strict", name, ()) for name in ("sasrec", "sasrec-trope", "tisasrec", "hstu", "hstu-time")},
    **{name: ("loo-strict", name, ()) for name in ("hstu-torope", "hstu-trope", "hstu-trope-paper")},
    "refit": ("holdout", "hstu-trope", ("train.refit=true",)),
    "full softmax": ("holdout", "hstu-trope", ("train.loss=full",)),
    "shared negatives": ("holdout", "hstu-time", ("train.shared_negatives=true", "train.negative_source=batch")),
    "next moment": ("next-basket", "hstu-trope", ("model.predicts=next-moment", "train.stride=10")),
    "clip, row moments": ("loo-strict", "hstu-trope", ("train.clip=1", "train.table_state=row")),
    "seen": ("loo-strict", "hstu-time", ("eval.filter_seen=history",)),
}


def trope(code: Path, *words: str) -> str:
    """Run one command of a version; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(code.resolve()), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "trope", *words], env=environment, cwd=code, text=True, capture_output=True
    )
    if done.returncode:
        raise SystemExit(f"trope {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def curve(run: Path) -> list[dict[str, float]]:
    """A run's log without durations, the second training of a refit behind the first."""
    files = [file for file in (run / "log.jsonl", run / "refit" / "log.jsonl") if file.is_file()]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def measure(code: Path, folder: Path) -> dict[str, Any]:
    """Everything that must not change."""
    log = folder / "shop.parquet"
    trope(code, "generate", "--users", "800", "--items", "150", "--seed", "0", "--out", str(log))
    found: dict[str, Any] = {"checksums": {}, "runs": {}}
    for name, options in PREPARED.items():
        trope(code, "prepare", str(log), "--out", str(folder / name), *options)
        found["checksums"][name] = json.loads((folder / name / "meta.json").read_text())["checksum"]
    for name, (data, model, settings) in RUNS.items():
        run = folder / "runs" / name.replace(" ", "-").replace(",", "")
        chosen = [word for setting in (*SIZE, *settings) for word in ("--set", setting)]
        trope(code, "train", str(folder / data), "--model", model, "--out", str(run), "--no-progress", *chosen)
        metrics = json.loads((run / "metrics.json").read_text())
        found["runs"][name] = {"curve": curve(run), **{split: metrics[split] for split in ("valid", "test")}}
        print(f"{name:<20} test HR@10 {metrics['test']['HR@10']!r}", flush=True)
    user = trope(code, "recommend", str(folder / "runs" / "hstu-trope"), "--user", "1", "--at", "2030-01-01")
    found["recommend"] = user.splitlines()
    return found


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths of values that are not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = before.keys() | after.keys()
        return [
            line for name in sorted(names) for line in differences(before.get(name), after.get(name), f"{path}/{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for i, (old, new) in pairs for line in differences(old, new, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, default=Path(), help="the checkout to run")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file of another version to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.code, Path(folder))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is not None:
        wrong = differences(json.loads(options.against.read_text()), found)
        print("\n".join(wrong[:40]) or "the same to the last digit")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
