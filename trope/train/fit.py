"""`fit`: the model to deploy. Every event is training; a finished run says for how long and at which learning rates.

There is nothing left to validate or test on, so the run has no metrics.json. What to expect of it is what the run that
it follows has measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trope.config import Config
from trope.data.catalogue import Catalogue
from trope.data.folder import sha256_of
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.data.views import all_training
from trope.models.pretrained import read_config
from trope.runs import (
    BEST,
    CATALOGUE,
    METRICS,
    MODEL_CONFIG,
    PULSE,
    RunLock,
    check_model_config,
    read_data,
    read_environment,
    read_lineage,
    read_metrics,
    seal,
    write_json,
)  # fmt: skip
from trope.train.checkpoint import Checkpoints, read_state, written_into
from trope.train.distributed import process_group
from trope.train.loop import Trainer
from trope.train.parts import for_device
from trope.train.process import reproducible, stop_signals, threads_for
from trope.train.pulse import read_pulse


class Recipe(NamedTuple):
    """What validation settled.

    factors: the learning rate of each epoch over that of the config, so also how many epochs.
    valid, test: metrics of the run that validation chose it in.
    """

    config: Config
    factors: list[float]
    valid: dict[str, float]
    test: dict[str, float]
    pulse: dict[str, Any] | None  # what pulse.json holds

    @property
    def trained_pulse(self) -> dict[str, Any] | None:
        """What pulse.json held after the training: an update's weights are for a network of the update's age."""
        return None if self.pulse is None else self.pulse.get("trained", self.pulse)

    def to_dict(self) -> dict[str, Any]:
        """For lineage.json."""
        return {"factors": self.factors, "valid": self.valid, "test": self.test}


class Matched(NamedTuple):
    """Items that a run and a dataset have in common, those only the dataset has, and those only the run has."""

    known: int
    new: int
    gone: int


def read_recipe(run: Path) -> Recipe:
    """What a finished run's validation settled. A run of `fit` or `update` has it from the run that it came from."""
    try:
        config = read_config(run / BEST).config
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{run} has no trained model; is it the folder of a run made by `trope train`?"
        ) from None
    check_model_config(run, config)
    lineage = read_lineage(run)
    if lineage is not None:
        settled = lineage["recipe"]
        factors, valid, test = settled["factors"], settled["valid"], settled["test"]
    else:
        if not (run / METRICS).is_file():
            raise ValueError(f"{run} is not finished: it has no {METRICS}; go on with `trope train --resume` first")
        metrics, latest = read_metrics(run), Checkpoints(run).latest()
        if latest is None:
            raise ValueError(f"{run} has no checkpoint left, which has its learning rates; copy the run again")
        state = read_state(latest)[0]
        factors, valid, test = state.factors[: state.best_epoch], metrics["valid"], metrics["test"]
        if not factors or len(factors) != state.best_epoch:
            raise ValueError(f"{latest} does not say the learning rate of every epoch; train {run} again")
    pulse = read_pulse(run, len(factors)) if config.model.pulse else None
    if config.model.pulse and pulse is None:
        raise ValueError(f"{run} has no {PULSE} of its best model; go on with `trope train --resume` first")
    return Recipe(config, factors, valid, test, pulse)


def match_items(run: Path, data: Sequences | Stream) -> Matched:
    """Compare the items of a run and of a dataset by their original ids; refuse what is not the same catalogue."""
    ids = data.ids("item_ids")
    if ids is None:
        raise ValueError(f"{data.path} has no item_ids, so its items cannot be told; prepare the data again")
    known = int((Catalogue.load(run / CATALOGUE).dense(list(ids.to_list())) > 0).sum())
    found = Matched(known, len(ids) - known, read_data(run)["items"] - known)
    if found.known <= found.gone:
        raise ValueError(
            f"{data.path} has {found.known:,} of the {found.known + found.gone:,} items of {run}: it is not a later "
            "preparation of the same log; train on it with `trope train` first"
        )
    return found


def descend(kind: str, parent: Path, recipe: Recipe, data: Sequences | Stream, added: int) -> dict[str, Any]:
    """The lineage of a run that comes from `parent`, still without its steps.

    kind: fit or update. added: events that the parent's dataset has not.
    """
    before = read_lineage(parent)
    described = {
        "kind": "train" if before is None else before["kind"],
        "path": str(parent),
        "sha256": sha256_of(parent / BEST / MODEL_CONFIG),  # which has the SHA-256 of the weights
        "commit": str(read_environment(parent).get("commit", "unknown")),
    }
    return {
        "kind": kind,
        "parent": described,
        "ancestors": [] if before is None else [before["parent"], *before["ancestors"]],
        "data": data.meta["checksum"],
        "events_added": added,
        "recipe": recipe.to_dict(),
    }


def fit(
    data: Sequences | Stream,
    like: str | Path,
    out: str | Path,
    device: str = "auto",
    resume: bool = False,
    progress: bool = True,
    checkpoint_seconds: float = 300.0,
) -> dict[str, Any]:
    """Train on all events of `data` as the run `like` was trained, into the run folder `out`; returns its lineage.

    data: the dataset of `like`, or a later preparation of the same log. The other arguments, and what is raised, are
    those of `trope.train.loop.train`.
    """
    run, parent = Path(out), Path(like)
    recipe = read_recipe(parent)
    match_items(parent, data)
    lineage = descend("fit", parent, recipe, data, data.num_events - read_data(parent)["events"])
    every = data.all_training() if isinstance(data, Stream) else all_training(data)
    with (
        process_group(device) as group,
        reproducible(group.device),
        threads_for(recipe.config),
        stop_signals() as stop,
        RunLock() as lock,
    ):
        config = for_device(recipe.config, group.device)
        trainer = Trainer(every, config, run, group, resume, recipe.factors, lock, lineage)
        trainer.run(stop, checkpoint_seconds, progress)
        if group.is_first and recipe.trained_pulse is not None:
            with written_into(run):
                write_json(run / PULSE, seal(recipe.trained_pulse))
        group.wait()
        trainer.take_pulse(run, len(recipe.factors))
        trainer.publish(run)
        return {**lineage, "steps": trainer.total_steps}
