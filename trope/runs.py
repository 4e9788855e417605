"""The run folder: the name of every file in it, what is written at the start, and what a resumed run must still match.

    config.toml          the resolved config
    env.json             machine, versions, commit
    catalogue/           the items' original ids and names, for serving; see `trope.data.catalogue`
    data.json            which dataset: path, checksum, protocol, counts
    log.jsonl            one line every so many steps, one an epoch
    tensorboard/         the same numbers, where TensorBoard is installed
    checkpoints/         to resume from; see `trope.train.checkpoint`
    best/                the model with the best validation; after a refit, the refitted model
    refit/               with train.refit: log.jsonl and checkpoints/ of the second training
    ranks-test.npz       at the end: where best/ ranked each test positive; see `trope.evaluate.saved_ranks`
    metrics.json         at the end: validation of the best epoch, and test of the model in best/
    output.txt           what the run printed, where a comparison started it; see `trope.experiments.pool`

A model folder (best/, and model/ in a checkpoint) holds model.safetensors, config.json and README.md.
Each file is whole or absent. No other module spells one of these names; tests/test_architecture.py checks it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from trope import environment
from trope.atomic import atomic_file
from trope.config import Config
from trope.settings import read_saved_toml, to_dict, to_toml

# Of a run.
CONFIG, ENVIRONMENT, DATA = "config.toml", "env.json", "data.json"
METRICS, RANKS = "metrics.json", "ranks-{split}.npz"
LOG, TENSORBOARD, OUTPUT = "log.jsonl", "tensorboard", "output.txt"
CATALOGUE, BEST, CHECKPOINTS, REFIT = "catalogue", "best", "checkpoints", "refit"
# Of a model folder.
WEIGHTS, MODEL_CONFIG, CARD = "model.safetensors", "config.json", "README.md"
# Of a checkpoint.
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "state.json"
# Of a catalogue, beside the arrays.
CATALOGUE_RECORD = "catalogue.json"

# How long to train may change from one part of a run to the next; what is trained may not.
_MAY_CHANGE = {"train.epochs", "train.min_epochs", "train.early_stop"}


class Dataset(Protocol):
    """What `open_run` needs of a dataset; `trope.data.sequences.Sequences` provides it."""

    def describe(self) -> dict[str, Any]:
        """Path, checksum, protocol and counts of the dataset."""

    def write_catalogue(self, folder: Path) -> None:
        """Copy the items' original ids and names into `folder`."""


def open_run(run: Path, data: Dataset, config: Config, resume: bool) -> None:
    """Make a run folder. With `resume`, check that an existing one has this config and this dataset.

    An empty folder may be resumed too, so the same command can start and continue a run.
    """
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"{run} exists and is not a folder; choose another --out")
    if not resume and run.exists() and any(run.iterdir()):
        raise FileExistsError(f"{run} is not empty; pass --resume to continue its run, or choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    # data.json is written last: with it, the rest is there.
    if (run / DATA).is_file():
        _check_config(run, config)
        _check_data(run, data.describe())
        write_text(run / CONFIG, to_toml(config))
        return
    write_text(run / CONFIG, to_toml(config))
    write_json(run / ENVIRONMENT, environment.describe())
    data.write_catalogue(run / CATALOGUE)
    write_json(run / DATA, data.describe())


def ranks_path(run: Path, split: str) -> Path:
    """Where a run keeps its ranks of a split, `valid` or `test`."""
    return run / RANKS.format(split=split)


def read_data(run: Path) -> dict[str, Any]:
    """What `Dataset.describe` returned when the run began."""
    try:
        return json.loads((run / DATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{run} has no {DATA}; is it the folder of a run made by `trope train`?") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run / DATA} is damaged: {error}; copy the run again") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _check_config(run: Path, config: Config) -> None:
    stored, given = to_dict(read_saved_toml(run / CONFIG, training=True).resolved), to_dict(config.resolved)
    changed = [
        f"{group}.{name} was {stored[group][name]!r}, now {value!r}"
        for group, entries in given.items()
        for name, value in entries.items()
        if value != stored[group][name] and f"{group}.{name}" not in _MAY_CHANGE
    ]
    if changed:
        raise ValueError(
            f"{run} was begun with another config: {'; '.join(changed)}; resume it as it was, or start anew"
        )


def _check_data(run: Path, given: dict[str, Any]) -> None:
    stored = read_data(run)
    advice = f"resume with {stored.get('path')}, or start a new run"
    for key, what in (("protocol", "protocol"), ("items", "number of items"), ("checksum", "checksum")):
        if stored.get(key) != given[key]:
            raise ValueError(
                f"{given['path']} is not the dataset that {run} was trained on: its {what} is {given[key]}, the run's "
                f"{stored.get(key)}; {advice}"
            )
