"""Write a prepared folder: arrays are written piece by piece, and the folder appears only when it is whole."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from trope.atomic import atomic_folder, one_line_if_full
from trope.data.folder import ALL_ARRAYS, META, REQUIRED, SHARDS, checksum_of


class ArrayWriter:
    """One `.npy` file of known shape, written from front to back; its SHA-256 is computed meanwhile.

    Plain writes rather than a memory map: mapped pages would count as the process's memory.
    """

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self._path = folder / f"{name}.npy"
        self._shape = shape
        self._dtype = ALL_ARRAYS[name]
        self._left = int(np.prod(shape))
        self._digest = hashlib.sha256()
        self._file = self._path.open("wb")
        header = io.BytesIO()
        description = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, description)
        self._put(header.getbuffer())

    def append(self, values: np.ndarray) -> None:
        """Add the next values, in C order."""
        self._left -= values.size
        self._put(np.ascontiguousarray(values, self._dtype).reshape(-1).view(np.uint8).data)

    def close(self) -> dict[str, Any]:
        """Finish the file; returns what `meta.json` records of it."""
        self._file.close()
        assert self._left == 0, f"{self.name}: {self._left} values short of its announced shape {self._shape}"
        size = self._path.stat().st_size
        return {
            "dtype": str(self._dtype),
            "shape": list(self._shape),
            "bytes": size,
            "sha256": self._digest.hexdigest(),
        }

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def write_array(folder: Path, name: str, values: np.ndarray) -> dict[str, Any]:
    """Write a whole array at once."""
    with ArrayWriter(folder, name, values.shape) as writer:
        writer.append(values)
        return writer.close()


def write_ids(folder: Path, name: str, values: pa.ChunkedArray) -> dict[str, dict[str, Any]]:
    """Write original ids, integers as one array, text as UTF-8 bytes and ends; returns the entries for `meta.json`."""
    if pa.types.is_integer(values.type):
        return {name: write_array(folder, name, values.cast(pa.int64()).to_numpy())}
    text = values.cast(pa.large_string()).combine_chunks()
    text = text if isinstance(text, pa.Array) else pa.concat_arrays(text.chunks)
    # Arrow's own layout is the one wanted here: offsets with a leading zero, and all bytes end to end.
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, np.int64, len(text) + 1)
    blob = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]] if data else np.zeros(0, np.uint8)
    return {
        f"{name}.text": write_array(folder, f"{name}.text", blob),
        f"{name}.ends": write_array(folder, f"{name}.ends", ends[1:] - ends[0]),
    }


def write_meta(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum to `meta` and write it; returns the whole."""
    whole = {**meta, "checksum": checksum_of(meta)}
    (folder / META).write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return whole


@contextlib.contextmanager
def staging(out: Path, overwrite: bool) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` when the block ends well, and vanishes when it does not.

    An existing `out` is refused, or with `overwrite` replaced at the very end, if it is a dataset and nothing more.
    """
    out = out.absolute()
    if out.exists():
        if not overwrite:
            raise FileExistsError(f"{out} exists already; choose another folder or pass --overwrite to replace it")
        _check_ours(out)

    def may_replace(path: Path) -> None:
        if not overwrite:
            raise FileExistsError(
                f"{path} exists now, another process made it meanwhile; it was not replaced, choose another folder"
            )
        _check_ours(path)

    with one_line_if_full(out), contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(atomic_folder(out, may_replace))
        except OSError as error:
            raise ValueError(f"cannot write beside {out}: {error.strerror}; choose another folder") from None
        yield folder


def _check_ours(out: Path) -> None:
    """Refuse to replace anything but an empty folder, or one in which `trope prepare` wrote every file."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if not out.is_dir() or not _is_ours(out / META):
        raise FileExistsError(
            f"{out} exists and is not a prepared dataset, so it is not replaced; choose another folder"
        )
    arrays = {f"{name}.npy" for name in ALL_ARRAYS}
    foreign = _foreign(out, {META, *arrays}, {SHARDS})
    for shard in (out / SHARDS).iterdir() if not foreign and (out / SHARDS).is_dir() else ():
        foreign += _foreign(shard, arrays) if shard.is_dir() and re.fullmatch(r"\d{5,}", shard.name) else [shard.name]
    if foreign:
        raise FileExistsError(
            f"{out} holds {foreign[0]!r}, which trope prepare did not write, so the folder is not replaced; "
            "move that away or choose another folder"
        )


def _foreign(folder: Path, files: set[str], folders: Collection[str] = ()) -> list[str]:
    """Names in a folder that are not among the files or folders that may be there."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if not (path.name in files and path.is_file())
        and not (path.name in folders and path.is_dir() and not path.is_symlink())
    )


def _is_ours(path: Path) -> bool:
    """Whether a file is a dataset's `meta.json`, of this or another version."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return False
    kinds = {"format": int, "arrays": dict, "checksum": str}
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), kind) for key, kind in kinds.items()):
        return False
    shards = meta.get("shards")
    listed = shards[0] if isinstance(shards, list) and shards and isinstance(shards[0], dict) else meta["arrays"]
    return set(REQUIRED) <= set(listed)
