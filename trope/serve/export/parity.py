"""Is an exported model the model? Both answer for the same made-up users; the largest difference decides.

Half of the users are random: any item, any time of the training data. Half look real: a few popular items again and
again, in baskets that share a time, in bursts with pauses between. Histories have from one event to more than the model
looks at. Moments go from the last event itself to the end of the year 2099.

Shape letters: B users, E width, V items.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trope.data.windows import last_events
from trope.evaluate.evaluation import fitted_pulse
from trope.serve.recommender import Histories, Recommender
from trope.times import DAY, parse_moment

USERS = 512
"""Users of the comparison that is part of an export."""
TOP = 100
TOLERANCE = 1e-6
"""Largest difference of a score. Scores with a pulse are not cosines; theirs may be larger in proportion (`Parity`)."""
_LAST_MOMENT = parse_moment("2099-12-31T23:59:59Z")
_LATER = (0, 1, 60, 3_600, DAY, 7 * DAY, 30 * DAY, 365 * DAY)
_ITEMS_AT_A_TIME = 1 << 16
_USERS_AT_A_TIME = 64


class Parity(NamedTuple):
    """What a comparison found.

    cosines: largest difference of a user's cosine with any item, by `encode` and by `remember` and `look`.
    answers: largest difference of the scores at a place of the top 100. Relative to the user's largest score, or to
        what the pulse makes of a cosine of 1, where that is above 1: float32 rounds parts of a score, not what is left.
    same_places: share of these places with the same item; others hold items whose scores are equal to rounding.
    same_sets: share of the users whose 100 items are the same, in whatever order.
    swaps: as answers, at the places with different items alone.
    """

    users: int
    cosines: float
    answers: float
    same_places: float
    same_sets: float
    swaps: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether scores agree. Not a number is no agreement."""
        return self.cosines <= TOLERANCE and self.answers <= TOLERANCE


def compare(model: Recommender, exported: Recommender, users: int = USERS, seed: int = 0) -> Parity:
    """Ask both for the same made-up users; both on the CPU."""
    histories, moments = made_up(model, users, seed)
    k = min(TOP, len(model.catalogue))
    cosines, sizes = 0.0, []
    for rows in torch.arange(users).split(_USERS_AT_A_TIME):
        wanted_BE = vectors(model, histories, moments, rows)
        sizes.append(_size(model, wanted_BE, histories, moments, rows))
        for by_memory in (False, True) if exported.model.can_remember else (False,):
            got_BE = vectors(exported, histories, moments, rows, by_memory)
            cosines = largest(cosines, _apart(wanted_BE - got_BE, model.model.item_vectors().detach()))
    wanted, got = (each.rank(histories, moments, k) for each in (model, exported))
    scores, found_scores = (x.scores.reshape(users, k) for x in (wanted, got))
    largest_score = np.abs(scores).max(axis=1, keepdims=True)
    size = np.maximum(largest_score, np.concatenate(sizes)[:, None])
    apart = np.abs(scores - found_scores) / np.maximum(1, size)
    items, found = (np.sort(x.items.reshape(users, k), axis=1) for x in (wanted, got))
    is_same = (wanted.items == got.items).reshape(users, k)
    sets = float((items == found).all(axis=1).mean())
    return Parity(users, cosines, float(apart.max()), float(is_same.mean()), sets, float((apart * ~is_same).max()))


@torch.inference_mode()
def vectors(
    of: Recommender, histories: Histories, moments: npt.NDArray[np.int64], rows: Tensor, by_memory: bool = False
) -> Tensor:
    """Unit vectors of some users at their moments, [B, E]. by_memory: by `remember` and `look`."""
    items, times, offsets = (torch.from_numpy(x) for x in histories)
    begins, ends = offsets[rows], offsets[rows + 1]
    width = min(of.model.config.model.max_len, int((ends - begins).max()))
    history = last_events(items, times, begins, ends, width)
    t_now_B = torch.from_numpy(moments)[rows]
    if by_memory:
        return of.model.remember(*history).look(t_now_B[:, None])[:, 0]
    return of.model.encode_last(*history, t_now_B)


@torch.inference_mode()
def _size(
    of: Recommender, out_BE: Tensor, histories: Histories, moments: npt.NDArray[np.int64], rows: Tensor
) -> npt.NDArray[np.float32]:
    """What each user's cosine of 1 adds to a score, [B]: 1, or as the pulse scales it."""
    pulse = fitted_pulse(of.model)
    if pulse is None:
        return np.ones(len(rows), np.float32)
    lengths_B = torch.from_numpy(histories.offsets).diff()[rows]
    return pulse.scale(out_BE, lengths_B, torch.from_numpy(moments)[rows]).norm(dim=1).numpy()


def made_up(of: Recommender, users: int, seed: int) -> tuple[Histories, npt.NDArray[np.int64]]:
    """Histories and a moment for each; the first half random, the others as people make them."""
    draw = np.random.default_rng(seed)
    (first, last), most, V = of.model.time_span, of.model.config.model.max_len, of.model.num_items
    last = max(last, first + 1)
    lengths = draw.integers(1, most + most // 2 + 2, users)
    items, times, moments = [], [], []
    for user, length in enumerate(lengths.tolist()):
        if user < users // 2:
            items.append(draw.integers(1, V + 1, length))
            times.append(np.sort(draw.integers(first, last + 1, length)))
        else:
            favourites = 1 + (draw.zipf(1.3, 8) - 1) % V
            items.append(draw.choice(favourites, length))
            # Lines of a basket share a time; between baskets there are minutes or months.
            pauses = np.where(draw.random(length) < 0.4, np.exp(draw.normal(11, 3, length)), 0)
            since = np.cumsum(np.minimum(pauses, 365 * DAY).astype(np.int64))
            times.append(np.minimum(first + since, last))
        later = int(draw.choice([*_LATER, _LAST_MOMENT]))
        moments.append(min(int(times[-1][-1]) + later, max(_LAST_MOMENT, last)))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Histories(np.concatenate(items), np.concatenate(times), offsets), np.array(moments, np.int64)


def largest(one: float, other: float) -> float:
    """The larger of two, and not a number where one of them is none."""
    return float(np.maximum(one, other))


def _apart(difference_BE: Tensor, items_VE: Tensor) -> float:
    parts = (difference_BE @ part.T for part in items_VE.split(_ITEMS_AT_A_TIME))
    return float(np.max([float(part.abs().max()) for part in parts]))
