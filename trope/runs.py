"""The run folder: what is written at its start, and what must still be so when a run is resumed.

    config.toml          the resolved config
    env.json             machine, versions, commit
    catalogue/           the items' original ids and names, for serving
    data.json            which dataset: path, checksum, protocol, counts
    log.jsonl            one line every so many steps, one an epoch
    checkpoints/, best/  see `trope.train.checkpoint`
    refit/               with train.refit: log.jsonl and checkpoints/ of the second training, whose model best/ then is
    ranks-test.npz       at the end: where best/ ranked each test positive, see `trope.evaluate.saved_ranks`
    metrics.json         at the end: validation of the best epoch, and test of the model in best/

Each file is whole or not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from trope import environment
from trope.atomic import atomic_file
from trope.config import Config
from trope.settings import read_saved_toml, to_dict, to_toml

CONFIG, ENVIRONMENT, DATA, METRICS, CATALOGUE = "config.toml", "env.json", "data.json", "metrics.json", "catalogue"
# How long to train may change from one part of a run to the next; what is trained may not.
_MAY_CHANGE = {"train.epochs", "train.min_epochs", "train.early_stop"}


class Dataset(Protocol):
    """What a run folder records of its dataset; `trope.data.sequences.Sequences` is one."""

    def describe(self) -> dict[str, Any]:
        """What identifies the dataset, and where it is."""

    def write_catalogue(self, folder: Path) -> None:
        """Copy the items' original ids and names into `folder`."""


def open_run(run: Path, data: Dataset, config: Config, resume: bool) -> None:
    """Make a run folder, or with `resume` check that it is of this config and this dataset.

    A folder where nothing has begun yet may be resumed as well, so that one command serves for every start.
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


def read_data(run: Path) -> dict[str, Any]:
    """What `Dataset.describe` said when the run began."""
    try:
        return json.loads((run / DATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{run} has no {DATA}; is it the folder of a run made by `trope train`?") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run / DATA} is damaged: {error}; copy the run again") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that is whole or not there."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
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
