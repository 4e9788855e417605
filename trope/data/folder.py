"""The prepared folder: which files it holds, how they are named, and how they are read back safely.

    items.npy    int32 [events]    dense item ids from 1; 0 is padding
    times.npy    int64 [events]    Unix seconds; events sorted by user, time, source order
    offsets.npy  int64 [users+1]   user u owns events offsets[u] .. offsets[u+1]
    splits.npy   int32 [4, users]  see `trope.data.protocols.Splits`
    baskets.npy  int32 [events]    optional: basket number, rising by one at each new basket
    user_ids, item_ids, item_names, basket_ids   the originals, by dense id (see `read_ids`)
    meta.json    source, filters, counts, time span, protocol, bad and dropped rows, sha256 of every array, one checksum

A dataset of many users may be cut into shards of users (format 2). Each is a folder `shards/00000` with the arrays
above of its users, offsets and baskets counted from 0; item_ids, item_names and meta.json stay at the top. A shard also
holds its events in the order of time (see `trope.data.by_time`).

numpy only, nothing is unpickled, and no file name is ever taken from `meta.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trope.runs import check_kinds, read_json

FORMAT = 1
SHARDED_FORMAT = 2  # the arrays of users and events are in shards
META = "meta.json"
SHARDS = "shards"
ARRAYS: dict[str, np.dtype[Any]] = {
    "items": np.dtype(np.int32),
    "times": np.dtype(np.int64),
    "offsets": np.dtype(np.int64),
    "splits": np.dtype(np.int32),
    "baskets": np.dtype(np.int32),
}
BY_TIME = ("by_time_items", "by_time_times")  # of a shard
REQUIRED = ("items", "times", "offsets", "splits")
IDS = ("user_ids", "item_ids", "item_names", "basket_ids")
SHARDED_IDS = ("user_ids", "basket_ids")  # of a sharded dataset, these are in the shards
_RISING = ("user_ids",)  # so that `Ids.find` can bisect; an extended dataset has its new items behind the others
# Integer ids are one array; text ids are their UTF-8 bytes and where each one ends.
_ID_PARTS: dict[str, np.dtype[Any]] = {"": np.dtype(np.int64), ".text": np.dtype(np.uint8), ".ends": np.dtype(np.int64)}
ITEM_COUNTS = "item_counts"  # in a run's catalogue alone: how often each item was chosen in training
ALL_ARRAYS: dict[str, np.dtype[Any]] = {
    **ARRAYS,
    **dict(zip(BY_TIME, (np.dtype(np.int32), np.dtype(np.int64)), strict=True)),
    ITEM_COUNTS: np.dtype(np.int64),
    **{f"{ids}{part}": dtype for ids in IDS for part, dtype in _ID_PARTS.items()},
}
_DIMENSIONS = {"splits": 2}  # all others have one
_HASH_CHUNK = 1 << 22
_META_KINDS: dict[str, Any] = {
    "checksum": str, "arrays": dict[str, dict], "protocol": dict, "counts": dict, "counts.items": int,
    "counts.users": int, "counts.events": int, "time_span": dict, "time_span.train": list[int],
}  # fmt: skip
_ENTRY_KINDS: dict[str, Any] = {"bytes": int, "sha256": str, "shape": list[int]}
# What numpy raises for a header that is none.
_UNREADABLE = (ValueError, TypeError, SyntaxError, OverflowError, EOFError, tokenize.TokenError)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_of(meta: dict[str, Any]) -> str:
    """One SHA-256 over all of `meta` that describes the dataset: not the engine that made it, nor what was left out."""
    content = {key: value for key, value in meta.items() if key not in ("checksum", "made_by", "dropped")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and check `meta.json` of a prepared folder."""
    path = folder / META
    if not path.is_file():
        what = f"is not a prepared dataset: it has no {META}" if folder.exists() else "is not there"
        raise FileNotFoundError(f"{folder} {what}; a prepared dataset is made by `trope prepare`")
    meta = read_json(path, {}, "prepare the data again")
    if meta.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise ValueError(
            f"{path} has format {meta.get('format')!r}, this version of trope reads {FORMAT} and {SHARDED_FORMAT}; "
            "prepare the data again"
        )
    if meta.get("checksum") != checksum_of(meta):
        raise ValueError(f"{path} does not match its own checksum: it was edited or damaged; prepare the data again")
    check_kinds(path, meta, _META_KINDS, "prepare the data again")
    if meta["format"] == SHARDED_FORMAT:
        check_kinds(path, meta, {"shard_users": int, "shards": list[dict]}, "prepare the data again")
        check_entries(path, meta["arrays"])
        if not meta["shards"]:
            raise ValueError(f"{path} lists no shards; prepare the data again")
    for arrays in meta["shards"] if is_sharded(meta) else [meta["arrays"]]:
        check_kinds(path, {"arrays": arrays}, {"arrays": dict[str, dict]}, "prepare the data again")
        check_entries(path, arrays)
        missing = set(REQUIRED) - set(arrays)
        if missing:
            raise ValueError(f"{path} lists no arrays {sorted(missing)}; prepare the data again")
    return meta


