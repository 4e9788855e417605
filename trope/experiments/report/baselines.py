"""The popularity baselines of a report. They are ranked once for a dataset and kept in baselines.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from trope.config import Config
from trope.data.sequences import Sequences
from trope.evaluate.baselines import NAMES, baselines, equal_baselines
from trope.evaluate.evaluation import rank_users
from trope.evaluate.saved_ranks import About
from trope.figures.run_files import NAMES as METRICS
from trope.figures.run_files import is_number
from trope.runs import write_json
from trope.train.distributed import process_group

NAME = "baselines.json"
Baselines = dict[str, dict[str, float]]


class Counted(NamedTuple):
    """Test metrics of the baselines, as fractions; and why some of them are equal, a sentence each."""

    metrics: Baselines
    equal: list[str]


def count_baselines(data: Sequences, config: Config, out: Path, device: str) -> Counted:
    """Rank the test by counting, or read what was ranked before; config: how it is ranked."""
    about = asdict(About.of(data, "test", config))
    path = out / NAME
    kept = _read(path, about)
    if kept is not None:
        return kept
    with process_group(device) as group:
        store = data.to(group.device)
        scorers = baselines(store, "test")
        metrics = {
            name: rank_users(scorer, store, "test", config.eval.filter_seen, config.model.max_len).metrics
            for name, scorer in scorers.items()
        }
        equal = equal_baselines(scorers, store, "test")
    write_json(path, {"about": about, "metrics": metrics, "equal": equal})
    return Counted(metrics, equal)


def _read(path: Path, about: dict[str, Any]) -> Counted | None:
    """What the file holds, or None where it is missing, damaged or about something else: then it is counted again."""
    try:
        found = json.loads(path.read_bytes())
        metrics, equal = found["metrics"], found["equal"]
        is_whole = (
            found["about"] == about
            and tuple(metrics) == NAMES
            and all(is_number(metrics[name][metric], 0, 1) for name in NAMES for metric in METRICS)
            and all(isinstance(sentence, str) for sentence in equal)
        )
    except (FileNotFoundError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return Counted(metrics, equal) if is_whole else None
