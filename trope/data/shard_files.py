"""Read shards of a prepared dataset: some of them, or all, as the arrays that one folder without shards would hold.

numpy only. A shard counts its offsets and its baskets from 0; here they are counted through.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trope.data import folder as files
from trope.data.folder import ARRAYS, META

_AGAIN = "prepare the data again"
_SMALL = 1 << 20  # bytes
# Else a process that is forked off would write into the same memory, and it would count as a file's.
_PRIVATE: dict[str, Any] = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


class ShardSize(NamedTuple):
    """How many users and events a shard has."""

    users: int
    events: int


@contextmanager
def one_line_if_unreadable(folder: Path) -> Iterator[None]:
    """Turn an OSError of a failing disk into a ValueError that names the shard's folder.

    A training takes other OSErrors for those of its run's folder. A file that is missing names itself.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        said = error.strerror or str(error)
        raise ValueError(f"{folder} cannot be read: {said}; bring its disk back and run the command again") from error


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array to fill, whose memory goes back to the system with it.

    malloc keeps what lies below something else, and a stream has arrays of a block between small ones all the time.
    """
    size = math.prod(shape)
    if size * dtype.itemsize < _SMALL:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize, **_PRIVATE), dtype, size).reshape(shape)


class SameFiles:
    """Refuses arrays that were replaced or written after they were first looked at.

    A checksum is compared once, and a shard is read in every epoch.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int, int]] = {}

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Look at some arrays of a folder, the first time or again."""
        for name in names:
            path = folder / f"{name}.npy"
            try:
                found = path.stat()
            except FileNotFoundError:
                raise FileNotFoundError(f"{path} is missing although {META} lists it; {_AGAIN}") from None
            known = found.st_ino, found.st_mtime_ns, found.st_size
            if self._known.setdefault(path, known) != known:
                raise ValueError(f"{path} was replaced while it was read: the data are others now; start again")


def shard_sizes(path: Path, meta: dict[str, Any]) -> list[ShardSize]:
    """The size of each shard by `meta.json`; refused if the shapes do not fit together."""
    sizes = []
    for number, arrays in enumerate(meta["shards"]):
        events, users = int(arrays["items"]["shape"][0]), int(arrays["offsets"]["shape"][0]) - 1
        by_event = [arrays[name]["shape"] for name in ("times", "baskets") if name in arrays]
        if users < 1 or any(shape != [events] for shape in by_event) or arrays["splits"]["shape"] != [4, users]:
            raise ValueError(f"the arrays of shard {number} of {path} do not fit together; {_AGAIN}")
        if arrays.keys() != meta["shards"][0].keys():
            raise ValueError(f"shard {number} of {path} has other arrays than the first one; {_AGAIN}")
        sizes.append(ShardSize(users, events))
    counts = {"users": sum(size.users for size in sizes), "events": sum(size.events for size in sizes)}
    if any(meta["counts"][name] != count for name, count in counts.items()):
        raise ValueError(f"{path / META} counts other users or events than its shards have; {_AGAIN}")
    return sizes


def read_arrays(path: Path, meta: dict[str, Any], verify: bool) -> dict[str, np.ndarray]:
    """Every array of a dataset, mapped; of a sharded one, all shards in memory. verify: compare SHA-256."""
    if files.is_sharded(meta):
        return read_shards(path, meta, range(len(meta["shards"])), ARRAYS, verify=verify)
    return {name: files.read_array(path, name, meta, verify) for name in ARRAYS if name in meta["arrays"]}


def read_shards(
    path: Path,
    meta: dict[str, Any],
    numbers: Sequence[int],
    names: Collection[str],
    spare: int = 0,
    verify: bool = True,
) -> dict[str, np.ndarray]:
    """The arrays of some shards, one shard behind the other, in memory.

    names: which arrays, where the dataset has them. spare: room for so many events more behind items and times.
    """
    sizes = shard_sizes(path, meta)
    users, events = (sum(getattr(sizes[number], name) for number in numbers) for name in ShardSize._fields)
    shapes = {"offsets": (users + 1,), "splits": (4, users)}
    out = {
        name: _room(shapes.get(name, (events + spare * (name in ("items", "times")),)), ARRAYS[name])
        for name in names
        if name in meta["shards"][0]
    }
    user = event = basket = 0
    for number in numbers:
        size, entries, folder = sizes[number], {"arrays": meta["shards"][number]}, files.shard_folder(path, number)
        for name, array in out.items():
            # Where the arrays count on: offsets of events, each shard's first being the last of the one before.
            first, last = (user, user + size.users) if name in ("offsets", "splits") else (event, event + size.events)
            part = array[..., first : last + (name == "offsets")]
            with one_line_if_unreadable(folder):
                files.read_into(folder, name, entries, part, verify)
            if name == "offsets":
                part += event
            elif name == "baskets":
                part += basket
                basket = int(part[-1]) + 1
        user, event = user + size.users, event + size.events
    return out
