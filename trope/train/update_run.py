"""A run's folder after an update: the model that has learned the new events, its catalogue, dataset and lineage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from trope.data.sequences import Sequences
from trope.data.views import all_training
from trope.models.recommender import SequentialRecommender
from trope.runs import BEST, DATA, PULSE, open_run, read_lineage, seal, write_json
from trope.train.distributed import process_group
from trope.train.fit import Recipe, descend
from trope.train.log import how_often
from trope.train.process import reproducible
from trope.train.update import update


def learned_events(run: Path, data: Sequences, recipe: Recipe) -> Tensor:
    """Which events of its dataset a run's model was trained on, [N] bool; its test events are not among them."""
    is_learned = torch.zeros(data.num_events, dtype=torch.bool)
    if read_lineage(run) is not None:
        return ~is_learned
    if recipe.config.model.pulse and data.validates_on_test:
        data = data.with_own_validation()  # as `trope.train.loop.train` does
    is_learned[data.first_events(data.valid_end if recipe.config.train.refit else data.train_end)] = True
    return is_learned


def update_run(
    parent: Path,
    recipe: Recipe,
    data: Sequences,
    fresh_N: Tensor,
    added: int,
    out: Path,
    data_path: Path,
    device: str = "auto",
    steps: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a run that goes on from `parent` into the empty folder `out`; returns its lineage, with the number of
    requests that the pulse was fitted to.

    Args:
        recipe: of the parent.
        data: the extended dataset; its first items are the parent's.
        fresh_N: [N] bool, the events that the parent's model has not learned. added: how many its dataset has not.
        data_path: where the dataset will be when the run is whole.
        steps: optimiser steps; as in `update` if None.
    """
    config = recipe.config
    with process_group(device) as group, reproducible(group.device):
        if group.size > 1:
            raise ValueError("an update runs in one process; call trope without torchrun")
        every = all_training(data).to(group.device)
        before = SequentialRecommender.from_pretrained(parent / BEST).to(group.device)
        with tqdm(disable=not progress, unit="it", dynamic_ncols=True, desc="update", **how_often()) as bar:

            def tell(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            fresh_N = fresh_N.to(group.device)
            model, spent, fitted = update(before, every, config, fresh_N, recipe.factors, group, steps, tell)
        lineage = {
            **descend("update", parent, recipe, data, added), "steps": spent.steps,
            "pulse_requests": 0 if fitted is None else fitted["users"],
        }  # fmt: skip
        open_run(out, data, config, resume=False, lineage=lineage)
        write_json(out / DATA, seal({**data.describe(), "path": str(data_path)}))
        if recipe.pulse is not None:
            trained = {"trained": recipe.trained_pulse} if fitted else {}  # for a `fit` like this run
            write_json(out / PULSE, seal({**recipe.pulse, **(fitted or {}), **trained}))
        model.save_pretrained(out / BEST)
    return lineage
