"""What was shown: the folder of an experiment's exposures, as the server writes it and the analysis reads it.

experiment.json        {"format": 1, "name", "salt", "started", "control", "arms": {name: {"share", "model"}}}
exposures-*.parquet    one row for each list that was shown; see `schema`. A file is whole or absent
.exposures-*.jsonl     rows that are not in a Parquet file yet (`trope.online.exposure_log`); readers ignore it
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trope.atomic import atomic_file
from trope.online.assignment import Experiment

FORMAT = 1
EXPERIMENT = "experiment.json"
PARQUET = "exposures-{}.parquet"


class Exposure(NamedTuple):
    """One list that was shown."""

    request_id: str
    experiment: str
    user_id: str
    arm: str
    moment: int  # Unix seconds that the list is for
    answered: float  # Unix seconds of the server's clock
    items: list[str]  # best first
    model: str  # version of the weights
    forced: bool  # the arm was asked for, not assigned; the analysis leaves such rows out


def arrow() -> Any:
    """The module pyarrow, or one line that says how to get it."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ValueError(
            "exposures are written with pyarrow, which is not installed: pip install 'trope[data]'"
        ) from None
    return pyarrow


def schema() -> Any:
    """Arrow types of the columns of `Exposure`."""
    pa = arrow()
    types = {"moment": pa.int64(), "answered": pa.float64(), "items": pa.list_(pa.string()), "forced": pa.bool_()}
    return pa.schema([(name, types.get(name, pa.string())) for name in Exposure._fields])


def write_parquet(path: Path, table: Any) -> None:
    """Write a table with the columns of `schema`; the file is whole or absent."""
    arrow()
    import pyarrow.parquet as pq

    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def write_experiment(folder: Path, experiment: Experiment, models: Mapping[str, str]) -> None:
    """Write experiment.json. models: version of the weights, by arm."""
    arms = {arm: {"share": share, "model": models[arm]} for arm, share in experiment.shares.items()}
    said = {
        "format": FORMAT, "name": experiment.name, "salt": experiment.salt, "started": experiment.started,
        "control": experiment.control,
    }  # fmt: skip
    with atomic_file(folder / EXPERIMENT) as partial:
        partial.write_text(json.dumps({**said, "arms": arms}, indent=2) + "\n", encoding="utf-8")


def begin_experiment(
    folder: Path, name: str, arms: Mapping[str, float], now: int, models: Mapping[str, str]
) -> Experiment:
    """Open the experiment of a folder and write down its models; servers that begin together agree on the start."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder with --exposures")
    folder.mkdir(parents=True, exist_ok=True)
    experiment = open_experiment(folder, name, arms, now)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as fresh:
        write_experiment(Path(fresh), experiment, models)
        # Unlike a rename, a link never replaces. A disk without links has the file from `write_experiment` below.
        with contextlib.suppress(OSError):
            (folder / EXPERIMENT).hardlink_to(Path(fresh) / EXPERIMENT)
    experiment = open_experiment(folder, name, arms, now)
    write_experiment(folder, experiment, models)
    return experiment


def read_experiment(folder: Path) -> Experiment | None:
    """The experiment of a folder; None where there is none yet."""
    path = folder / EXPERIMENT
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise ValueError(f"its format is {said['format']}")
        shares = {str(arm): float(told["share"]) for arm, told in said["arms"].items()}
        return Experiment(said["name"], shares, int(said["started"]), said["salt"])
    except (FileNotFoundError, NotADirectoryError):  # `begin_experiment` refuses a file
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not an experiment that this version of trope knows ({type(error).__name__}: {error}); name "
            "another folder with --exposures"
        ) from None


def open_experiment(folder: Path, name: str, arms: Mapping[str, float], now: int) -> Experiment:
    """The experiment that goes on in a folder, or a new one that starts now; its salt is its name.

    A folder holds one experiment with one set of shares: the analysis compares users by the shares that it reads.
    """
    new = Experiment(name, dict(arms), now, salt=name)
    old = read_experiment(folder)
    if old is None:
        return new
    if old.name != name:
        raise ValueError(f"{folder} holds the exposures of experiment {old.name}; name another folder with --exposures")
    if not _are_equal(old.shares, new.shares):
        raise ValueError(
            f"experiment {name} in {folder} has the shares {_said(old)}, got {_said(new)}; keep them, or name another "
            "folder with --exposures: users of an old arm stay in it or move to a new one"
        )
    # In the order of the file: its first arm is the control, in whatever order a restart names them.
    return Experiment(name, {arm: new.arms[arm] for arm in old.arms}, old.started, old.salt)


def _are_equal(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[arm] - other[arm]) < 1e-9 for arm in one)


def _said(experiment: Experiment) -> str:
    return ", ".join(f"{arm} {share:.4g}" for arm, share in experiment.shares.items())
