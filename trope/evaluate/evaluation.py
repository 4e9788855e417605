"""Evaluation: the full catalogue ranked for every user of a split, by a model or by any other scorer.

Padding is never ranked. `filter_seen` leaves items that the user has had out of the ranking, except those chosen again:
a positive is always ranked, and competes with the user's other positives, seen or not.

`evaluate` ranks a model: on a GPU by the kernel in large batches (ranking/user_batches.py), on a CPU by tiles of scores
(ranking/places.py). `rank_users` ranks by any scorer, by tiles.

Shapes: B users of a batch, U all users, S positives, E width, V items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trope.data.sequences import EvalBatch, Sequences
from trope.devices import current_gpu
from trope.evaluate.live import CountedScorer, Counting, LiveScorer, users_at_a_time
from trope.evaluate.metrics import Floats, Ints, Places, average, per_user
from trope.evaluate.ranking import Cells, TileScores, check_finite, count_places, dot_scores
from trope.evaluate.ranking.places import TILE
from trope.evaluate.ranking.shards import ShardRanking
from trope.evaluate.ranking.tiles import USERS_AT_A_TIME
from trope.evaluate.ranking.user_batches import Encode, UserBatches, no_users, rank_on_device
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.ranking import Catalogue
from trope.models.pulse import CountStream, Pulse
from trope.models.sharded_items import ShardedItemTable

Scorer = Callable[[EvalBatch], TileScores]
"""What is evaluated: takes a batch of users, gives a function that scores a range of items for them."""
CountPlaces = Callable[[TileScores, int, Cells, Cells, int, int], tuple[Tensor, Tensor]]
"""`count_places`, or the same over processes."""
Precision = Literal["auto", "fp32", "bf16"]


class Model(Protocol):
    """What evaluation asks of a model; `trope.models.recommender.SequentialRecommender` is one."""

    training: bool

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """Each history's vector when looking from t_now, [B, E]."""

    def item_vectors(self) -> Tensor:
        """The items' vectors, [V+1, E]."""

    def train(self, mode: bool = True) -> object:
        """Switch dropout and the like on or off."""


@dataclass(frozen=True)
class EvalResult:
    """Where every positive of a split was ranked.

    users: [U] in rising order; places: of their distinct positives, in the order of the items' ids.
    """

    users: Ints
    places: Places

    @property
    def offsets(self) -> Ints:
        """[U+1]: user u owns ranks offsets[u] .. offsets[u+1]."""
        return self.places.offsets

    @property
    def ranks(self) -> Floats:
        """[S] from 1, ties counted half."""
        return self.places.ranks

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Means over users, as fractions: HR@10, .., Recall@10, .., NDCG@10, .., MRR."""
        return average(per_user(self.places))


def evaluate(
    model: Model,
    data: Sequences,
    split: str,
    filter_seen: str,
    max_len: int,
    progress: bool = False,
    precision: Precision = "auto",
    backend: Backend = "auto",
    batch: int = USERS_AT_A_TIME,
    live: bool = True,
    counting: Counting | None = None,
    counts: CountStream | None = None,
) -> EvalResult:
    """Rank the catalogue for every user of a split by a model.

    data: on the model's device. split: valid or test. filter_seen: leave out none, the items of the window, or of the
        whole history. max_len: length of the histories. progress: show a bar.
    precision: in which histories are encoded. bf16 uses autocast, fp32 leaves the model as it is, auto is bf16 on CUDA
        and fp32 on a CPU. Scores are float32 always.
    backend: triton (auto on a GPU) ranks by the kernel; torch ranks by tiles of scores. They differ in how a score is
        rounded, by about the last bit of float32.
    batch: users at a time, for torch; the kernel's batches are larger.
    live: use the model's pulse where it has one that is fitted. Scores are then made by tiles on every device.
    counting: rank by "MODEL + counting" instead, without the pulse.
    counts: of everybody, for the pulse or that control, where `data` are some users of a larger dataset.

    A model whose item table is spread over processes is ranked by all of them together, and each gets the result;
    `live` must be false then.
    """
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode(), current_gpu(data.device):
            if (table := sharded_table(model)) is not None:
                assert counting is None and not live, "what is counted needs all items in one process"
                encode = encoder(model, data.device, precision)
                return _over_shards(ShardRanking(table), encode, data, split, filter_seen, max_len, progress, batch)
            item_VE = item_vectors(model, data)
            encode = encoder(model, item_VE.device, precision)
            at_moments: Scorer | None = None
            if counting is not None:
                at_moments = CountedScorer(counting, encode, item_VE, data, split, counts)
            elif live and (pulse := fitted_pulse(model)) is not None:
                at_moments = LiveScorer(pulse, encode, item_VE, data, split, counts=counts)
            if at_moments is not None:
                batch = users_at_a_time(data.num_items, batch)
                return rank_users(at_moments, data, split, filter_seen, max_len, progress, batch=batch)
            if resolve_backend(backend, item_VE) == "torch":
                scorer = _by_vectors(encode, item_VE)
                return rank_users(scorer, data, split, filter_seen, max_len, progress, batch=batch)
            users = UserBatches(data, split, filter_seen, max_len)
            places = rank_on_device(encode, Catalogue.of(item_VE, backend), users, progress)
            return EvalResult(users.users_U.cpu().numpy(), places)
    finally:
        model.train(was_training)


def rank_users(
    scorer: Scorer,
    data: Sequences,
    split: str,
    filter_seen: str,
    max_len: int,
    progress: bool = False,
    tile: int = TILE,
    batch: int = USERS_AT_A_TIME,
    users: Tensor | None = None,
    count: CountPlaces = count_places,
) -> EvalResult:
    """Rank the catalogue for every user of a split by any scorer; it gets the users in the order of their t_now.

    filter_seen, max_len, progress: as in `evaluate`. tile: scores held at a time. batch: users at a time.
    users: only these of the split. count: how places are counted.
    """
    ranked = rank_all({"": scorer}, data, split, filter_seen, max_len, progress, tile, batch, users, count)
    return ranked[""]


def rank_all(
    scorers: Mapping[str, Scorer],
    data: Sequences,
    split: str,
    filter_seen: str,
    max_len: int,
    progress: bool = False,
    tile: int = TILE,
    batch: int = USERS_AT_A_TIME,
    users: Tensor | None = None,
    count: CountPlaces = count_places,
) -> dict[str, EvalResult]:
    """`rank_users` by several scorers in one pass over the users: of each batch all are asked, one after the other."""
    users = data.eval_users(split) if users is None else users
    if len(users) == 0:
        raise ValueError(no_users(data, split))
    users = users[torch.argsort(data.eval_batch(split, users, 1).t_now, stable=True)]
    found: dict[str, list[Tensor]] = {name: [] for name in scorers}
    for part in tqdm(users.split(batch), desc=f"evaluate {split}", disable=not progress, leave=False):
        asked = data.eval_batch(split, part, max_len)
        positives, left_out = ranked_cells(asked, data, split, filter_seen, max_len)
        for name, scorer in scorers.items():
            better_S, ties_S = count(scorer(asked), data.num_items, positives, left_out, len(part), tile)
            found[name].append(torch.stack((part[positives.rows], better_S, ties_S)).cpu())
    return {name: _by_user(torch.cat(parts, dim=1)) for name, parts in found.items()}


def _by_user(found_3S: Tensor) -> EvalResult:
    """The result from each positive's user, better items and ties."""
    owner_S, better, ties = found_3S.numpy()
    order = np.argsort(owner_S, kind="stable")
    ids, counts = np.unique(owner_S, return_counts=True)
    return EvalResult(ids, Places(better[order], ties[order], np.concatenate(([0], np.cumsum(counts)))))


