"""Runs that look finished, with ranks that a test chooses: what a report needs, without a training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from trope.data.sequences import Sequences
from trope.evaluate import saved_ranks
from trope.evaluate.evaluation import EvalResult
from trope.evaluate.metrics import Places
from trope.experiments.pool import Run, Variant, plan
from trope.runs import write_json, write_text
from trope.settings import to_toml

ENVIRONMENT = {
    "device": "NVIDIA H200", "trope": "0.1.0", "torch": "2.11", "triton": "3.6", "cuda": "13", "python": "3.12",
    "commit": "abc123", "date": "2026-11-15",
}  # fmt: skip


def positives(data: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Test users and the offsets of their distinct positives."""
    users = data.eval_users("test")
    batch = data.eval_batch("test", users, 1)
    ends = batch.positive_offsets.tolist()
    sizes = [len(set(batch.positives[a:b].tolist())) for a, b in pairwise(ends)]
    return users.numpy(), np.concatenate(([0], np.cumsum(sizes)))


def finish(
    data: Sequences, variants: Sequence[Variant], seeds: int, out: Path, better: Callable[[Run, int], np.ndarray]
) -> list[Run]:
    """Write every run as if trained; better(run, count): how many items were scored above each positive."""
    users, offsets = positives(data)
    runs = plan(variants, range(seeds), out)
    for run in runs:
        places = np.asarray(better(run, int(offsets[-1])), dtype=np.int64)
        result = EvalResult(users, Places(places, np.zeros_like(places), offsets))
        run.folder.mkdir(parents=True)
        saved_ranks.save(run.folder, result, saved_ranks.About.of(data, "test", run.config))
        write_text(run.folder / "config.toml", to_toml(run.config))
        write_json(run.folder / "env.json", ENVIRONMENT)
        write_json(run.folder / "data.json", data.describe())
        valid = {metric: value / 2 for metric, value in result.metrics.items()}
        summary = {
            "valid": valid, "test": result.metrics, "best_epoch": 3, "epochs": 4, "steps": 40, "seconds": 10.0,
            "filter_seen": run.config.eval.filter_seen, "data": data.describe(),
        }  # fmt: skip
        (run.folder / "metrics.json").write_text(json.dumps(summary))
    return runs
