"""Checkpoints: whole or not there, never unpickled.

    RUN/checkpoints/epoch0003-step00000120/
        model/                 weights and config, as `save_pretrained` writes them
        optimizer.safetensors  AdamW's moments as "parameter/moment"
        state.json             how far the run is, its learning rates, and the SHA-256 of the files above
    RUN/best/                  the model with the best validation so far; after a refit, the refitted one

Where several processes have the item table's rows between them, model/ and optimizer.safetensors are without it, and
each process writes its rows into a file of its own (`trope.train.item_rows`). RUN/best is whole always.

A checkpoint is written under another name, flushed to disk, and renamed; the two latest are kept. There is no random
state in it: everything random in a run is seeded from the step (see `trope.train.step`).
"""

from __future__ import annotations

import re
import shutil
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import torch
from torch import Tensor
from tqdm.auto import tqdm

from trope.atomic import atomic_folder, recover, recover_all
from trope.data.folder import sha256_of
from trope.models import pretrained
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import ShardedItemTable
from trope.models.tensors import read_tensors, write_tensors
from trope.runs import (
    BEST,
    CHECKPOINTS,
    METRICS,
    MODEL,
    MODEL_CONFIG,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    changed_settings,
    check_kinds,
    ranks_path,
    read_json,
    seal,
    write_json,
)  # fmt: skip
from trope.train import item_rows
from trope.train.distributed import Group
from trope.train.optimizer import set_learning_rates

FORMAT = 2
SHARDED_FORMAT = 3  # with files of rows
OLDER_FORMAT = 1  # without checksums
KEEP = 2
_NAME = re.compile(r"epoch(\d+)-step(\d+)")
_MODEL_CONFIG = f"{MODEL}/{MODEL_CONFIG}"
# What is made beside a checkpoint or the best model before they are written; `Checkpoints.tidy` removes it.
_STAGED_ROWS = ".{}.partial-items"
_DRAFT = f".{BEST}.draft"


