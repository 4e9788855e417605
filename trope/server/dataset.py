"""The dataset's users: their events with the dense ids of the served model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trope.data.catalogue import Catalogue
from trope.data.sequences import Sequences
from trope.runs import DATA


class KnownUsers:
    """Histories of a prepared dataset, by original user id.

    Args:
        data: any dataset with items named as the model's; it need not be the one of the training.
        catalogue: of the model. Items that it does not have are left out.
    """

    def __init__(self, data: Sequences, catalogue: Catalogue) -> None:
        ids, item_ids = data.ids("user_ids"), data.ids("item_ids")
        if ids is None or item_ids is None:
            raise ValueError(f"{data.path} has no user_ids or no item_ids; prepare the data again")
        self.data, self._ids = data, ids
        self._dense = np.concatenate([[0], catalogue.dense(item_ids.to_list())])
        if not self._dense.any():
            raise ValueError(f"{data.path} has none of the model's items; give the right dataset with --data")
        self._items, self._times, self._offsets = data.items.numpy(), data.times.numpy(), data.offsets.numpy()

    def __len__(self) -> int:
        return len(self._ids)

    def history(self, user: str, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """A user's last events in order of time: dense items and times; both empty for an unknown user."""
        row = self._ids.find(user)
        if row is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        end = int(self._offsets[row + 1])
        own = slice(max(int(self._offsets[row]), end - most), end)
        items = self._dense[self._items[own]]
        return items[items > 0], self._times[own][items > 0]


def find_dataset(run: Path, data: Path | None) -> Sequences | None:
    """The dataset at `data`, else the run's own where it can be found, else None."""
    if data is not None:
        return Sequences.load(data)
    if not (run / DATA).is_file():
        return None
    try:
        return Sequences.of_run(run)
    except FileNotFoundError:
        return None
