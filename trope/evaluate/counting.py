"""The control "MODEL + counting": how much of what a model lacks, or gains, is counting what everybody chooses now?

    score(u, i, t) = cosine(u, i, t) + beta * log share(i, t)

The share is the item's part of everybody's decayed counts at one half-life, strictly before t. Validation chooses beta
and the half-life, with the model that validation chose, before a refit sees the validation events; beta is 0 where no
counting is better than none. The test reads the choice once (`evaluate(.., counting=..)`). A model with a fitted pulse
counts already and has no such control.

Shapes: B users of a batch, M their distinct moments, K half-lives, V items, S positives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.evaluate import baselines
from trope.evaluate.baselines import MOST_USERS, half_lives
from trope.evaluate.evaluation import (
    EvalResult,
    Model,
    encoder,
    fitted_pulse,
    item_vectors,
    ranked_cells,
)  # fmt: skip
from trope.evaluate.live import Counting, events_before, users_at_a_time
from trope.evaluate.metrics import Places, average, per_user
from trope.evaluate.ranking import TileScores, check_finite, count_places, dot_scores
from trope.evaluate.some_users import as_it_is, draw_users
from trope.evaluate.streamed import evaluate
from trope.models.pulse import CountStream
from trope.runs import COUNTING, WITH_COUNTING, read_json

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_KINDS: dict[str, Any] = {
    "best_epoch": int, "beta": float, "half_life": int, "criterion": str, "users": int, "without": dict[str, float],
    "with": dict[str, float],
}  # fmt: skip


def choose_counting(model: Model, data: Sequences | Stream, config: Config, seed: int) -> dict[str, Any]:
    """Choose beta and half-life on validation; returns what `counting.json` holds besides the epoch.

    model: not trained on the validation events. data: on its device. seed: of the choice of at most MOST_USERS users.
    """
    ((store, users),) = draw_users(data, [as_it_is], "valid", MOST_USERS, torch.Generator().manual_seed(seed))
    lives, criterion = half_lives(data), config.train.criterion
    grid = [Counting(0.0, lives[0]), *(Counting(beta, each) for each in lives for beta in BETAS)]
    counts = CountStream(events_before(data, "valid"), torch.tensor(lives, dtype=torch.float64), data.num_items)
    found = _validate(model, store, config, users, grid, lives, counts)
    best = max(range(len(grid)), key=lambda place: found[place][criterion])  # the first of equals: none, if it is
    return {
        "beta": grid[best].beta, "half_life": grid[best].half_life, "criterion": criterion, "users": len(users),
        "without": found[0], "with": found[best],
    }  # fmt: skip


def read_counting(run: Path, epoch: int) -> Counting | None:
    """What validation chose for the model of an epoch, or None."""
    if not (run / COUNTING).is_file():
        return None
    advice = f"remove it and resume {run}"
    found = read_json(run / COUNTING, _KINDS, advice)
    if not (0 <= found["beta"] <= max(BETAS) and found["half_life"] > 0):
        what = f"beta {found['beta']!r} and half_life {found['half_life']!r}"
        raise ValueError(f"{run / COUNTING} is damaged or foreign: it has {what}; {advice}")
    return Counting(found["beta"], found["half_life"]) if found["best_epoch"] == epoch else None


def score_counting(
    model: Model, data: Sequences | Stream, config: Config, counting: Counting | None, alone: EvalResult
) -> dict[str, dict[str, float]]:
    """The control's test metrics under their name in metrics.json; empty without a choice or with a fitted pulse.

    alone: the test of the model without counting.
    """
    if counting is None or fitted_pulse(model) is not None:
        return {}
    if counting.beta:
        alone = evaluate(model, data, "test", config.eval.filter_seen, config.model.max_len, counting=counting)
    return {WITH_COUNTING: alone.metrics}


def _validate(
    model: Model,
    data: Sequences,
    config: Config,
    users: Tensor,
    grid: list[Counting],
    lives: list[int],
    counts: CountStream,
) -> list[dict[str, float]]:
    """Validation metrics of some users, in the order of t_now, for each choice; a user is encoded once for all.

    lives, counts: the half-lives of the grid, and everybody's counts at each.
    """
    seen, max_len = config.eval.filter_seen, config.model.max_len
    counted: list[list[Tensor]] = [[] for _ in grid]
    sizes = []
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            items_VE = item_vectors(model, data)
            encode = encoder(model, items_VE.device, "auto")
            batch_size = users_at_a_time(len(lives) * data.num_items, baselines.batch_size(data))
            for part in users.split(batch_size):
                batch = data.eval_batch("valid", part, max_len)
                positives, left_out = ranked_cells(batch, data, "valid", seen, max_len)
                out_BE = encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
                check_finite(out_BE, "outputs")
                dots_BV = dot_scores(out_BE, items_VE)(0, data.num_items + 1)
                moments_M, moment_B = torch.unique(batch.t_now, return_inverse=True)
                shares_KMV = torch.stack(list(counts.at(moments_M)), dim=1)
                # Of a holdout there is one row for everybody.
                shares_K = [each_MV if len(each_MV) == 1 else each_MV[moment_B] for each_MV in shares_KMV]
                for places, counting in zip(counted, grid, strict=True):
                    scores = _sum(dots_BV, counting.beta, shares_K[lives.index(counting.half_life)])
                    places.append(torch.stack(count_places(scores, data.num_items, positives, left_out, len(part))))
                sizes.append(torch.bincount(positives.rows, minlength=len(part)))
    finally:
        model.train(was_training)
    offsets = np.concatenate(([0], torch.cat(sizes).cumsum(0).cpu().numpy()))
    each = (torch.cat(places, dim=1).cpu().numpy() for places in counted)
    return [average(per_user(Places(better, ties, offsets))) for better, ties in each]


def _sum(dots_BV: Tensor, beta: float, shares_BV: Tensor) -> TileScores:
    return lambda first, last: torch.add(dots_BV[:, first:last], shares_BV[:, first:last], alpha=beta)
