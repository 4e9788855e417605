"""The item table's rows in a checkpoint: one file for each process that trained, or inside a whole checkpoint's files.

    items-00000-of-00004.safetensors   "weight", "exp_avg" and "exp_avg_sq" of the first quarter of the items

A process reads the rows that it needs out of the files that have them, so a checkpoint of any number of processes goes
on with any other. state.json is the manifest: it names the files and their SHA-256. torch.distributed.checkpoint keeps
its manifest as a pickle, which is why it is not used here: nothing in a run is ever unpickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trope.models.exchange import Shard
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import ShardedItemTable
from trope.models.tensors import check_sha256, read_rows, shapes_in, write_tensors
from trope.runs import ITEMS, MODEL, OPTIMIZER, WEIGHTS
from trope.train.distributed import Group

TABLE = "items.weight"  # the parameter's name in a model
MOMENTS = ("exp_avg", "exp_avg_sq")
IN_OPTIMIZER = frozenset(f"{TABLE}/{moment}" for moment in MOMENTS)
_NAME = re.compile(ITEMS.format(index=0, count=0).replace("00000", r"(\d{5})").replace(".", r"\."))


class RowFile(NamedTuple):
    """Where rows lie: items first .. last - 1 are the rows of the tensors that `names` gives."""

    path: Path
    sha256: str | None
    first: int
    last: int
    names: dict[str, str]


def stage(model: SequentialRecommender, optimizer: torch.optim.Optimizer, folder: Path, group: Group) -> dict[str, str]:
    """Write this process's rows into `folder`, which all processes see; returns all files' SHA-256. Collective."""
    table = model.items
    assert isinstance(table, ShardedItemTable)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ITEMS.format(index=group.rank, count=group.size)
    digest = write_tensors({name: x[1:] for name, x in _rows(table.weight, optimizer).items()}, path)
    found = group.gather_bytes(bytes.fromhex(digest))
    return {ITEMS.format(index=rank, count=group.size): each.hex() for rank, each in enumerate(found)}


def take(names: Iterable[str], staged: Path, folder: Path) -> None:
    """Move the staged files of all processes into the checkpoint's folder."""
    for name in names:
        if not (staged / name).is_file():
            raise OSError(f"{staged / name} is not there: all processes must write into one file system")
        (staged / name).rename(folder / name)
    shutil.rmtree(staged)


def row_file_names(names: set[str]) -> list[str]:
    """The names of row files among a checkpoint's, in the order of the items; ValueError if some are missing."""
    found = sorted(name for name in names if _NAME.fullmatch(name))
    if found and found != [ITEMS.format(index=index, count=len(found)) for index in range(len(found))]:
        raise ValueError(f"it has rows in {', '.join(found)}, which are not all files of one checkpoint")
    return found


def row_files(path: Path, files: dict[str, str], num_items: int) -> list[RowFile]:
    """Where a checkpoint has its rows. files: SHA-256 by name, from its manifest."""
    names = row_file_names(set(files))
    if not names:
        # The whole files were or will be compared by whoever reads the rest of them.
        moments = RowFile(path / OPTIMIZER, None, 0, num_items + 1, {name: f"{TABLE}/{name}" for name in MOMENTS})
        return [RowFile(path / MODEL / WEIGHTS, None, 0, num_items + 1, {"weight": TABLE}), moments]
    bounds = [Shard(rank, len(names), num_items) for rank in range(len(names))]
    same = {name: name for name in ("weight", *MOMENTS)}
    return [RowFile(path / name, files[name], b.first, b.last, same) for name, b in zip(names, bounds, strict=True)]


def fill_rows(model: SequentialRecommender, optimizer: torch.optim.Optimizer, found: list[RowFile]) -> None:
    """Read the rows that this process has, and their moments where there are some. ValueError if they do not fit."""
    table = model.items
    shard = table.shard if isinstance(table, ShardedItemTable) else Shard(0, 1, table.num_items)
    first, last = shard.first, shard.last
    into = _rows(table.weight, optimizer)
    state = optimizer.state[table.weight]
    for moment in MOMENTS:
        into.setdefault(moment, torch.zeros_like(table.weight.detach()))
    for file in found:
        low, high = max(first, file.first), min(last, file.last)
        if low >= high:
            continue
        check_sha256(file.path, file.sha256)
        shapes = shapes_in(file.path)
        names = {mine: name for mine, name in file.names.items() if name in shapes}
        for mine, name in names.items():
            wanted = torch.Size((file.last - file.first, *into[mine].shape[1:]))
            if shapes[name] != wanted:
                raise ValueError(f"{name} {list(shapes[name])}, which model and optimiser have not: {list(wanted)}")
        rows = read_rows(file.path, list(names.values()), low - file.first, high - file.first)
        for mine, name in names.items():
            into[mine][low - first + 1 : high - first + 1] = rows[name]
            if mine in MOMENTS:
                state[mine] = into[mine]
    if "step" in state and first == last:  # no file has rows of this process, but AdamW asks for its row of padding
        state.update({name: into[name] for name in MOMENTS})
    if "step" in state and (missing := [name for name in MOMENTS if name not in state]):
        raise ValueError(f"there is no {', '.join(missing)} of {TABLE}")


def _rows(weight: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The rows and, where there are some, their moments."""
    state = optimizer.state.get(weight, {})
    return {"weight": weight.detach(), **{name: state[name] for name in MOMENTS if name in state}}