def ranked_cells(batch: EvalBatch, data: Sequences, split: str, filter_seen: str, max_len: int) -> tuple[Cells, Cells]:
    """The users' distinct positives, and what their rankings leave out, which holds no positive."""
    positives = Cells.distinct(batch.positives, batch.positive_offsets, data.num_items)
    seen = Cells.distinct(*data.seen(split, batch.users, max_len, filter_seen), data.num_items)
    return positives, seen.without(positives, data.num_items)


def fitted_pulse(model: Model) -> Pulse | None:
    """The model's pulse, if it has one that is fitted."""
    pulse = getattr(model, "pulse", None)
    return pulse if isinstance(pulse, Pulse) and pulse.is_fitted else None


def sharded_table(model: Model) -> ShardedItemTable | None:
    """The model's item table, if it is spread over processes."""
    items = getattr(model, "items", None)
    return items if isinstance(items, ShardedItemTable) else None


def item_vectors(model: Model, data: Sequences) -> Tensor:
    """The model's item vectors in float32. Refuses another catalogue, another device, and a diverged model."""
    item_VE = model.item_vectors().float()
    if len(item_VE) != data.num_items + 1:
        raise ValueError(
            f"the model knows {len(item_VE) - 1:,} items and {data.path} has {data.num_items:,}: "
            "another catalogue; evaluate on the data that the model was trained on"
        )
    if item_VE.device != data.device:
        raise ValueError(f"the model is on {item_VE.device} and the data on {data.device}; move one with .to(device)")
    check_finite(item_VE, "item vectors")
    return item_VE


def encoder(model: Model, device: torch.device, precision: Precision) -> Encode:
    """The model's `encode_last`, under bf16 autocast if asked for."""
    if precision == "fp32" or (precision == "auto" and device.type == "cpu"):
        return model.encode_last
    if precision not in ("auto", "bf16"):
        raise ValueError(f"precision must be 'auto', 'fp32' or 'bf16', got {precision!r}")

    def encode(items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model.encode_last(items_BL, times_BL, lengths_B, t_now_B)

    return encode


def _by_vectors(encode: Encode, item_VE: Tensor) -> Scorer:
    """A scorer by the dot products of encoded histories and items."""

    def scorer(batch: EvalBatch) -> TileScores:
        out_BE = encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
        check_finite(out_BE, "outputs")
        return dot_scores(out_BE, item_VE)

    return scorer


def _over_shards(
    ranking: ShardRanking,
    encode: Encode,
    data: Sequences,
    split: str,
    filter_seen: str,
    max_len: int,
    progress: bool,
    batch: int,
) -> EvalResult:
    """Every process encodes some users of a batch and counts among its own items for all of them."""

    def scorer(asked: EvalBatch) -> TileScores:
        out_BE = ranking.encode(encode, asked.items, asked.times, asked.lengths, asked.t_now)
        check_finite(out_BE, "outputs")
        return ranking.scores(out_BE)

    is_shown = progress and ranking.shard.rank == 0
    return rank_users(
        scorer, data, split, filter_seen, max_len, is_shown, batch=batch, count=ranking.count_places
    )  # fmt: skip
