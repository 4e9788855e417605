"""`UserEvents`: the events of one user after the other, of a store in memory or of a stream that stays on disk.

A stream's shards are all checked first, as a store in memory is. Then they are mapped: what is read of them is the
system's to keep or to forget. No file stays open: there may be more shards than a process may have
open files, often 1,024.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trope.data import folder as files
from trope.data.sequences import Sequences
from trope.data.stream import Stream

_NAMES = ("items", "times", "offsets")


class UserEvents:
    """Dense items and times by the number of the user."""

    def __init__(self, data: Sequences | Stream) -> None:
        self._firsts = [0]  # users before each shard; a store in memory is one shard
        self._shards = []
        if isinstance(data, Sequences):
            self._shards.append((data.items.numpy(), data.times.numpy(), data.offsets.numpy()))
            return
        self._firsts += accumulate(size.users for size in data.sizes[:-1])
        for number, arrays in enumerate(data.meta["shards"]):
            data.check(number)
            folder, meta = files.shard_folder(data.path, number), {"arrays": arrays}
            items, times, offsets = (_mapped(folder, name, meta) for name in _NAMES)
            self._shards.append((items, times, offsets))

    def of(self, user: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A user's last `most` events, or all of them, in the order of time."""
        shard = bisect_right(self._firsts, user) - 1
        items, times, offsets = self._shards[shard]
        row = user - self._firsts[shard]
        start, end = int(offsets[row]), int(offsets[row + 1])
        own = slice(start if most is None else max(start, end - most), end)
        return items[own], times[own]


def _mapped(folder: Path, name: str, meta: dict[str, Any]) -> np.ndarray:
    """An array as `read_array` maps it; NumPy's map would keep the file open."""
    found = files.read_array(folder, name, meta, False)
    if not isinstance(found, np.memmap):  # it is empty
        return found
    size = int(meta["arrays"][name]["bytes"])
    data = torch.from_file(str(folder / f"{name}.npy"), shared=False, size=size, dtype=torch.uint8)
    return data.numpy()[found.offset :].view(found.dtype)
