"""The run folder: the name of every file in it, what is written at the start, and what a resumed run must still match.

    config.toml          the resolved config
    env.json             machine, versions, commit
    catalogue/           the items' original ids, names and counts, for serving; see `trope.data.catalogue`
    data.json            which dataset: path, checksum, protocol, counts
    log.jsonl            one line every so many steps, one an epoch
    tensorboard/         the same numbers, where TensorBoard is installed
    checkpoints/         to resume from; see `trope.train.checkpoint`
    best/                the model with the best validation; after a refit, the refitted model
    lineage.json         of `trope fit` and `trope update`: the run it came from, and that run's own lineage
    data/                of `trope update`: the dataset with the new events, unless --data-out says where
    pulse.json           with model.pulse: its weights, and what they gained on validation; see `trope.train.pulse`
    counting.json        the control "MODEL + counting", as validation chose it; see `trope.evaluate.counting`. A run
                         with a fitted pulse has none, nor has one that was refitted before there was this control
    refit/               with train.refit: log.jsonl and checkpoints/ of the second training
    ranks-test.npz       at the end: where best/ ranked each test positive; see `trope.evaluate.saved_ranks`
    metrics.json         at the end: validation of the best epoch, and test of the model in best/; with counting.json
                         also of that model plus counting
    output.txt           what the run printed, where a comparison started it; see `trope.experiments.pool`
    events.sqlite        events that `trope serve` was told, unless --store says where; see `trope.server.store`
    .lock                held by the process that trains; see `RunLock`

A model folder (best/, and model/ in a checkpoint) holds model.safetensors, config.json and README.md.
Each file is whole or absent. No other module spells one of these names; tests/test_architecture.py checks it.

config.json, data.json, state.json, catalogue.json, pulse.json, counting.json, lineage.json and metrics.json are sealed:
they hold the SHA-256 of their own content, and config.json and state.json that of the tensor files beside them.
`read_json` refuses what was changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import types
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Protocol

from trope import environment
from trope.atomic import atomic_file
from trope.config import Config
from trope.settings import check_type, read_saved_toml, to_dict, to_toml
from trope.times import say_duration, say_moment

# Of a run.
CONFIG, ENVIRONMENT, DATA = "config.toml", "env.json", "data.json"
METRICS, RANKS = "metrics.json", "ranks-{split}.npz"
LOG, TENSORBOARD, OUTPUT, LOCK = "log.jsonl", "tensorboard", "output.txt", ".lock"
CATALOGUE, BEST, CHECKPOINTS, REFIT = "catalogue", "best", "checkpoints", "refit"
PULSE, COUNTING = "pulse.json", "counting.json"
LINEAGE, OWN_DATA = "lineage.json", "data"
SERVED_EVENTS = "events.sqlite"
# Of a model folder.
WEIGHTS, MODEL_CONFIG, CARD = "model.safetensors", "config.json", "README.md"
# Of a checkpoint.
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "state.json"
ITEMS = "items-{index:05d}-of-{count:05d}.safetensors"
# Of a catalogue, beside the arrays.
CATALOGUE_RECORD = "catalogue.json"

# How long to train may change from one part of a run to the next; what is trained may not.
_MAY_CHANGE = {"train.epochs", "train.early_stop"}
# The name of a sealed file's own SHA-256, in it.
_SEAL = "sha256"
# Nothing of ours is nested deeper than five; json's own limit is that of Python's stack.
_DEEPEST = 32
_DATA_KINDS: dict[str, Any] = {
    "path": str, "checksum": str, "protocol": dict, "protocol.name": str, "items": int, "users": int, "events": int,
}  # fmt: skip
_METRICS_KINDS: dict[str, Any] = {
    "valid": dict[str, float], "test": dict[str, float], "best_epoch": int, "epochs": int, "steps": int,
    "seconds": float, "filter_seen": str, "data": dict,
}  # fmt: skip
WITH_COUNTING = "test_with_counting"
"""In metrics.json, where the run has that control: the test metrics of "MODEL + counting"."""
_LINEAGE_KINDS: dict[str, Any] = {
    "kind": str, "parent": dict, "parent.path": str, "parent.sha256": str, "parent.commit": str,
    "ancestors": list[dict], "data": str, "events_added": int, "steps": int, "recipe": dict,
    "recipe.factors": list[float], "recipe.valid": dict[str, float], "recipe.test": dict[str, float],
}  # fmt: skip
# What a file system without locks says.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Dataset(Protocol):
    """What `open_run` needs of a dataset; `trope.data.sequences.Sequences` provides it."""

    def describe(self) -> dict[str, Any]:
        """Path, checksum, protocol and counts of the dataset."""

    def write_catalogue(self, folder: Path) -> None:
        """Copy the items' original ids and names into `folder`."""


