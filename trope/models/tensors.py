"""Files of tensors: safetensors that are checked on the way in. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trope.data.folder import sha256_of


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write tensors by name; returns the SHA-256 of the file."""
    try:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path)
    except safetensors.SafetensorError as error:  # a full disk, mostly
        raise OSError(f"cannot write {path}: {error}") from None
    return sha256_of(path)


def shapes_in(path: Path) -> dict[str, torch.Size]:
    """The shapes that a file's header names. No tensor is read."""
    with safetensors.safe_open(path, "pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, no dict


def read_tensors(path: Path, sha256: str | None, leave_out: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors of a file, by name. Refuses another SHA-256 than `sha256`, if given, and numbers that are not finite.

    leave_out: names that are not read.

    Raises OSError, ValueError or safetensors.SafetensorError; the caller says what to do.
    """
    check_sha256(path, sha256)
    if leave_out:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name not in leave_out}  # noqa: SIM118
    else:
        tensors = load_file(path)
    for name, x in tensors.items():
        _check_finite(name, x)
    return tensors


def read_rows(path: Path, names: Collection[str], first: int, last: int) -> dict[str, Tensor]:
    """Rows first .. last - 1 of some tensors of a file; nothing else is read. Raises as `read_tensors`."""
    with safetensors.safe_open(path, "pt") as file:
        rows = {name: file.get_slice(name)[first:last] for name in names}
    for name, x in rows.items():
        _check_finite(name, x)
    return rows


def check_sha256(path: Path, sha256: str | None) -> None:
    """Refuse a file with another SHA-256; None compares nothing."""
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise ValueError(f"its SHA-256 is {found[:12]}..., expected {sha256[:12]}...: it was changed or damaged")


def _check_finite(name: str, x: Tensor) -> None:
    if x.is_floating_point() and not bool(x.isfinite().all()):
        wrong = int((~x.isfinite()).sum())
        raise ValueError(f"{name} has {wrong:,} of {x.numel():,} numbers that are NaN or infinite")
