"""What an experiment promised before it began: `experiment.json`, beside the exposures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trope.data.events import FAR_FUTURE
from trope.runs import parse_json

RECORD = "experiment.json"
FORMAT = 1


@dataclass(frozen=True)
class Arm:
    """share: of the users, all shares sum to 1. model: the version that the arm serves."""

    share: float
    model: str


@dataclass(frozen=True)
class Experiment:
    """started: Unix seconds of the first assignment. control: the arm that the others are compared with."""

    name: str
    started: int
    arms: dict[str, Arm]
    control: str

    @property
    def treatments(self) -> list[str]:
        return [arm for arm in self.arms if arm != self.control]

    @property
    def names(self) -> list[str]:
        """The arms, control first."""
        return [self.control, *self.treatments]


def read_experiment(folder: Path, control: str | None = None) -> Experiment:
    """The experiment of a folder of exposures.

    control: the name of an arm, by default the one that the file names; in older files `control` or the first arm.
    """
    path = folder / RECORD
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}; EXPOSURES is the folder that `trope serve --exposures` wrote")
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        inside = sorted(file.parent for file in folder.glob(f"*/{RECORD}"))
        hint = f"did you mean {inside[0]}?" if inside else "is it a folder of exposures?"
        raise FileNotFoundError(f"{folder} has no {RECORD}; {hint}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; copy it again from the server") from None
    found = content if isinstance(content, dict) else {}
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')!r}, and this version reads {FORMAT}; update trope")
    name, started = found.get("name"), found.get("started")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} has no name of the experiment; got {name!r}")
    if isinstance(started, bool) or not isinstance(started, (int, float)) or started <= 0:
        raise ValueError(f"{path}: started must be Unix seconds, got {started!r}")
    if started >= FAR_FUTURE:
        raise ValueError(f"{path}: started {started:.0f} is after the year 2099; write seconds, not milliseconds")
    arms = _arms(path, found.get("arms"))
    return Experiment(name, math.floor(started), arms, _control(path, list(arms), control, found.get("control")))


def _arms(path: Path, found: Any) -> dict[str, Arm]:
    if not isinstance(found, dict) or len(found) < 2:
        raise ValueError(f"{path} must name two arms or more under arms, got {found!r}")
    shares: dict[str, float] = {}
    for name, arm in found.items():
        share = arm.get("share") if isinstance(arm, dict) else None
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not (0 < share < math.inf):
            raise ValueError(f"{path}: the share of arm {name!r} must be above 0, got {share!r}")
        shares[name] = float(share)
    total = math.fsum(shares.values())
    return {name: Arm(share / total, str(found[name].get("model", ""))) for name, share in shares.items()}


def _control(path: Path, arms: list[str], asked: str | None, written: Any) -> str:
    if asked is None and written is not None:
        if written not in arms:
            raise ValueError(f"{path}: control {written!r} is no arm; there are {', '.join(arms)}")
        return str(written)
    if asked is None:
        return "control" if "control" in arms else arms[0]
    if asked not in arms:
        raise ValueError(f"--control {asked!r} is no arm of {path}; there are {', '.join(arms)}")
    return asked
