"""The dataset's users: their events with the dense ids of the served model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trope.data.catalogue import Catalogue
from trope.data.run_data import folder_of_run
from trope.data.sequences import Sequences
from trope.data.stream import Stream, data_of_run, open_dataset
from trope.data.user_events import UserEvents
from trope.runs import DATA


class Found(NamedTuple):
    """A user of the dataset: how many events, and when the first and the last of them were."""

    user_id: str
    events: int
    first: int
    last: int


class KnownUsers:
    """Histories of a prepared dataset, by original user id.

    Args:
        data: any dataset with items named as the model's; it need not be the one of the training. A sharded one stays
            on disk.
        catalogue: of the model. Items that it does not have are left out.
    """

    def __init__(self, data: Sequences | Stream, catalogue: Catalogue) -> None:
        ids, item_ids = data.ids("user_ids"), data.ids("item_ids")
        if ids is None or item_ids is None:
            raise ValueError(f"{data.path} has no user_ids or no item_ids; prepare the data again")
        self.data, self._ids = data, ids
        self._dense = np.concatenate([[0], catalogue.dense(item_ids.to_list())])
        if not self._dense.any():
            raise ValueError(f"{data.path} has none of the model's items; give the right dataset with --data")
        self._events = UserEvents(data)

    def __len__(self) -> int:
        return len(self._ids)

    def history(self, user: str, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """A user's last events in order of time: dense items and times; both empty for an unknown user."""
        row = self._ids.find(user)
        if row is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        items, times = self._events.of(row, most)
        items = self._dense[items]
        return items[items > 0], times[items > 0]

    def last(self, user: str) -> int:
        """Time of a user's last event; 0 for an unknown user."""
        row = self._ids.find(user)
        if row is None:
            return 0
        times = self._events.of(row, 1)[1]
        return int(times[-1]) if len(times) else 0

    def search(self, prefix: str, most: int) -> list[Found]:
        """The first users whose id begins with a text; all users begin with an empty one."""
        found = []
        for row in islice(self._beginning(prefix), most):
            times = self._events.of(row)[1]
            first, last = (int(times[0]), int(times[-1])) if len(times) else (0, 0)
            found.append(Found(str(self._ids[row]), len(times), first, last))
        return found

    def _beginning(self, prefix: str) -> Iterator[int]:
        """Rows of ids that begin with a text. Ids are in rising order, so they are found by bisection."""
        if not len(self._ids) or not prefix:
            yield from range(len(self._ids))
        elif isinstance(self._ids[0], str):
            for row in range(bisect_left(self._ids, prefix), len(self._ids)):
                if not str(self._ids[row]).startswith(prefix):
                    return
                yield row
        elif prefix.isascii() and prefix.isdigit() and len(prefix) < 20 and prefix[0] != "0":
            # 7, then 70 to 79, then 700 to 799
            low, high = int(prefix), int(prefix) + 1
            while low < 2**63:
                yield from range(bisect_left(self._ids, low), bisect_left(self._ids, high))
                low, high = 10 * low, 10 * high
        else:
            found = self._ids.find(prefix)
            yield from () if found is None else (found,)


def find_dataset(run: Path, data: Path | None) -> Sequences | Stream | None:
    """The dataset at `data`, else the run's own where its folder can be found, else None."""
    if data is not None:
        return open_dataset(data)
    if not (run / DATA).is_file():
        return None
    try:
        path = folder_of_run(run, None)
    except FileNotFoundError:
        return None
    return data_of_run(run, path)  # refused where a file of it is lost: without it everybody would be a stranger
