"""Checkpoints: whole or not there, never unpickled.

    RUN/checkpoints/epoch0003-step00000120/
        model/                 weights and config, as `save_pretrained` writes them
        optimizer.safetensors  AdamW's moments as "parameter/moment"
        state.json             how far the run is, and its learning rates
    RUN/best/                  the model with the best validation so far; after a refit, the refitted one

A checkpoint is written under another name, flushed to disk, and renamed; the two latest are kept. There is no random
state in it: everything random in a run is seeded from the step (see `trope.train.step`).
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trope.atomic import atomic_folder
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, CHECKPOINTS, MODEL, OPTIMIZER, STATE
from trope.train.optimizer import set_learning_rates

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"epoch(\d+)-step(\d+)")


@dataclass
class TrainState:
    """How far a run is.

    epoch: epochs finished. index: steps done of the epoch under way. step: steps done in all.
    loss_sum: over the steps of the epoch under way.
    best, best_epoch, best_metrics: the criterion of validation at its best, after which epoch, and all metrics there.
    stalled: validations since the learning rate was last reduced or the criterion last rose.
    learning_rates: of the optimiser's groups. factors: of each epoch, its learning rate over that of the config.
    seconds: spent so far.
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

    @property
    def is_best(self) -> bool:
        """Whether the model as it is now is the best so far."""
        return self.best is not None and self.index == 0 and self.epoch == self.best_epoch


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / CHECKPOINTS

    def save(self, model: SequentialRecommender, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Write a checkpoint, publish the model if it is the best, and remove what is older than the last two."""
        state.learning_rates = [float(group["lr"]) for group in optimizer.param_groups]
        target = self.folder / f"epoch{state.epoch:04d}-step{state.step:08d}"
        if not target.exists():
            with atomic_folder(target) as partial:
                model.save_pretrained(partial / MODEL)
                save_file(_optimizer_tensors(model, optimizer), partial / OPTIMIZER)
                content = {"format": FORMAT, **asdict(state)}
                (partial / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        self.publish_best(model, state)
        for old in self._all()[:-KEEP]:
            shutil.rmtree(old)

    def publish_best(self, model: SequentialRecommender, state: TrainState) -> None:
        """Write RUN/best if `model` is it; done again on resume, in case the run was killed right before."""
        if state.is_best:
            model.save_pretrained(self.run / BEST)

    def latest(self) -> Path | None:
        """The latest checkpoint."""
        found = self._all()
        return found[-1] if found else None

    def tidy(self) -> None:
        """Remove what a killed process left unfinished."""
        leftovers = [*self.folder.glob(".*.partial-*"), *self.run.glob(f".{BEST}.*")]
        for path in leftovers:
            shutil.rmtree(path)

    def _all(self) -> list[Path]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("epoch*")]
        return [path for *_, path in sorted((int(m[1]), int(m[2]), path) for m, path in matches if m)]


def load(path: Path, model: SequentialRecommender, optimizer: torch.optim.Optimizer) -> TrainState:
    """Fill model and optimiser from a checkpoint; returns how far the run was."""
    state = _read_state(path)
    stored = SequentialRecommender.from_pretrained(path / MODEL)
    if stored.num_items != model.num_items:
        raise ValueError(
            f"the checkpoint {path} knows {stored.num_items:,} items, the data have {model.num_items:,}; "
            "resume with the data it was trained on, or start a new run"
        )
    try:
        model.load_state_dict(stored.state_dict())
    except RuntimeError as error:
        raise ValueError(f"the checkpoint {path} is of another model: {error}; start a new run") from None
    _fill_optimizer(path / OPTIMIZER, model, optimizer)
    if len(state.learning_rates) != len(optimizer.param_groups):
        raise ValueError(f"{path / STATE} has {len(state.learning_rates)} learning rates; {_advice(path)}")
    set_learning_rates(optimizer, state.learning_rates)
    return state


def _read_state(path: Path) -> TrainState:
    try:
        content: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
        found = content.pop("format")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / STATE} is missing or damaged: {error}; {_advice(path)}") from None
    if found != FORMAT:
        raise ValueError(f"{path / STATE} has format {found!r}, this version of trope reads {FORMAT}; {_advice(path)}")
    try:
        return TrainState(**content)
    except TypeError as error:
        raise ValueError(f"{path / STATE} is foreign or damaged: {error}; {_advice(path)}") from None


def _optimizer_tensors(model: SequentialRecommender, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter name; positions in a list would not survive a change of the model's code."""
    return {
        f"{name}/{moment}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def _fill_optimizer(path: Path, model: SequentialRecommender, optimizer: torch.optim.Optimizer) -> None:
    try:
        tensors = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}; {_advice(path.parent)}") from None
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters.get(name)
        # Moments that the optimiser has made already may have shapes of their own; the others take the parameter's.
        shapes = () if parameter is None else (optimizer.state[parameter].get(moment, parameter).shape, torch.Size(()))
        if parameter is None or value.shape not in shapes:
            raise ValueError(
                f"{path} has {key} {list(value.shape)}, which model and optimiser have not; {_advice(path.parent)}"
            )
        optimizer.state[parameter][moment] = value.to(parameter.device)


def _advice(path: Path) -> str:
    return f"remove {path} to resume from the checkpoint before it, or start a new run"
