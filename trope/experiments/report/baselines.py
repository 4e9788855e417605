"""The popularity baselines of a report. They are ranked once for a dataset and kept in baselines.json."""

from __future__ import annotations

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
from trope.runs import read_json, seal, write_json
from trope.train.distributed import process_group

NAME = "baselines.json"
Baselines = dict[str, dict[str, float]]
_KINDS: dict[str, Any] = {"about": dict, "metrics": dict[str, dict[str, float]], "equal": list[str]}


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
    write_json(path, seal({"about": about, "metrics": metrics, "equal": equal}))
    return Counted(metrics, equal)


def _read(path: Path, about: dict[str, Any]) -> Counted | None:
    """What the file holds, or None where it is missing, damaged or about something else: then it is counted again."""
    try:
        found = read_json(path, _KINDS, "count again")
    except (FileNotFoundError, ValueError):
        return None
    metrics = found["metrics"]
    is_whole = tuple(metrics) == NAMES and all(is_number(metrics[n].get(m), 0, 1) for n in NAMES for m in METRICS)
    return Counted(metrics, found["equal"]) if is_whole and found["about"] == about else None