def is_sharded(meta: dict[str, Any]) -> bool:
    """Whether the arrays of users and events are in shards."""
    return meta.get("format") == SHARDED_FORMAT


def shard_folder(folder: Path, number: int) -> Path:
    """Where a shard's arrays are."""
    return folder / SHARDS / f"{number:05d}"


def check_entries(path: Path, arrays: Mapping[str, Any]) -> None:
    """Refuse what a meta.json or catalogue.json says of arrays if trope would not say it; path: of that file."""
    for name, entry in arrays.items():
        if name not in ALL_ARRAYS:
            raise ValueError(f"{path} lists an array {name!r} that trope does not know; prepare the data again")
        check_kinds(path, entry, _ENTRY_KINDS, f"see {name}; copy or prepare the data again")
        if len(entry["shape"]) != _DIMENSIONS.get(name, 1) or min(entry["shape"]) < 0:
            raise ValueError(f"{path} gives {name} the shape {entry['shape']}; prepare the data again")


def find_array(folder: Path, name: str, meta: dict[str, Any]) -> Path:
    """The file of an array, which is there and has the size that `meta` says."""
    path, expected = folder / f"{name}.npy", meta["arrays"][name]["bytes"]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing although {META} lists it; prepare the data again")
    if path.stat().st_size != expected:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, {META} says {expected:,}: "
            "it is truncated or from another dataset; copy or prepare it again"
        )
    return path


def read_array(folder: Path, name: str, meta: dict[str, Any], verify: bool = True) -> np.ndarray:
    """Memory-map one array, after checking its size, type and shape, and with `verify` its SHA-256, against `meta`."""
    path, header = _checked(folder, name, meta, verify)
    if 0 in header.shape:  # an empty file region cannot be mapped
        return np.empty(header.shape, header.dtype)
    try:
        # Copy-on-write, so that torch gets a writable array while the file stays as it is.
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged: {error}; copy or prepare it again") from None


def read_into(folder: Path, name: str, meta: dict[str, Any], out: np.ndarray, verify: bool = True) -> None:
    """Read one array into `out`, after the same checks.

    A map would end the process where the file is cut short meanwhile, or its disk fails: this is an error.
    """
    path, header = _checked(folder, name, meta, verify)
    assert header.shape == out.shape and header.dtype == out.dtype
    with path.open("rb") as file:
        file.seek(header.size)
        for row in np.atleast_2d(out):
            if row.size and file.readinto(memoryview(row).cast("B")) != row.nbytes:
                raise ValueError(f"{path} was cut short while it was read; copy or prepare it again")


