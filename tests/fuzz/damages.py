"""Damages of a file, from a flipped bit to a number of another type; and checksums made to fit."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# What a damaged or forged JSON value may be.
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 10**9, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../../x", [], [1], {},
    {"a": 1},
)  # fmt: skip
_DEPTH = 100_000
# JSON files with checksums; data.json has that of meta.json and state.json that of config.json, so they come later.
_RECORDS = ("meta.json", "catalogue.json", "data.json", "metrics.json", "config.json", "state.json")
_UNSEALED = ("made_by", "dropped")  # names of meta.json that its checksum leaves out
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, SyntaxError, OverflowError, RecursionError,
    tokenize.TokenError,
)  # fmt: skip


def _any(path: Path) -> bool:
    return True


def _is_json(path: Path) -> bool:
    return path.suffix == ".json"


def _is_array(path: Path) -> bool:
    return path.suffix == ".npy"


def _is_tensors(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _is_text(path: Path) -> bool:
    return path.suffix in (".json", ".toml", ".jsonl")


DAMAGES: dict[str, Callable[[Path], bool]] = {
    "flip": _any, "truncate": _any, "empty": _any, "remove": _any, "append": _any, "swap": _any, "folder": _any,
    "json value": _is_json, "json key": _is_json, "json type": _is_json, "json depth": _is_json, "digit": _is_text,
    "array value": _is_array, "array order": _is_array, "tensor value": _is_tensors, "tensor missing": _is_tensors,
}  # fmt: skip
"""Each damage, and the files that it suits."""


def damage(kind: str, path: Path, files: list[Path], rng: random.Random) -> str:
    """Damage a file; returns what was done. files: those that it may be swapped with."""
    content = path.read_bytes()
    if kind == "flip":
        places = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 3)))] if content else []
        changed = bytearray(content)
        for place in places:
            changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
        return f"{len(places)} flipped bits (at {', '.join(map(str, places))})"
    if kind == "truncate":
        path.write_bytes(content[: rng.randrange(len(content))] if content else b"")
        return "truncation"
    if kind == "empty":
        path.write_bytes(b"")
        return "emptying"
    if kind == "remove":
        path.unlink()
        return "removal"
    if kind == "append":
        path.write_bytes(content + rng.randbytes(rng.choice((1, 8, 1000))))
        return "appended bytes"
    if kind == "folder":
        path.unlink()
        path.mkdir()
        return "replacement by a folder"
    if kind == "swap":
        other = rng.choice([other for other in files if other.suffix == path.suffix])
        theirs = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(theirs)
        return f"a swap with {'/'.join(other.parts[-2:])}"
    if kind == "digit":
        text = content.decode()
        places = [found.start() for found in re.finditer(r"\d", text)]
        place = rng.choice(places)
        path.write_text(text[:place] + str(rng.randrange(10)) + text[place + 1 :])
        return f"a changed digit (at {place})"
    if kind.startswith("json"):
        return _damage_json(kind, path, rng)
    return _damage_array(kind, path, rng) if path.suffix == ".npy" else _damage_tensors(kind, path, rng)


def has_checksum(path: Path) -> bool:
    """Whether a checksum is kept of a file, so that a change of it is found."""
    return path.suffix in (".npy", ".safetensors") or path.name in _RECORDS


def forge(folder: Path) -> bool:
    """Make all checksums of the dataset `data` and of the runs fit, as an attacker would; False if one cannot be."""
    try:
        for name in _RECORDS:
            for path in folder.rglob(name):
                _forge_record(path, folder)
    except _UNREADABLE:
        return False
    return True


def _forge_record(path: Path, folder: Path) -> None:
    """One JSON file with checksums: of arrays, of files, and its own."""
    record = json.loads(path.read_text())
    for name, entry in record.get("arrays", {}).items():
        content = (path.parent / f"{name}.npy").read_bytes()
        array = np.load(path.parent / f"{name}.npy", allow_pickle=False)
        entry["sha256"], entry["bytes"] = hashlib.sha256(content).hexdigest(), len(content)
        entry["shape"], entry["dtype"] = list(array.shape), str(array.dtype)
    for name in record.get("files", {}):
        record["files"][name] = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
    if path.name == "data.json" and "checksum" in record:
        record["checksum"] = json.loads((folder / "data" / "meta.json").read_text())["checksum"]
    own = "checksum" if path.name == "meta.json" else "sha256"
    if own in record:
        kept = {key: value for key, value in record.items() if key not in (own, *_UNSEALED)}
        record[own] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record, indent=2))


def _damage_json(kind: str, path: Path, rng: random.Random) -> str:
    content = json.loads(path.read_text())
    if kind == "json depth":
        path.write_text(rng.choice(('{"a":', "[")) * _DEPTH)
        return f"nesting {_DEPTH:,} deep"
    if kind == "json type":
        value = rng.choice(_VALUES)
        path.write_text(json.dumps(value))
        return f"replacement by {value!r}"
    holder, key = rng.choice(list(_places(content)))
    if kind == "json key":
        del holder[key]
        path.write_text(json.dumps(content))
        return f"removal of {key!r}"
    value = rng.choice(_VALUES)
    holder[key] = value
    path.write_text(json.dumps(content))
    return f"{key!r} = {value!r}"


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON document that holds a value."""
    found: list[tuple[Any, Any]] = []
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        found += [(content, key), *_places(value)]
    return found


def _damage_array(kind: str, path: Path, rng: random.Random) -> str:
    array = np.load(path)
    flat = array.reshape(-1)
    if kind == "array order":
        np.save(path, flat[::-1].reshape(array.shape).copy())
        return "reversing"
    limits = np.iinfo(array.dtype)
    value = rng.choice((0, -1, 1, 7, 2**31 - 1, 2**62))
    value = min(max(value, int(limits.min)), int(limits.max))
    if rng.random() < 0.5:
        flat[:] = value
        what = f"all values {value}"
    else:
        place = rng.randrange(len(flat))
        flat[place] = value
        what = f"value {place} = {value}"
    np.save(path, array)
    return what


def _damage_tensors(kind: str, path: Path, rng: random.Random) -> str:
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    name = rng.choice(sorted(tensors))
    if kind == "tensor missing":
        every = rng.random() < 0.5
        save_file({} if every else {key: value for key, value in tensors.items() if key != name}, path)
        return "removal of all tensors" if every else f"removal of {name}"
    tensor = tensors[name].reshape(-1)
    is_whole = np.issubdtype(tensor.dtype, np.integer)
    value = rng.choice((-1, 0, 1, 2**62) if is_whole else (np.nan, np.inf, -np.inf, 0.0, 1e30, 1.0))
    tensor[rng.randrange(len(tensor)) if rng.random() < 0.5 else slice(None)] = value
    save_file({**tensors, name: tensor.reshape(tensors[name].shape)}, path)
    return f"{value} in {name}"
