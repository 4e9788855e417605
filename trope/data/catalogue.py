"""The catalogue in a run folder: original ids and names of the items that the model was trained on.

    RUN/catalogue/item_ids*.npy, item_names*.npy   copies of the dataset's files (see `trope.data.folder`)
    RUN/catalogue/catalogue.json                   size and SHA-256 of each copy

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
    """The items a model knows, by dense id from 1."""

    def __init__(self, item_ids: files.Ids, item_names: files.Ids | None) -> None:
        self.item_ids = item_ids
        self.item_names = item_names
        originals = item_ids.to_list()
        self.is_text = bool(originals) and isinstance(originals[0], str)
        self._dense = {original: dense for dense, original in enumerate(originals, start=1)}
        if len(self._dense) < len(originals) or (item_names is not None and len(item_names) != len(originals)):
            raise ValueError("the catalogue's ids and names are not one for each item; copy the run again")

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
        return cls(item_ids, item_names)

    def __len__(self) -> int:
        return len(self.item_ids)

    def dense(self, originals: list[Any]) -> npt.NDArray[np.int64]:
        """Dense ids of original ones, 0 where the catalogue has no such item."""
        return np.fromiter((self._dense.get(original, 0) for original in originals), np.int64, len(originals))

    def originals(self, dense: npt.NDArray[np.int64]) -> list[int | str]:
        """Original ids of dense ones."""
        return [self.item_ids[item - 1] for item in dense.tolist()]

    def name_of(self, dense: int) -> str:
        """An item's name, where the dataset has names, else its id."""
        return str((self.item_names or self.item_ids)[dense - 1])


def write_catalogue(path: Path, meta: dict[str, Any], folder: Path) -> None:
    """Copy the ids and names of a dataset's items into `folder`; the record is written last.

    path, meta: the prepared dataset and its meta.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: entry for name, entry in meta["arrays"].items() if name.partition(".")[0] in COPIED}
    for name in arrays:
        shutil.copyfile(path / f"{name}.npy", folder / f"{name}.npy")
    write_json(folder / CATALOGUE_RECORD, seal({"format": FORMAT, "arrays": arrays}))
