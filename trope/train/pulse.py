"""Fits the pulse on what the network has not seen: the validation events (`trope.models.pulse`).

Some sixty weights, a softmax over the catalogue, seconds of L-BFGS. Under `holdout` everybody is asked at four moments
of the validation window, for what comes in the next quarter of it and for all that is left of it: the weights see the
counts of more than one day, a model that grows old, and near and far horizons. Under the other protocols each user is
asked once, at the moment of the validation event.

The loss is (1 - p^q) / q, which is the likelihood for q = 0 and asks more for what can still reach the first places for
larger q. Validation chooses q, or the bare cosine where no weights are better.

Shapes: B users, M moments, K rows of shares, S candidate items, C own items, P positives, W weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trope.config import Config
from trope.data.in_time import PIECE
from trope.data.protocols import Protocol
from trope.data.sequences import EvalBatch, Sequences
from trope.data.stream import Stream
from trope.data.views import asked_within
from trope.evaluate.evaluation import encoder
from trope.evaluate.live import LiveScorer, time_unit
from trope.evaluate.metrics import Places, average, per_user
from trope.evaluate.ranking import Cells, count_places
from trope.evaluate.some_users import Drawn, View, as_it_is, draw_users
from trope.models.pulse import HALF_LIVES, PERIODS, Pulse
from trope.models.pulse.counts import half_lives_within
from trope.models.pulse.head import WEIGHTS, part_scales, scale_features
from trope.models.pulse.own import FEATURES
from trope.models.recommender import SequentialRecommender
from trope.runs import PULSE, read_json
from trope.times import DAY

MOMENTS = 4
MOST_ITEMS = 16_384
# Users times items of the softmax: bounds the memory and the time of a fit.
MOST_CELLS = {"cpu": 1 << 22, "cuda": 1 << 26}
LEAST_USERS, MOST_USERS = 700, 7_168
EXPONENTS = (0.0, 0.2, 0.4)
UNITS_IN_SPAN, LONGEST_UNIT = 50, 30 * DAY  # where no window says how old a model may be, see `age_unit`
RIDGE = 1e-3  # on the weights; those of the cosines count in units of the training's temperature
# Of the weights where they were, see `move_pulse`. Of 30, 100 and 300 the best on a day of Globo
# (results/update-tried-quarter.txt).
HOLD = 100.0
_BATCH = {"cpu": 128, "cuda": 1_024}  # users at a time; a GPU takes as long for fewer
_KINDS: dict[str, Any] = {"best_epoch": int, "weights": dict, **{f"weights.{name}": list for name in WEIGHTS[:3]}}
_STEPS, _ENOUGH = 40, 1e-6
_START = 0.3  # networks are overconfident about days they have not seen: the scale falls to about a third


class Asked(NamedTuple):
    """Some users at their moments, with everything that the weights multiply."""

    standing_BS: Tensor  # dot products over the standing planes, in units of the temperature
    turning_BS: Tensor  # over the turning ones, as far as they have faded
    about_B4: Tensor  # what the scale depends on
    shares_MKS: Tensor
    moment_B: Tensor
    age_M: Tensor
    horizon: float
    own_rows_C: Tensor
    own_places_C: Tensor
    own_CF: Tensor
    left_out: Cells
    positive_rows_P: Tensor
    positive_places_P: Tensor
    weight_P: Tensor  # a user's positives together weigh one


def age_unit(data: Sequences | Stream) -> int:
    """Seconds after which a model is old: a holdout's window, which is what its fit can measure.

    Where nothing is held out in time no age is fitted. But the readout must not stand still for ever: a calendar shop's
    lists stayed in winter until March. So there a unit is a fiftieth of the training data's span, from a day to thirty.
    """
    if data.protocol.window is not None:
        return data.protocol.window
    span = data.time_span[1] - data.time_span[0]
    return min(max(span // UNITS_IN_SPAN, DAY), LONGEST_UNIT)


def fit_pulse(model: SequentialRecommender, data: Sequences | Stream, config: Config, seed: int) -> dict[str, Any]:
    """Fit the pulse of a trained model in place; returns its weights and what they gained, for `pulse.json`.

    data: on the model's device, with the validation events that the model has not been trained on. A stream gives the
    same users and counts as the same data in memory.
    """
    pulse, criterion = model.pulse, config.train.criterion
    assert pulse is not None
    is_holdout = data.protocol.name == "holdout"
    pulse.get_buffer("age_unit").fill_(age_unit(data))
    grid = time_unit(data)
    active = half_lives_within(grid, data.time_span[1] - data.time_span[0])
    active += [len(HALF_LIVES) + place for place in pulse.periods if PERIODS[place] > grid]
    asked = list(_ask(model, data, config, seed))
    weights_W = _start(pulse)  # scaled cosines: it ranks as the cosine does
    mask_W = _mask(pulse, active, is_holdout)
    found: list[tuple[float, float | None, Tensor]] = [(_judge(asked, weights_W)[criterion], None, weights_W)]
    for q in EXPONENTS:
        weights_W = _minimise(asked, weights_W, mask_W, q)
        found.append((_judge(asked, weights_W)[criterion], q, weights_W))
    score, exponent, weights_W = max(found, key=lambda each: each[0])  # the first of equals
    if exponent is not None:
        _fill(pulse, weights_W, config.train.temperature)
    return {
        "weights": pulse.weights(), "exponent": exponent, "criterion": criterion, "users": _users(asked),
        "cosine": found[0][0], "pulse": score,
    }  # fmt: skip


def move_pulse(model: SequentialRecommender, data: Sequences, config: Config, seed: int) -> dict[str, Any]:
    """Move the weights of a fitted pulse in place towards what new events say; returns what `fit_pulse` does.

    The new weights minimise the loss of a user plus `HOLD` / users times the squared distance from the old ones. Many
    users move them far, and few hardly, whatever the few happened to choose.

    data: on the model's device, a holdout whose validation events are the new ones.
    """
    pulse, criterion = model.pulse, config.train.criterion
    assert pulse is not None
    asked = list(_ask(model, data, config, seed))
    start_W = _weights(pulse, config.train.temperature)
    # What the training had nothing to learn about stays 0.
    moved_W = _minimise(asked, start_W, (start_W != 0).float(), 0.0, HOLD / _users(asked), start_W)
    _fill(pulse, moved_W, config.train.temperature)
    cosine, score = (_judge(asked, weights_W)[criterion] for weights_W in (_start(pulse), moved_W))
    return {
        "weights": pulse.weights(), "exponent": 0.0, "criterion": criterion, "users": _users(asked),
        "cosine": cosine, "pulse": score,
    }  # fmt: skip


def keep_counts(model: SequentialRecommender, data: Sequences | Stream) -> None:
    """Give the pulse everybody's counts right after the last training event, or now, if that event's clock was ahead:
    who serves the model goes on counting from there."""
    assert model.pulse is not None
    (first, last), now = data.time_span, int(time.time())
    until = now if first < now <= last else last + 1
    counts = model.pulse.nothing_counted(until)

    def count(user: int, block: Sequences) -> None:
        for places in block.training_places():
            for some in places[block.times[places] < until].split(PIECE):
                counts.counts.add(block.items[some], block.times[some])
                counts.seasons.add(block.items[some], block.times[some])

    if isinstance(data, Stream):
        for _ in data.over_blocks(count):
            pass
    else:
        count(0, data)
    model.pulse.keep(counts)


def read_pulse(run: Path, epoch: int) -> dict[str, Any] | None:
    """What was fitted for the model of an epoch, or None."""
    if not (run / PULSE).is_file():
        return None
    found = read_json(run / PULSE, _KINDS, f"remove it and resume {run}")
    return found if found["best_epoch"] == epoch else None


def _ask(model: SequentialRecommender, data: Sequences | Stream, config: Config, seed: int) -> Iterator[Asked]:
    """The users to fit on, in batches."""
    is_holdout = data.protocol.name == "holdout"
    windows = _windows(data.protocol) if is_holdout else []
    views: list[View] = [partial(asked_within, moment=begin, until=end) for begin, end in windows]
    ends: list[int | None] = [end for _, end in windows]
    generator = torch.Generator().manual_seed(seed)
    cells = MOST_CELLS[data.device.type] // min(data.num_items, MOST_ITEMS)
    most = min(MOST_USERS, max(LEAST_USERS, cells))
    if not is_holdout:
        views, ends = [as_it_is], [None]
    drawn = draw_users(data, views, "valid", most // len(views), generator)
    candidates_S = _candidates(drawn, generator)
    model.train(False)
    with torch.no_grad():
        items_VE = model.item_vectors().float()
        encode = encoder(model, items_VE.device, "auto")
        assert model.pulse is not None
        counts = None
        if isinstance(data, Stream):
            # In the window, what was chosen before a moment is what the test's histories hold before it.
            counts = model.pulse.count_in_time(data.in_time("test" if is_holdout else "valid"))
        for (view, users), until in zip(drawn, ends, strict=True):
            if not len(users):  # a log by the day has no event in some quarters of its window
                continue
            scorer = LiveScorer(model.pulse, encode, items_VE, view, "valid", until, counts)
            for part in users.split(_BATCH[data.device.type]):
                yield _features(scorer, view.eval_batch("valid", part, config.model.max_len), candidates_S, config)


def _windows(protocol: Protocol) -> list[tuple[int, int]]:
    """Moments of the validation window, each with the end of what is asked for: the next part, and all that is left."""
    start, end = protocol.t_now("valid"), protocol.t_now("test")
    assert start is not None
    assert end is not None
    edges = [start + (end - start) * part // MOMENTS for part in range(MOMENTS + 1)]
    return [*itertools.pairwise(edges), *((edge, end) for edge in edges[:-2])]


def _candidates(drawn: list[Drawn], generator: torch.Generator) -> Tensor:
    """The items of the softmax: all; or in a large catalogue all positives, and others drawn evenly."""
    V, device = drawn[0].data.num_items, drawn[0].data.device
    if V <= MOST_ITEMS:
        return torch.arange(1, V + 1, device=device)
    positives = [view.eval_batch("valid", users, 1).positives for view, users in drawn]
    others = torch.randperm(V, generator=generator)[:MOST_ITEMS].to(device) + 1
    return torch.unique(torch.cat((*positives, others)))


def _features(scorer: LiveScorer, batch: EvalBatch, candidates_S: Tensor, config: Config) -> Asked:
    pulse, data, turning = scorer.pulse, scorer.data, scorer.pulse.turning
    out_BE = scorer.encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
    items_SE = scorer.items_VE[candidates_S]
    standing_BS = out_BE[:, turning:] @ items_SE[:, turning:].T
    turning_BS = out_BE[:, :turning] @ items_SE[:, :turning].T * pulse.fade(batch.t_now)[:, None]
    lengths_B, own = scorer.own(batch)
    moments_M, moment_B = torch.unique(batch.t_now, return_inverse=True)
    shares_MKS = torch.stack([each[:, candidates_S] for each in scorer.stream.at(moments_M)])
    place_V = torch.full((data.num_items + 1,), -1, device=data.device)
    place_V[candidates_S] = torch.arange(len(candidates_S), device=data.device)
    own_in = place_V[own.items_C] >= 0
    positives = Cells.distinct(batch.positives, batch.positive_offsets, data.num_items)
    counts_B = torch.bincount(positives.rows, minlength=len(batch.users))
    seen = Cells.distinct(
        *data.seen(scorer.split, batch.users, config.model.max_len, config.eval.filter_seen), data.num_items
    ).without(positives, data.num_items)
    seen_in, rows_P = place_V[seen.items] >= 0, positives.rows
    return Asked(
        standing_BS / config.train.temperature,
        turning_BS / config.train.temperature,
        scale_features(lengths_B, pulse.age(batch.t_now), scorer.horizon),
        shares_MKS,
        moment_B,
        pulse.age(moments_M),
        scorer.horizon,
        own.rows_C[own_in],
        place_V[own.items_C][own_in],
        own.features_CF[own_in],
        Cells(seen.rows[seen_in], place_V[seen.items][seen_in]),
        rows_P,
        place_V[positives.items],
        1 / counts_B[rows_P].float(),
    )


_NETWORK, _EVERYBODY = 8, 3 * (len(HALF_LIVES) + len(PERIODS))


def _start(pulse: Pulse) -> Tensor:
    weights_W = torch.zeros(_NETWORK + _EVERYBODY + FEATURES + len(HALF_LIVES), device=pulse.half_lives.device)
    weights_W[:2] = _START  # the first row of `Pulse.network`
    return weights_W


def _mask(pulse: Pulse, active: list[int], has_ages: bool) -> Tensor:
    """Which weights there are anything to learn about."""
    network, everybody = torch.ones(4, 2), torch.zeros(3, len(HALF_LIVES) + len(PERIODS))
    network[:, 1] = float(pulse.turning > 0)
    everybody[:, active] = 1.0
    if not has_ages:
        network[2:], everybody[1:] = 0.0, 0.0
    own = torch.cat((torch.ones(FEATURES), everybody[0, : len(HALF_LIVES)]))
    return torch.cat((network.flatten(), everybody.flatten(), own)).to(pulse.half_lives.device)


def _weights(pulse: Pulse, temperature: float) -> Tensor:
    """The weights that the pulse has; the inverse of `_fill`."""
    network, everybody, own = (pulse.get_buffer(name).flatten() for name in ("network", "everybody", "own"))
    return torch.cat((network * temperature, everybody, own))


def _fill(pulse: Pulse, weights_W: Tensor, temperature: float) -> None:
    network, everybody, own = weights_W.split([_NETWORK, _EVERYBODY, len(weights_W) - _NETWORK - _EVERYBODY])
    pulse.get_buffer("network").copy_(network.view(4, 2) / temperature)
    pulse.get_buffer("everybody").copy_(everybody.view(3, -1))
    pulse.get_buffer("own").copy_(own)


def _minimise(
    asked: list[Asked], start_W: Tensor, mask_W: Tensor, q: float, ridge: float = RIDGE, centre_W: Tensor | None = None
) -> Tensor:
    """L-BFGS from `start_W`; weights outside the mask stay 0. centre_W: where the ridge holds the weights, or at 0."""
    free_W = start_W.clone().requires_grad_()
    users = _users(asked)
    optimizer = torch.optim.LBFGS(
        [free_W], max_iter=_STEPS, tolerance_change=_ENOUGH, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weights_W = free_W * mask_W
        total = ridge * ((weights_W if centre_W is None else weights_W - centre_W) ** 2).sum()
        total.backward()
        summed = total.detach()
        for part in asked:
            of_part = _loss(part, free_W * mask_W, q) / users
            of_part.backward()
            summed += of_part.detach()
        return summed

    optimizer.step(loss)
    return (free_W * mask_W).detach()


def _loss(part: Asked, weights_W: Tensor, q: float) -> Tensor:
    log_p = _log_probabilities(part, weights_W)
    per_positive = -log_p if q == 0 else (1 - (q * log_p).exp()) / q
    return (per_positive * part.weight_P).sum()


def _log_probabilities(part: Asked, weights_W: Tensor) -> Tensor:
    """Of the positives, [P]."""
    scores_BS, rows_P = _scores(part, weights_W), part.positive_rows_P
    return scores_BS[rows_P, part.positive_places_P] - scores_BS.logsumexp(1)[rows_P]


def _judge(asked: list[Asked], weights_W: Tensor) -> dict[str, float]:
    """Metrics of these users among the candidates."""
    found, counts = [], []
    for part in asked:
        positives = Cells(part.positive_rows_P, part.positive_places_P + 1)  # items count from 1
        users, items = part.standing_BS.shape
        tile = partial(_tile, _scores(part, weights_W))
        none = Cells(positives.rows[:0], positives.items[:0])
        found.append(torch.stack(count_places(tile, items, positives, none, users)))
        counts.append(torch.bincount(positives.rows, minlength=users))
    better, ties = torch.cat(found, dim=1).cpu().numpy()
    offsets = np.concatenate(([0], torch.cat(counts).cumsum(0).cpu().numpy()))
    return average(per_user(Places(better, ties, offsets)))


def _tile(scores_BS: Tensor, first: int, last: int) -> Tensor:
    return scores_BS[:, first - 1 : last - 1].clone()


def _users(asked: list[Asked]) -> int:
    return sum(len(part.moment_B) for part in asked)


def _scores(part: Asked, weights_W: Tensor) -> Tensor:
    """Of all candidates, [B, S]; -inf for those left out."""
    network, everybody, own_F = weights_W.split([_NETWORK, _EVERYBODY, len(weights_W) - _NETWORK - _EVERYBODY])
    plain_K, with_age_K, with_horizon_K = everybody.view(3, -1)
    standing_B1, turning_B1 = part_scales(part.about_B4, network.view(4, 2))[:, :, None].unbind(1)
    scores_BS = part.standing_BS * standing_B1 + part.turning_BS * turning_B1
    weights_MK = plain_K + part.age_M[:, None] * with_age_K + part.horizon * with_horizon_K
    scores_BS = scores_BS + torch.einsum("mk,mks->ms", weights_MK, part.shares_MKS)[part.moment_B]
    scores_BS = scores_BS.index_put((part.own_rows_C, part.own_places_C), part.own_CF @ own_F, accumulate=True)
    gone = torch.full_like(part.left_out.rows, -torch.inf, dtype=scores_BS.dtype)
    return scores_BS.index_put((part.left_out.rows, part.left_out.items), gone)
