"""Reads what a run says of itself: metrics.json, env.json, log.jsonl. A damaged file is refused with one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trope.config import EvalConfig
from trope.evaluate.metrics import CUTOFFS
from trope.runs import ENVIRONMENT, LOG, METRICS

NAMES = (*(f"{kind}@{cutoff}" for kind in ("HR", "Recall", "NDCG") for cutoff in CUTOFFS), "MRR")
"""The metrics of every run."""
HUGE = 1e15
"""No count or duration of a run is larger."""


def read_metrics(run: Path) -> dict[str, Any]:
    """metrics.json of a finished run, every value checked."""
    path = run / METRICS
    found = _parse(path.read_bytes(), path)
    _check(path, is_whole(found.get("epochs"), 1), "epochs", "a whole number from 1 on", found)
    _check(path, is_whole(found.get("best_epoch"), 1, found["epochs"]), "best_epoch", "one of its epochs", found)
    _check(path, is_whole(found.get("steps"), 0), "steps", "a whole number", found)
    _check(path, is_number(found.get("seconds"), 0), "seconds", "a number", found)
    filters = get_args(get_type_hints(EvalConfig)["filter_seen"])
    _check(path, found.get("filter_seen") in filters, "filter_seen", f"one of {', '.join(filters)}", found)
    _check(path, isinstance(found.get("data"), dict), "data", "an object", found)
    for split in ("valid", "test"):
        values = found.get(split)
        _check(path, isinstance(values, dict), split, "an object", found)
        wrong = next((name for name in NAMES if not is_number(found[split].get(name), 0, 1)), None)
        if wrong is not None:
            raise _damaged(path, f"{split} has no {wrong} between 0 and 1")
    return found


def read_environment(run: Path) -> dict[str, str]:
    """env.json: machine, versions and commit, as text."""
    path = run / ENVIRONMENT
    found = _parse(path.read_bytes(), path)
    for name, value in found.items():
        _check(path, isinstance(value, str), name, "text", found)
    return found


def read_epochs(run: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl that end an epoch; [] without a log. A last line that a kill cut short is none."""
    path = run / LOG
    rows = []
    for number, line, is_whole_line in _lines(path):
        try:
            row = parse_row(line)
        except ValueError as error:
            if not is_whole_line:
                continue
            raise _damaged(path, f"line {number}: {error}") from None
        if "epoch_loss" in row:
            rows.append(row)
    return rows


def parse_row(line: bytes) -> dict[str, Any]:
    """One line of log.jsonl: an object with the number of its epoch; what is shown of it are finite numbers."""
    row = _object(line)
    if not is_whole(row.get("epoch"), 0):
        raise ValueError(f"epoch must be a whole number, got {_short(row.get('epoch'))}")
    for name in ("seconds", "epoch_loss", *NAMES):
        if name in row and not is_number(row[name]):
            raise ValueError(f"{name} must be a number, got {_short(row[name])}")
    return row


def is_number(value: object, least: float = -HUGE, most: float = HUGE) -> bool:
    """Whether a value of a JSON file is a number in a range; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_whole(value: object, least: int, most: float = HUGE) -> bool:
    """Whether a value of a JSON file is a whole number in a range."""
    return isinstance(value, int) and is_number(value, least, most)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """The number of each line from 1, the line, and whether it ends as a line does."""
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            yield number, line, line.endswith(b"\n")


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return _object(content)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def _object(content: bytes) -> dict[str, Any]:
    """The object in a JSON text; ValueError where it is something else."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it must be an object, got {_short(found)}")
    return found


def _check(path: Path, is_right: bool, name: str, wanted: str, found: dict[str, Any]) -> None:
    if not is_right:
        raise _damaged(path, f"{name} must be {wanted}, got {_short(found[name]) if name in found else 'nothing'}")


def _short(value: object) -> str:
    """A value for an error line, cut where it is long."""
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}; copy the run again")
