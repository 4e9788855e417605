"""The catalogue in a run folder: original ids and names of the items that the model was trained on.

    RUN/catalogue/item_ids*.npy, item_names*.npy   copies of the dataset's files (see `trope.data.folder`)
    RUN/catalogue/item_counts.npy                  how often each item was chosen in training
    RUN/catalogue/catalogue.json                   size and SHA-256 of each of them

A run with its catalogue can be served without the dataset.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trope.data import folder as files
from trope.runs import CATALOGUE_RECORD, check_kinds, read_json, seal, write_json

FORMAT = 1
COPIED = ("item_ids", "item_names")


class Catalogue:
    """The items a model knows, by dense id from 1.

    item_names: "" where an item has none. item_counts: [V], None where an older version saved the run.
    """

    def __init__(
        self, item_ids: files.Ids, item_names: files.Ids | None, item_counts: npt.NDArray[np.int64] | None = None
    ) -> None:
        self.item_ids = item_ids
        self.item_names = item_names
        self.item_counts = item_counts
        originals = item_ids.to_list()
        self.is_text = bool(originals) and isinstance(originals[0], str)
        self._dense = {original: dense for dense, original in enumerate(originals, start=1)}
        others = [len(found) for found in (item_names, item_counts) if found is not None]
        if len(self._dense) < len(originals) or any(count != len(originals) for count in others):
            raise ValueError("the catalogue's ids, names and counts are not one for each item; copy the run again")

    @classmethod
    def load(cls, folder: Path) -> Catalogue:
        """Read what `write_catalogue` wrote; every copy is compared with its SHA-256."""
        path = folder / CATALOGUE_RECORD
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no {CATALOGUE_RECORD}, so items have no ids; give a run made by `trope train`"
            )
        record = read_json(path, {}, "copy the run again")
        if record.get("format") != FORMAT:
            raise ValueError(f"{path} is not a catalogue of format {FORMAT}; train again with this version of trope")
        check_kinds(path, record, {"arrays": dict[str, dict]}, "copy the run again")
        files.check_entries(path, record["arrays"])
        item_ids, item_names = (files.read_ids(folder, name, record) for name in COPIED)
        if item_ids is None:
            raise ValueError(f"{path} lists no item_ids; copy the run again")
        counts = files.read_array(folder, files.ITEM_COUNTS, record) if files.ITEM_COUNTS in record["arrays"] else None
        return cls(item_ids, item_names, counts)

    def save(self, folder: Path) -> None:
        """Write what `load` reads; the record is written last."""
        named = {} if self.item_names is None else self.item_names.arrays("item_names")
        counted = {} if self.item_counts is None else {files.ITEM_COUNTS: self.item_counts}
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {**self.item_ids.arrays("item_ids"), **named, **counted}
        _write_record(folder, {name: _write_array(folder, name, values) for name, values in arrays.items()})

    def __len__(self) -> int:
        return len(self.item_ids)

    def dense(self, originals: list[Any]) -> npt.NDArray[np.int64]:
        """Dense ids of original ones, 0 where the catalogue has no such item."""
        return np.fromiter((self._dense.get(original, 0) for original in originals), np.int64, len(originals))

    def originals(self, dense: npt.NDArray[np.int64]) -> list[int | str]:
        """Original ids of dense ones."""
        return [self.item_ids[item - 1] for item in dense.tolist()]

    def name_of(self, dense: int) -> str:
        """An item's name, where it has one, else its id."""
        name = "" if self.item_names is None else self.item_names[dense - 1]
        return str(name or self.item_ids[dense - 1])

    def names(self, dense: npt.NDArray[np.int64]) -> list[str] | None:
        """`name_of` each item; None where the dataset has no names."""
        return None if self.item_names is None else [self.name_of(item) for item in dense.tolist()]


def write_catalogue(path: Path, meta: dict[str, Any], folder: Path, counts: npt.NDArray[np.int64]) -> None:
    """Copy the ids and names of a dataset's items into `folder`; the record is written last.

    path, meta: the prepared dataset and its meta.json. counts: [V] how often each item was chosen in training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: entry for name, entry in meta["arrays"].items() if name.partition(".")[0] in COPIED}
    for name in arrays:
        shutil.copyfile(path / f"{name}.npy", folder / f"{name}.npy")
    _write_record(folder, {**arrays, files.ITEM_COUNTS: _write_array(folder, files.ITEM_COUNTS, counts)})


def _write_array(folder: Path, name: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    """One file; returns what the record says of it."""
    path = folder / f"{name}.npy"
    np.save(path, np.ascontiguousarray(values, files.ALL_ARRAYS[name]))
    return {
        "dtype": str(files.ALL_ARRAYS[name]),
        "shape": list(values.shape),
        "bytes": path.stat().st_size,
        "sha256": files.sha256_of(path),
    }


def _write_record(folder: Path, arrays: dict[str, Any]) -> None:
    write_json(folder / CATALOGUE_RECORD, seal({"format": FORMAT, "arrays": arrays}))
