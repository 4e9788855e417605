"""Learning without a run folder: a model that goes on with new events, and one that is trained again from the start.

`update` is a fraction of a training. A pass of it is every window that ends in new events, and as many random windows
of old ones, so that what was learned before is not lost. The optimiser begins anew, at the learning rate that the
training began with: a new item's row moves by about the rate a step, and a quiet hour has few steps. The rate falls
from pass to pass, as in a training. The coordinates in which times are rotated stay as they were; the readout turns on
until the last new event.

Before the network learns the new events they are what it has not seen, so the pulse's weights move towards them first,
the further the more users chose something (`trope.train.pulse.move_pulse`). How far an updated network is to be trusted
is measured that way. Its age is still counted from the training: a few steps do not make a network young.

Shapes: N events, V items.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.views import validated_from
from trope.evaluate.evaluation import fitted_pulse
from trope.models.recommender import SequentialRecommender
from trope.train.distributed import Group
from trope.train.optimizer import make_optimizer, set_learning_rates
from trope.train.parts import for_device
from trope.train.pulse import keep_counts, move_pulse
from trope.train.step import Feed, seed_for
from trope.train.stepper import Stepper

# How many steps lie between two looks at whether everything is finite, which wait for the device.
_LOOK_EVERY = 200
# Passes over the new events, as long as they stay below this share of a training's steps; one pass is made in any case.
# Not tuned: on a quarter of Globo's users one pass had 57.23 where these had 57.35, one seed, without the pulse's fit.
MOST_PASSES, MOST_SHARE = 5, 0.05
# With fewer users than this after the last learned event the pulse's weights stay where they are; not tuned.
LEAST_USERS = 50
# What depends on the items or on the time span, and is counted from the events.
_COUNTED = ("pulse.counts", "pulse.seasons", "pulse.counted_until")


class Spent(NamedTuple):
    """What a learning cost."""

    steps: int
    seconds: float


class Updated(NamedTuple):
    """A model that has learned new events, what that cost, and what was fitted to them first, as in `pulse.json`."""

    model: SequentialRecommender
    spent: Spent
    pulse: dict[str, Any] | None


def grow(
    model: SequentialRecommender, num_items: int, time_span: tuple[int, int], seed: int = 0
) -> SequentialRecommender:
    """A copy of a model with rows for more items, on the same device.

    The rows of known items are the same bytes; new rows are drawn as at the start of a training. Frequencies and their
    origin stay: the weights were learned with them. The pulse has no counts until `keep_counts` counts anew.

    time_span: of the events that the copy will have learned: its readout turns until the last. Its age still begins
    where the model's does.
    """
    assert num_items >= model.num_items, "items are never taken away"
    device = model.items.weight.device
    torch.manual_seed(seed_for(seed, "new items", num_items))
    grown = SequentialRecommender(model.config, num_items, time_span, age_from=model.age_from)
    fresh = grown.state_dict()
    state = {name: fresh[name] if name in _COUNTED else value for name, value in model.state_dict().items()}
    rows = grown.items.weight.detach().clone()
    rows[: model.num_items + 1] = model.items.weight.detach()
    grown.load_state_dict({**state, "items.weight": rows})
    return grown.to(device)


def update(
    model: SequentialRecommender,
    data: Sequences,
    config: Config,
    fresh_N: Tensor,
    factors: Sequence[float],
    group: Group,
    steps: int | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Updated:
    """A copy of a model that goes on training, with rows for all items of `data`; the model stays as it is.

    Args:
        data: on the model's device; its training events are all that is known, the new ones among them.
        fresh_N: [N] bool, which events are new.
        factors: of a whole training, the learning rate of each epoch over that of the config. An update begins with
            the first.
        steps: optimiser steps; `usual_steps` if None.
        tell: called after each step with the steps done and all steps.
    """
    started = time.monotonic()
    # Another seed for each update: negatives and order would otherwise repeat from tick to tick.
    seed = seed_for(config.train.seed, "update", data.time_span[1])
    config = for_device(config, group.device)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    feed = Feed(data, config, group, fresh_N)
    if steps is None:
        steps = usual_steps(feed.steps, len(factors) * Feed(data, config, group).steps)
    passes = -(-steps // feed.steps)
    known = grow(model, data.num_items, model.time_span, seed)  # it has learned nothing of the new events yet
    fitted = _move_to_new(known, data, config, fresh_N)
    grown = grow(known, data.num_items, data.time_span, seed)
    falling = [factors[0] * (1 - number / passes) for number in range(passes)]
    done = _learn(grown, data, config, feed, falling, group, steps, tell)
    if grown.pulse is not None:
        keep_counts(grown, data)
    return Updated(grown, Spent(done, time.monotonic() - started), fitted)


def _move_to_new(
    model: SequentialRecommender, data: Sequences, config: Config, fresh_N: Tensor
) -> dict[str, Any] | None:
    """Move the pulse's weights in place towards the events after the last one that was learned; returns what
    `move_pulse` does.

    None where they stay as they are: it was not fitted before, or there are too few users.
    """
    pulse, known = fitted_pulse(model), data.first_events(data.train_end)
    learned = known[~fresh_N[known]]
    if pulse is None or not len(learned):
        return None
    start, end = int(data.times[learned].max()) + 1, data.time_span[1] + 1
    if start >= end:  # all new events came late
        return None
    view = validated_from(data, start, end)
    users = len(view.eval_users("valid"))
    if users < LEAST_USERS:
        return None
    return move_pulse(model, view, config, config.train.seed)


def retrain(
    data: Sequences, config: Config, factors: Sequence[float], group: Group
) -> tuple[SequentialRecommender, Spent]:
    """A model trained from the start on the training events of `data`: the same as `Trainer` with these factors.

    With `train.parts` it is the same to rounding, because the table is whole here.
    """
    started, config = time.monotonic(), for_device(config, group.device)
    torch.manual_seed(seed_for(config.train.seed, "init"))
    model = SequentialRecommender(config, data.num_items, data.time_span).to(group.device)
    done = _learn(model, data, config, Feed(data, config, group), factors, group)
    return model, Spent(done, time.monotonic() - started)


def usual_steps(a_pass: int, a_training: int) -> int:
    """How many steps to update with, where one pass over the new events and a whole training take so many."""
    return min(MOST_PASSES * a_pass, max(a_pass, math.floor(MOST_SHARE * a_training)))


def _learn(
    model: SequentialRecommender,
    data: Sequences,
    config: Config,
    feed: Feed,
    factors: Sequence[float],
    group: Group,
    steps: int | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> int:
    """One pass for each factor, at most `steps` steps; returns how many were done."""
    optimizer = make_optimizer(model, config)
    rates = [float(entry["lr"]) for entry in optimizer.param_groups]
    stepper = Stepper(model, data, config, feed, optimizer, group)
    total = len(factors) * feed.steps if steps is None else min(steps, len(factors) * feed.steps)
    model.train()
    for step in range(total):
        epoch, index = divmod(step, feed.steps)
        if index == 0:
            set_learning_rates(optimizer, [factors[epoch] * rate for rate in rates])
            stepper.rates_changed()
        stepper(epoch, index, step)
        if tell is not None:
            tell(step + 1, total)
        if (step + 1) % _LOOK_EVERY == 0 or step + 1 == total:
            stepper.guard.check("the model from before is as it was")
    model.train(False)
    return total
