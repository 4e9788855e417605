"""What a run says of itself, checked before it is shown: metrics.json, env.json, log.jsonl.

`trope.runs` reads the files and checks types and seals. Here values are checked as well, since an older or edited file
has no seal, and every number of it is printed or drawn. A damaged file is refused with one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

from trope import runs
from trope.config import EvalConfig
from trope.evaluate.metrics import CUTOFFS
from trope.runs import ENVIRONMENT, LOG, METRICS, WITH_COUNTING, parse_json

NAMES = (*(f"{kind}@{cutoff}" for kind in ("HR", "Recall", "NDCG") for cutoff in CUTOFFS), "MRR")
"""The metrics of every run."""
HUGE = 1e15
"""No count or duration of a run is larger."""


def read_metrics(run: Path) -> dict[str, Any]:
    """metrics.json of a finished run."""
    path, found = run / METRICS, runs.read_metrics(run)
    filters = get_args(get_type_hints(EvalConfig)["filter_seen"])
    _check(path, is_whole(found["epochs"], 1), "epochs", "a whole number from 1 on", found)
    _check(path, is_whole(found["best_epoch"], 1, found["epochs"]), "best_epoch", "one of its epochs", found)
    _check(path, is_whole(found["steps"], 0), "steps", "a whole number", found)
    _check(path, is_number(found["seconds"], 0), "seconds", "a number from 0 on", found)
    _check(path, found["filter_seen"] in filters, "filter_seen", f"one of {', '.join(filters)}", found)
    for split in ("valid", "test", *({WITH_COUNTING} & found.keys())):
        wrong = next((name for name in NAMES if not is_number(found[split].get(name), 0, 1)), None)
        if wrong is not None:
            raise _damaged(path, f"{split} has no {wrong} between 0 and 1")
    return found


def read_environment(run: Path) -> dict[str, str]:
    """env.json: machine, versions and commit, as text."""
    path, found = run / ENVIRONMENT, runs.read_environment(run)
    for name, value in found.items():
        _check(path, isinstance(value, str), name, "text", found)
    return found


def read_epochs(run: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl that end an epoch; [] without a log. A last line that a kill cut short is none."""
    path = run / LOG
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else (), start=1):
        try:
            row = parse_row(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                continue
            raise _damaged(path, f"line {number}: {error}") from None
        if "epoch_loss" in row:
            rows.append(row)
    return rows


def parse_row(line: bytes) -> dict[str, Any]:
    """One line of log.jsonl: names with values, the number of its epoch among them; what is shown are numbers."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"it holds {_short(row)} instead of names with values")
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


def _check(path: Path, is_right: bool, name: str, wanted: str, found: dict[str, Any]) -> None:
    if not is_right:
        raise _damaged(path, f"{name} must be {wanted}, got {_short(found[name])}")


def _short(value: object) -> str:
    """A value for an error line, cut where it is long."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged or foreign: {why}; copy the run again")
