"""The counting baselines of a report. They are ranked once for a dataset and kept in baselines.json."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate.baselines import NAMES
from trope.evaluate.saved_ranks import About
from trope.evaluate.streamed_baselines import rank_baselines
from trope.figures.run_files import NAMES as METRICS
from trope.figures.run_files import is_number
from trope.runs import read_json, seal, write_json
from trope.train.distributed import process_group

NAME = "baselines.json"
Baselines = dict[str, dict[str, float]]
_KINDS: dict[str, Any] = {
    "about": dict, "metrics": dict[str, dict[str, float]], "equal": list[str], "half_lives": dict[str, int],
}  # fmt: skip


class Counted(NamedTuple):
    """Test metrics of the baselines, as fractions; why some of them are equal; half-lives that validation chose."""

    metrics: Baselines
    equal: list[str]  # a sentence each
    half_lives: dict[str, int]  # seconds, by the name of the baseline


def count_baselines(data: Sequences | Stream, config: Config, out: Path, device: str) -> Counted:
    """Rank the test by counting, or read what was ranked before; config: how it is ranked, and the criterion."""
    about = {**asdict(About.of(data, "test", config)), "criterion": config.train.criterion}
    path = out / NAME
    kept = _read(path, about)
    if kept is not None:
        return kept
    with process_group(device) as group:
        store = data.to(group.device)
        ranked = rank_baselines(store, "test", config)
        metrics = {name: result.metrics for name, result in ranked.results.items()}
        counted = Counted(metrics, ranked.equal, ranked.half_lives)
    write_json(path, seal({"about": about, **counted._asdict()}))
    return counted


def _read(path: Path, about: dict[str, Any]) -> Counted | None:
    """What the file holds, or None where it is missing, damaged or about something else: then it is counted again."""
    try:
        found = read_json(path, _KINDS, "count again")
    except (FileNotFoundError, ValueError):
        return None
    metrics, half_lives = found["metrics"], found["half_lives"]
    names = (*NAMES, *half_lives)
    is_whole = tuple(metrics) == names and all(is_number(metrics[n].get(m), 0, 1) for n in names for m in METRICS)
    return Counted(metrics, found["equal"], half_lives) if is_whole and found["about"] == about else None