@dataclass
class TrainState:
    """How far a run is.

    epoch: epochs finished. index: steps done of the epoch under way. step: steps done in all.
    loss_sum: over the steps of the epoch under way.
    best, best_epoch, best_metrics: the criterion of validation at its best, after which epoch, and all metrics there.
    stalled: validations since the learning rate was last reduced or the criterion last rose.
    learning_rates: of the optimiser's groups. factors: of each epoch, its learning rate over that of the config.
    seconds: spent so far. cursor: where in a stream the next batch begins; see `trope.train.block_order.Cursor`.
    """

    epoch: int = 0
    index: int = 0
    step: int = 0
    loss_sum: float = 0.0
    best: float | None = None
    best_epoch: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)
    stalled: int = 0
    learning_rates: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cursor: list[int] | None = None

    @property
    def is_best(self) -> bool:
        """Whether the model as it is now is the best so far."""
        return self.best is not None and self.index == 0 and self.epoch == self.best_epoch

    def to_dict(self) -> dict[str, typing.Any]:
        """For state.json; of a store in memory, as before there were streams."""
        return {name: value for name, value in asdict(self).items() if name != "cursor" or value is not None}


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / CHECKPOINTS

    def save(
        self,
        model: SequentialRecommender,
        optimizer: torch.optim.Optimizer,
        state: TrainState,
        group: Group | None = None,
    ) -> None:
        """Write a checkpoint, publish the model if it is the best, and remove what is older than the last two.

        group: of the processes that have the item table's rows between them; all of them call this then.
        """
        state.learning_rates = [float(entry["lr"]) for entry in optimizer.param_groups]
        target = self.folder / f"epoch{state.epoch:04d}-step{state.step:08d}"
        is_there = target.exists()
        if group is not None:
            is_there = bool(group.first_says(float(is_there)))
        if not is_there:
            self._write(target, model, optimizer, state, group)
        self.publish_best(model, state)
        if group is None or group.is_first:
            self._remove_older()

    def _remove_older(self) -> None:
        """Keep the latest checkpoints. The new one is whole, so one that cannot be removed does not end the run."""
        for old in self._all()[:-KEEP]:
            try:
                shutil.rmtree(old)
            except OSError as error:
                said = f"warning: the old checkpoint {old} could not be removed: {error}; the next save tries again"
                tqdm.write(said, file=sys.stderr)

    def _write(
        self,
        target: Path,
        model: SequentialRecommender,
        optimizer: torch.optim.Optimizer,
        state: TrainState,
        group: Group | None,
    ) -> None:
        staged = target.with_name(_STAGED_ROWS.format(target.name))
        rows = {} if group is None else item_rows.stage(model, optimizer, staged, group)
        if group is not None and not group.is_first:
            return
        saved = model if group is None else pretrained.WithTable(model, item_rows.TABLE, None)
        moments = _optimizer_tensors(model, optimizer)
        with atomic_folder(target) as partial:
            saved.save_pretrained(partial / MODEL)
            files = {
                OPTIMIZER: write_tensors(
                    {name: x for name, x in moments.items() if not (rows and name in item_rows.IN_OPTIMIZER)},
                    partial / OPTIMIZER,
                ),
                _MODEL_CONFIG: sha256_of(partial / _MODEL_CONFIG),  # which has the SHA-256 of the weights
                **rows,
            }
            if rows:
                item_rows.take(rows, staged, partial)
            number = SHARDED_FORMAT if rows else FORMAT
            write_json(partial / STATE, seal({"format": number, **state.to_dict(), "files": files}))

    def publish_best(self, model: SequentialRecommender, state: TrainState) -> None:
        """Write RUN/best if `model` is it; done again on resume, in case the run was killed right before."""
        if state.is_best:
            publish(model, self.run)

    def latest(self) -> Path | None:
        """The latest checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def tidy(self) -> None:
        """Bring back a best model that was being replaced, and remove what a killed process left unfinished."""
        recover_all(self.folder)
        for folder in (self.run / BEST, self.run / _DRAFT):
            recover(folder)
        for leftover in (self.run / _DRAFT, *self.folder.glob(_STAGED_ROWS.format("*"))):
            shutil.rmtree(leftover, ignore_errors=True)

    def _all(self) -> list[Path]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("epoch*")]
        return [path for *_, path in sorted((int(m[1]), int(m[2]), path) for m, path in matches if m)]


def publish(model: SequentialRecommender, run: Path) -> None:
    """Write RUN/best. Metrics and ranks of another model are removed first, so that a kill leaves no wrong ones.

    All processes that have the item table's rows between them call this; the first one gets all rows and writes.
    """
    whole: SequentialRecommender | pretrained.WithTable = model
    if isinstance(model.items, ShardedItemTable):
        rows = model.items.whole()
        if rows is None:
            return
        whole = pretrained.WithTable(model, item_rows.TABLE, rows)
    best, draft = run / BEST, run / _DRAFT
    whole.save_pretrained(draft)
    try:
        # The configs have the SHA-256 of the weights: only where they agree is there something to read.
        is_there = all((best / name).is_file() for name in (MODEL_CONFIG, WEIGHTS))
        if is_there and all(sha256_of(draft / name) == sha256_of(best / name) for name in (MODEL_CONFIG, WEIGHTS)):
            return
        for stale in (run / METRICS, ranks_path(run, "test"), ranks_path(run, "valid")):
            stale.unlink(missing_ok=True)
        with atomic_folder(best) as partial:
            for file in draft.iterdir():
                file.rename(partial / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def written_into(run: Path) -> Iterator[None]:
    """A disk that fills up, or fails, while a run writes: the error names the checkpoint to go on from."""
    try:
        yield
    except FileNotFoundError:
        raise  # of a file to read: it says which, and room would not help
    except OSError as error:
        latest = Checkpoints(run).latest()
        kept = f"the last good checkpoint is {latest}" if latest else "there was no checkpoint yet"
        raise OSError(f"{run} could not be written: {error}; {kept}. Make room and go on with --resume") from error


def load(path: Path, model: SequentialRecommender, optimizer: torch.optim.Optimizer) -> TrainState:
    """Fill model and optimiser from a checkpoint; returns how far the run was."""
    state, files = read_state(path)
    config = path / _MODEL_CONFIG
    if files and not (config.is_file() and sha256_of(config) == files[_MODEL_CONFIG]):
        raise ValueError(f"{config} is missing, damaged, or of another checkpoint; {_advice(path)}")
    in_files = item_rows.row_file_names(set(files))
    is_whole = not in_files and not isinstance(model.items, ShardedItemTable)
    stored = SequentialRecommender.from_pretrained(path / MODEL) if is_whole else pretrained.read_config(path / MODEL)
    if stored.num_items != model.num_items:
        raise ValueError(
            f"the checkpoint {path} knows {stored.num_items:,} items, the data have {model.num_items:,}; "
            "resume with the data it was trained on, or start a new run"
        )
    if changed := changed_settings(stored.config, model.config):
        raise ValueError(f"the checkpoint {path} is of another model: {'; '.join(changed)}; start a new run")
    if isinstance(stored, SequentialRecommender):
        model.load_state_dict(stored.state_dict())
        _fill_optimizer(path / OPTIMIZER, files.get(OPTIMIZER), model, optimizer)
    else:
        table = frozenset((item_rows.TABLE,))
        pretrained.check_shapes(model, path / MODEL, leave_out=table)
        pretrained.fill(model, path / MODEL, stored.sha256, leave_out=table)
        _fill_optimizer(path / OPTIMIZER, files.get(OPTIMIZER), model, optimizer, item_rows.IN_OPTIMIZER)
        try:
            item_rows.fill_rows(model, optimizer, item_rows.row_files(path, files, model.num_items))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"cannot read the items' rows of {path}: {error}; {_advice(path)}") from None
    if state.step and not any(optimizer.state.values()):
        raise ValueError(f"{path / OPTIMIZER} is empty although {state.step:,} steps were done; {_advice(path)}")
    if len(state.learning_rates) != len(optimizer.param_groups):
        raise ValueError(f"{path / STATE} has {len(state.learning_rates)} learning rates; {_advice(path)}")
    set_learning_rates(optimizer, state.learning_rates)
    return state


def read_state(path: Path) -> tuple[TrainState, dict[str, str]]:
    """state.json, checked, and the SHA-256 of the files that it names; {} where an older version wrote it."""
    file, kinds = path / STATE, typing.get_type_hints(TrainState)
    try:
        content = read_json(file, {}, _advice(path))
    except OSError as error:
        raise ValueError(f"{file} is missing or damaged: {error.strerror}; {_advice(path)}") from None
    found, files = content.pop("format", None), content.pop("files", {})
    if found not in (FORMAT, SHARDED_FORMAT, OLDER_FORMAT):
        raise ValueError(f"{file} has format {found!r}, this version of trope reads {FORMAT}; {_advice(path)}")
    check_kinds(file, {"cursor": None, **content}, kinds, _advice(path))
    if unknown := content.keys() - kinds.keys():
        raise ValueError(f"{file} is damaged or foreign: it has {sorted(unknown)}; {_advice(path)}")
    if not all(rate > 0 for rate in content["learning_rates"]):
        raise ValueError(f"{file} has learning rates {content['learning_rates']}; {_advice(path)}")
    if found != OLDER_FORMAT:
        check_kinds(file, {"files": files}, {"files": dict[str, str]}, _advice(path))
        rows = _row_files(file, files) if found == SHARDED_FORMAT else []
        if files.keys() != {OPTIMIZER, _MODEL_CONFIG, *rows}:
            raise ValueError(f"{file} is damaged or foreign: it has files {sorted(files)}; {_advice(path)}")
    return TrainState(**content), files


def _row_files(file: Path, files: dict[str, str]) -> list[str]:
    try:
        return item_rows.row_file_names(set(files))
    except ValueError as error:
        raise ValueError(f"{file} is damaged or foreign: {error}; {_advice(file.parent)}") from None


_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


def _optimizer_tensors(model: SequentialRecommender, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name; positions in a list would not survive a change of the model's code."""
    return {
        f"{name}/{moment}": value
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def _fill_optimizer(
    path: Path,
    sha256: str | None,
    model: SequentialRecommender,
    optimizer: torch.optim.Optimizer,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """leave_out: names in the file that are not read here."""
    try:
        tensors = read_tensors(path, sha256, leave_out)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}; {_advice(path.parent)}") from None
    parameters = dict(model.named_parameters())
    found: dict[str, set[str]] = {}
    for key in tensors:
        found.setdefault(key.rpartition("/")[0], set()).add(key.rpartition("/")[2])
    for name, moments in found.items():
        elsewhere = {moment for moment in _MOMENTS if f"{name}/{moment}" in leave_out}
        if missing := _MOMENTS - moments - elsewhere:
            raise ValueError(f"{path} has no {', '.join(sorted(missing))} of {name}; {_advice(path.parent)}")
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters.get(name)
        # Moments that the optimiser has made already may have shapes of their own; the others take the parameter's.
        known = None if parameter is None else optimizer.state[parameter].get(moment)
        shapes = () if parameter is None else ((parameter if known is None else known).shape, torch.Size(()))
        if parameter is None or value.shape not in shapes:
            raise ValueError(
                f"{path} has {key} {list(value.shape)}, which model and optimiser have not; {_advice(path.parent)}"
            )
        # Copied: on a CPU `value` is the mapped file, which would keep its place on the disk after it is removed.
        # The fused step counts in float64. torch's AdamW, which may go on from here, reads float32 on a GPU.
        dtype = torch.float32 if moment == "step" and known is None else value.dtype
        optimizer.state[parameter][moment] = value.to(parameter.device, dtype, copy=True)


def _advice(path: Path) -> str:
    return f"remove {path} to resume from the checkpoint before it, or start a new run"
