"""The popularity baselines of a report. They are ranked once for a dataset and kept in baselines.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from trope.config import Config
from trope.data.sequences import Sequences
from trope.evaluate.baselines import NAMES, baselines
from trope.evaluate.evaluation import rank_users
from trope.evaluate.saved_ranks import About
from trope.runs import write_json
from trope.train.distributed import process_group

NAME = "baselines.json"


def baseline_metrics(data: Sequences, config: Config, out: Path, device: str) -> dict[str, dict[str, float]]:
    """Test metrics of the baselines, as fractions; config: how they are ranked."""
    about = asdict(About.of(data, "test", config))
    path = out / NAME
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] == about and tuple(found["metrics"]) == NAMES:
            return found["metrics"]
    with process_group(device) as group:
        store = data.to(group.device)
        metrics = {
            name: rank_users(scorer, store, "test", config.eval.filter_seen, config.model.max_len).metrics
            for name, scorer in baselines(store, "test").items()
        }
    write_json(path, {"about": about, "metrics": metrics})
    return metrics
