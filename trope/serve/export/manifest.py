"""The exported folder and its manifest.

    encode.*, remember.*, look.*      the programs (`trope.serve.export.programs`); .pt2 or .onnx
    items.safetensors                 "table", float32 [V + 1, E]: the item table, an input of every program
    pulse.safetensors                 of a model with a fitted pulse: its weights and counts (`trope.models.pulse`)
    catalogue/                        the items' original ids and names, as in a run
    manifest.json                     what the programs take and return, the config, versions, SHA-256 of every file

How a score is formed, from the unit vector v that `look` or `encode` returns for a user at a moment:

    score(item) = v . w / max(|w|, 1e-6)      w: the item's row of the table; row 0 is padding
    with a pulse: the same with v scaled, plus everybody's counts, plus the user's own items: `trope.models.pulse.head`

manifest.json is sealed: it holds the SHA-256 of its own content (`trope.runs.seal`).
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trope.config import Config
from trope.data.folder import sha256_of
from trope.environment import __version__
from trope.models.pretrained import MOST_ITEMS
from trope.rotary.checks import LATEST_TIME
from trope.runs import check_kinds, read_json, seal, write_json
from trope.serve.export.formats import FORMATS, SUFFIXES
from trope.serve.export.programs import Program, Value, limits
from trope.settings import from_dict, migrate, to_dict

MANIFEST, TABLE_FILE, PULSE_FILE = "manifest.json", "items.safetensors", "pulse.safetensors"
TABLE = "table"
VERSION = "trope-export-2"
_AGAIN = "export the model again"
_KINDS: dict[str, Any] = {
    "format": str, "version": str, "num_items": int, "time_span": list[int], "config": dict,
    "programs": dict[str, dict], "files": dict[str, dict], "built_for": str,
}  # fmt: skip
# Letters first: no name leads out of the folder.
_FILE = re.compile(r"(catalogue/)?[a-z_]+(\.[a-z0-9_]+)+")


class Manifest(NamedTuple):
    """What a manifest says, checked.

    programs: file of each program, by its name. turning: dims that the pulse scales as turning; None without a pulse.
    age_from: when the model's age begins, for the pulse.
    content: all of the file.
    """

    kind: str
    num_items: int
    time_span: tuple[int, int]
    config: Config
    programs: dict[str, str]
    turning: int | None
    age_from: int
    content: dict[str, Any]


def built_for(kind: str) -> str:
    """What a program of this format runs on: machine code needs the processor and the torch that it was made for."""
    if kind != "aoti":
        return "any"
    machine = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine}, torch {torch.__version__}"


def write_manifest(
    folder: Path, kind: str, programs: dict[str, Program], about: dict[str, Any], parity: dict[str, Any]
) -> None:
    """Describe the files that are in `folder`, all of which are written.

    about: num_items, time_span, config and pulse. parity: what the comparison found.
    """
    model = about["config"].model
    content = {
        "version": VERSION, "format": kind, "built_for": built_for(kind), "trope": __version__,
        "torch": torch.__version__, **about, "config": to_dict(about["config"]),
        "predicts": model.predicts,
        "programs": {name: _described(name, kind, program) for name, program in programs.items()},
        "dims": {name: list(ends) for name, ends in limits(model.max_len).items()},
        "parity": parity,
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST
        },
    }  # fmt: skip
    write_json(folder / MANIFEST, seal(content))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, after every file was compared with its size and SHA-256."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}; is it a folder made by `trope export`?")
    content = read_json(path, {}, _AGAIN)
    if content.get("version") != VERSION:
        raise ValueError(f"{path} is not of version {VERSION}; it is no exported model, or of another trope; {_AGAIN}")
    check_kinds(path, content, _KINDS, _AGAIN)
    kind, items, span = content["format"], content["num_items"], content["time_span"]
    if kind not in FORMATS or not 1 <= items <= MOST_ITEMS:
        raise ValueError(f"{path} is damaged: format {kind!r}, num_items {items}; {_AGAIN}")
    if len(span) != 2 or not 0 <= span[0] <= span[1] <= LATEST_TIME:
        raise ValueError(f"{path} is damaged: time_span {span}; {_AGAIN}")
    if sorted(content["programs"]) not in (["encode", "look", "remember"], ["encode"]):
        raise ValueError(f"{path} lists the programs {sorted(content['programs'])}; {_AGAIN}")
    if content["built_for"] not in ("any", built_for("aoti")):
        raise ValueError(
            f"{folder} was compiled for {content['built_for']}, this machine is {built_for('aoti')}; export it here"
        )
    try:
        config = from_dict(migrate(content["config"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    programs = {name: f"{name}{SUFFIXES[kind]}" for name in content["programs"]}
    turning = _turning(path, content)
    age_from = (content.get("pulse") or {}).get("age_from", span[1])  # older folders have none
    if type(age_from) is not int or not 0 <= age_from <= LATEST_TIME:
        raise ValueError(f"{path} is damaged: pulse.age_from {age_from!r}; {_AGAIN}")
    needed = {TABLE_FILE, *programs.values(), *([] if turning is None else [PULSE_FILE])}
    _check_files(folder, content["files"], needed)
    return Manifest(kind, items, (span[0], span[1]), config, programs, turning, age_from, content)


def _turning(path: Path, content: dict[str, Any]) -> int | None:
    if content.get("pulse") is None:
        return None
    check_kinds(path, content, {"pulse": dict, "pulse.turning": int}, _AGAIN)
    turning = content["pulse"]["turning"]
    if turning < 0:
        raise ValueError(f"{path} is damaged: pulse.turning {turning}; {_AGAIN}")
    return turning


def _check_files(folder: Path, files: dict[str, Any], needed: set[str]) -> None:
    missing = needed - set(files)
    if missing:
        raise ValueError(f"{folder / MANIFEST} lists no {', '.join(sorted(missing))}; {_AGAIN}")
    for name, entry in files.items():
        if _FILE.fullmatch(name) is None:
            raise ValueError(f"{folder / MANIFEST} lists a file {name!r} that trope would not write; {_AGAIN}")
        check_kinds(folder / MANIFEST, entry, {"bytes": int, "sha256": str}, _AGAIN)
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing although {MANIFEST} lists it; copy the folder again")
        if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
            raise ValueError(f"{path} does not match its SHA-256 in {MANIFEST}; copy the folder again")


def _described(name: str, kind: str, program: Program) -> dict[str, Any]:
    return {
        "file": f"{name}{SUFFIXES[kind]}",
        "inputs": [_value(value) for value in program.inputs],
        "output": _value(program.output),
    }


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": list(value.shape)}