class _Header(NamedTuple):
    """What a .npy file says of itself. size: of the header, in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int


def _checked(folder: Path, name: str, meta: dict[str, Any], verify: bool) -> tuple[Path, _Header]:
    """The file of an array, and its header: what it claims is compared before anything of that size is made."""
    path, expected = find_array(folder, name, meta), meta["arrays"][name]
    if verify and sha256_of(path) != expected["sha256"]:
        raise ValueError(f"{path} does not match its checksum in {META}; copy or prepare it again")
    header = _header(path)
    if header.dtype != ALL_ARRAYS[name] or list(header.shape) != expected["shape"]:
        raise ValueError(
            f"{path} is {header.dtype} {list(header.shape)}, expected {ALL_ARRAYS[name]} {expected['shape']}; prepare "
            "the data again"
        )
    return path, header


def _header(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_columns, dtype = read(file)
            if by_columns and len(shape) > 1:
                raise ValueError("it is stored by columns")
            return _Header(dtype, shape, file.tell())
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not an array: {error}; copy or prepare it again") from None


class Ids:
    """Original ids by dense position: integers or text, memory-mapped, nothing decoded until asked for."""

    def __init__(self, values: np.ndarray, ends: np.ndarray | None = None) -> None:
        self._values = values
        self._ends = ends

    def __len__(self) -> int:
        return len(self._values if self._ends is None else self._ends)

    def __getitem__(self, index: int) -> int | str:
        if not 0 <= index < len(self):
            raise IndexError(f"position {index} is outside 0 .. {len(self) - 1}")
        if self._ends is None:
            return int(self._values[index])
        start = int(self._ends[index - 1]) if index else 0
        return bytes(self._values[start : int(self._ends[index])]).decode()

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays under the names of their files, as `read_ids` reads them."""
        if self._ends is None:
            return {name: self._values}
        return {f"{name}.text": self._values, f"{name}.ends": self._ends}

    def find(self, original: int | str) -> int | None:
        """The position of an original id, by bisection (users' ids are stored in rising order), or None.

        original: text is compared with the id's own text, so '007' does not find the integer 7.
        """
        low, high = 0, len(self)
        # Text ids are in the order of their UTF-8 bytes, which is that of their code points, as Python compares.
        wanted: Any = str(original) if self._ends is not None else _as_int(original)
        if wanted is None:
            return None
        while low < high:
            middle = (low + high) // 2
            if self[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self[low] == wanted else None

    def to_list(self) -> list[int] | list[str]:
        """All of them, in order."""
        if self._ends is None:
            return self._values.tolist()
        blob, ends = bytes(self._values), self._ends.tolist()
        return [blob[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _as_int(value: int | str) -> int | None:
    """The integer with exactly this text. int() would take '007', '1_0', ' 7' and other scripts' digits as well."""
    if isinstance(value, str) and re.fullmatch(r"0|-?[1-9][0-9]{0,18}", value) is None:
        return None
    return int(value)


def read_ids(folder: Path, name: str, meta: dict[str, Any], verify: bool = True) -> Ids | None:
    """Read `user_ids`, `item_ids`, `item_names` or `basket_ids`, or None where the dataset has none.

    Item arrays start with dense id 1: the original of dense item `i` is at position `i - 1`.
    verify: compare the arrays with their SHA-256, and check their order.
    """
    if is_sharded(meta) and name in SHARDED_IDS:
        return _read_sharded_ids(folder, name, meta, verify)
    if name in meta["arrays"]:
        numbers = read_array(folder, name, meta, verify)
        if verify and name in _RISING and (numbers[1:] <= numbers[:-1]).any():
            raise ValueError(f"the {name} of {folder} are not in rising order; copy or prepare it again")
        if verify and name == "item_ids" and (np.diff(np.sort(numbers)) == 0).any():
            raise ValueError(f"the {name} of {folder} have one id twice; copy or prepare it again")
        return Ids(numbers)
    if f"{name}.text" not in meta["arrays"]:
        return None
    if f"{name}.ends" not in meta["arrays"]:
        raise ValueError(f"{folder} has {name}.text without {name}.ends; copy or prepare it again")
    text, ends = (read_array(folder, f"{name}.{part}", meta, verify) for part in ("text", "ends"))
    if (ends[-1] if len(ends) else 0) != len(text) or (verify and (np.diff(ends, prepend=0) < 0).any()):
        raise ValueError(f"the {name} of {folder} do not end where they say; copy or prepare it again")
    return Ids(text, ends)


def _read_sharded_ids(folder: Path, name: str, meta: dict[str, Any], verify: bool) -> Ids | None:
    """The ids of all shards, one behind the other, in memory."""
    listed = [set(shard) & {f"{name}{part}" for part in _ID_PARTS} for shard in meta["shards"]]
    if not all(listed):
        return None
    if any(arrays != listed[0] for arrays in listed):
        raise ValueError(f"the {name} of {folder} are partly numbers and partly text; prepare the data again")
    shapes = {array: sum(int(shard[array]["shape"][0]) for shard in meta["shards"]) for array in listed[0]}
    out = {array: np.empty(length, ALL_ARRAYS[array]) for array, length in shapes.items()}
    done = dict.fromkeys(out, 0)
    for number, arrays in enumerate(meta["shards"]):
        # One shard after the other: what is read is mapped, and a map keeps its file open.
        found = read_ids(shard_folder(folder, number), name, {"arrays": arrays}, verify)
        if found is None:
            return None
        before = done.get(f"{name}.text", 0)
        for array, values in found.arrays(name).items():
            part = out[array][done[array] : done[array] + len(values)]
            part[:] = values
            if array == f"{name}.ends":
                part += before
            done[array] += len(values)
    if name in out:
        numbers = out[name]
        if verify and name in _RISING and (numbers[1:] <= numbers[:-1]).any():
            raise ValueError(f"the {name} of {folder} are not in rising order; copy or prepare it again")
        return Ids(numbers)
    return Ids(out[f"{name}.text"], out[f"{name}.ends"])
