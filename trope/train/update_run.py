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
from trope.train.process import reproducible
from trope.train.update import grow, update


def learned_events(run: Path, data: Sequences, recipe: Recipe) -> Tensor:
    """Which events of its dataset a run's model was trained on, [N] bool; its test events are not among them."""
    is_learned = torch.zeros(data.num_events, dtype=torch.bool)
    if read_lineage(run) is not None:
        return ~is_learned
    is_refitted = recipe.config.train.refit and not data.validates_on_test
    is_learned[data.first_events(data.valid_end if is_refitted else data.train_end)] = True
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
    """Write a run that goes on from `parent` into the empty folder `out`; returns its lineage.

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
        model = grow(before, data.num_items, every.time_span, config.train.seed)
        with tqdm(disable=not progress, unit="it", dynamic_ncols=True, desc="update") as bar:

            def tell(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            spent = update(model, every, config, fresh_N.to(group.device), recipe.factors, group, steps, tell)
        lineage = {**descend("update", parent, recipe, data, added), "steps": spent.steps}
        open_run(out, data, config, resume=False, lineage=lineage)
        write_json(out / DATA, seal({**data.describe(), "path": str(data_path)}))
        if recipe.pulse is not None:
            write_json(out / PULSE, seal(recipe.pulse))
        model.save_pretrained(out / BEST)
    return lineage