class RunLock:
    """At most one process trains into a run folder: a lock that is taken by `open_run` and dies with its process."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, run: Path) -> None:
        """Take the lock of a run folder, or refuse."""
        try:
            import fcntl
        except ImportError:
            return  # Windows has none; two trainings into one folder are then not noticed
        descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 100, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return
            raise BlockingIOError(
                f"another process ({holder or 'unknown'}) trains into {run}; wait until it ends, or stop it first"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        self._descriptor = descriptor

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # the file stays: removed, a third process could lock a name that a second holds


def open_run(
    run: Path,
    data: Dataset,
    config: Config,
    resume: bool,
    lock: RunLock | None = None,
    lineage: dict[str, Any] | None = None,
) -> None:
    """Make a run folder. With `resume`, check that an existing one has this config and this dataset.

    An empty folder may be resumed too, so the same command can start and continue a run. lock: taken before anything
    is read or written. lineage: of a run that follows another one; a run of another command, or another run's child,
    is not resumed.
    """
    check_out(run, resume)
    run.mkdir(parents=True, exist_ok=True)
    if lock is not None:
        lock.take(run)
    # data.json is written last: with it, the rest is there.
    if (run / DATA).is_file():
        _check_lineage(run, lineage)
        _check_config(run, config)
        _check_data(run, data.describe())
        write_text(run / CONFIG, to_toml(config))
        return
    write_text(run / CONFIG, to_toml(config))
    write_json(run / ENVIRONMENT, environment.describe())
    data.write_catalogue(run / CATALOGUE)
    if lineage is not None:
        write_json(run / LINEAGE, seal(lineage))
    write_json(run / DATA, seal(data.describe()))


def check_out(run: Path, resume: bool) -> None:
    """Refuse to train into a file, or without `resume` into a folder that has something in it."""
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"{run} exists and is not a folder; choose another --out")
    if not resume and run.exists() and any(run.iterdir()):
        raise FileExistsError(f"{run} is not empty; pass --resume to continue its run, or choose another --out")


def ranks_path(run: Path, split: str) -> Path:
    """Where a run keeps its ranks of a split, `valid` or `test`."""
    return run / RANKS.format(split=split)


def read_data(run: Path) -> dict[str, Any]:
    """What `Dataset.describe` returned when the run began."""
    try:
        return read_json(run / DATA, _DATA_KINDS, "copy the run again")
    except FileNotFoundError:
        raise FileNotFoundError(f"{run} has no {DATA}; is it the folder of a run made by `trope train`?") from None


def say_protocol(protocol: Mapping[str, Any]) -> str:
    """A protocol of data.json or meta.json in words."""
    cutoff, window = protocol.get("cutoff"), protocol.get("window")
    if not (isinstance(cutoff, int) and isinstance(window, int)):
        return str(protocol["name"])
    return f"{protocol['name']}, {say_duration(window)} from {say_moment(cutoff)}"


def read_metrics(run: Path) -> dict[str, Any]:
    """What a finished run wrote at its end."""
    advice = "copy the run again, or resume it to test the model again"
    found = read_json(run / METRICS, _METRICS_KINDS, advice)
    if WITH_COUNTING in found:
        check_kinds(run / METRICS, found, {WITH_COUNTING: dict[str, float]}, advice)
    return {name: value for name, value in found.items() if name in (*_METRICS_KINDS, "refit", WITH_COUNTING)}


def read_lineage(run: Path) -> dict[str, Any] | None:
    """Where a run of `trope fit` or `trope update` comes from; None for a run of `trope train`."""
    if not (run / LINEAGE).is_file():
        return None
    return read_json(run / LINEAGE, _LINEAGE_KINDS, "copy the run again")


def read_environment(run: Path) -> dict[str, Any]:
    """Machine, versions and commit of a run."""
    return read_json(run / ENVIRONMENT, {}, "copy the run again")


def read_json(path: Path, kinds: Mapping[str, Any], advice: str) -> dict[str, Any]:
    """The names and values of a JSON file that may be damaged or come from anywhere; refused if its seal does not fit.

    kinds: the type of each name that must be there; "counts.items" is a name inside another. advice: what to do about
    a bad file. Files of older versions have no seal; what those hold is checked by `kinds` alone.
    """
    text = path.read_bytes()
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} instead of names with values")
        found = content.pop(_SEAL, None)
        if found is not None and found != _digest(content):
            raise ValueError("it does not match its own checksum, so it was edited or damaged")
    except ValueError as error:
        raise ValueError(f"{path} is damaged or foreign: {error}; {advice}") from None
    check_kinds(path, content, kinds, advice)
    return content


def check_kinds(path: Path, content: dict[str, Any], kinds: Mapping[str, Any], advice: str) -> None:
    """Refuse what a file holds if a name is missing or its value of another type; see `read_json`."""
    try:
        for name, kind in kinds.items():
            check_type(_inside(content, name), kind, name)
    except ValueError as error:
        raise ValueError(f"{path} is damaged or foreign: {error}; {advice}") from None


def parse_json(text: bytes) -> Any:
    """Strict JSON in UTF-8; whatever else it may be, the error is a ValueError."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_number, parse_float=_number, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _values(outer)]
    if level:
        raise ValueError(f"it is nested deeper than {_DEEPEST}")
    json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could not be printed
    return value


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its own SHA-256, which `read_json` checks and takes away."""
    return {**content, _SEAL: _digest(content)}


def log_row(line: bytes) -> dict[str, Any] | None:
    """One line of a log.jsonl, or None if it is no row: a kill cuts lines short, a bad disk changes them."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and all(type(row.get(name)) is int for name in ("step", "epoch"))
    return row if is_row else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def changed_settings(stored: Config, given: Config, may_change: Container[str] = _MAY_CHANGE) -> list[str]:
    """What makes `given` another training than `stored`, each as a phrase; by default how long to train may differ."""
    before, now = to_dict(stored.resolved), to_dict(given.resolved)
    return [
        f"{group}.{name} was {before[group][name]!r}, now {value!r}"
        for group, entries in now.items()
        for name, value in entries.items()
        if value != before[group][name] and f"{group}.{name}" not in may_change
    ]


