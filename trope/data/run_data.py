"""What a store and a stream tell of their dataset. A run's dataset: where it is now, and that it is the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from trope.data.folder import Ids, read_ids
from trope.data.protocols import Protocol as Split
from trope.runs import OWN_DATA, read_data


class Dataset(Protocol):
    """What `Sequences` and `Stream` tell of themselves."""

    path: Path
    meta: dict[str, Any]
    protocol: Split

    @property
    def num_items(self) -> int: ...

    @property
    def num_users(self) -> int: ...

    @property
    def num_events(self) -> int: ...


def describe_data(data: Dataset) -> dict[str, Any]:
    """What identifies a dataset, and its path. A run records it in data.json."""
    return {
        "path": str(data.path.resolve()),
        "checksum": data.meta["checksum"],
        "protocol": data.protocol.to_dict(),
        "items": data.num_items,
        "users": data.num_users,
        "events": data.num_events,
    }


def ids_of(data: Dataset, name: str) -> Ids | None:
    """Original `user_ids`, `item_ids` (position 0 is dense item 1), `item_names` or `basket_ids`, if stored."""
    found = read_ids(data.path, name, data.meta)
    expected = {"user_ids": data.num_users, "item_ids": data.num_items, "item_names": data.num_items}
    if found is not None and len(found) != expected.get(name, len(found)):
        raise ValueError(f"{data.path} has {len(found):,} {name}, expected {expected[name]:,}; prepare the data again")
    return found


def folder_of_run(run: Path, path: Path | None) -> Path:
    """Where the dataset of a run is; path: where it is now, if it has moved since."""
    if path is None:
        # An updated run that has moved took its dataset along.
        here = (Path(read_data(run)["path"]), run / OWN_DATA)
        path = next((folder for folder in here if folder.is_dir()), here[0])
    if not path.is_dir():
        raise FileNotFoundError(f"the dataset of {run} is not at {path}; say where it is with --data")
    return path


def check_run_data(run: Path, path: Path, meta: dict[str, Any]) -> None:
    """Refuse another dataset than the one that a run was trained on."""
    recorded = read_data(run)
    if meta["checksum"] != recorded["checksum"]:
        raise ValueError(
            f"{path} is not the dataset that {run} was trained on: its checksum is {meta['checksum'][:12]}..., "
            f"the run's {recorded['checksum'][:12]}...; give the right one with --data"
        )