def check_model_config(run: Path, config: Config) -> None:
    """Refuse a run whose config.toml is not that of its model, whose own config is sealed."""
    changed = changed_settings(config, read_saved_toml(run / CONFIG))
    if changed:
        raise ValueError(
            f"{run / CONFIG} is not the config of the model in {run / BEST}: {'; '.join(changed)}; copy the run again"
        )


def _check_config(run: Path, config: Config) -> None:
    changed = changed_settings(read_saved_toml(run / CONFIG, training=True), config)
    if changed:
        raise ValueError(
            f"{run} was begun with another config: {'; '.join(changed)}; resume it as it was, or start anew"
        )


def _check_lineage(run: Path, given: dict[str, Any] | None) -> None:
    stored = read_lineage(run)
    made, wanted = ("train" if each is None else str(each["kind"]) for each in (stored, given))
    if made != wanted:
        raise ValueError(f"{run} was made by `trope {made}`, not by `trope {wanted}`; choose another --out")
    if stored and given and stored["parent"]["sha256"] != given["parent"]["sha256"]:
        raise ValueError(
            f"{run} was begun from the model of {stored['parent']['path']}, not from that of "
            f"{given['parent']['path']}; resume it as it was, or choose another --out"
        )


def _check_data(run: Path, given: dict[str, Any]) -> None:
    stored = read_data(run)
    advice = f"resume with {stored.get('path')}, or start a new run"
    stored, given = ({**each, "protocol": say_protocol(each["protocol"])} for each in (stored, given))
    for key, what in (("protocol", "protocol"), ("items", "number of items"), ("checksum", "checksum")):
        if stored.get(key) != given[key]:
            raise ValueError(
                f"{given['path']} is not the dataset that {run} was trained on: its {what} is {given[key]}, the run's "
                f"{stored.get(key)}; {advice}"
            )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"a number has {len(text)} digits")
    return value


def _values(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _inside(content: dict[str, Any], name: str) -> Any:
    """The value of "outer.inner"."""
    value: Any = content
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"it has no {name}")
        value = value[part]
    return value
