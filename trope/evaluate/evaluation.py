"""Evaluation: every user of a split, the full catalogue ranked for each, whoever does the scoring.

Padding is never ranked. `filter_seen` leaves items that the user has had out of the ranking, except those chosen again:
a positive is always ranked, and competes with the user's other positives, seen or not.

On a GPU a model is ranked by the kernel in trope/kernels/ranking (large batches, exact scores: ranking_dot.py); on a
CPU, and for scorers that are no dot product, by tiles of scores (ranking.py).

Shapes: B users of a batch, U all users, S positives, E width, V items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trope.config import EvalConfig
from trope.data.sequences import EvalBatch, Sequences
from trope.evaluate.metrics import Floats, Ints, Places, average, per_user
from trope.evaluate.ranking import TILE, Cells, TileScores, place
from trope.evaluate.ranking_dot import Encode, Plan, no_users, rank_by_dot
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.ranking import Catalogue

Scorer = Callable[[EvalBatch], TileScores]
"""What is evaluated: takes a batch of users, gives a function that scores a range of items for them."""
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
    config: EvalConfig,
    max_len: int,
    progress: bool = False,
    precision: Precision | None = None,
    backend: Backend = "auto",
) -> EvalResult:
    """Rank the catalogue for every user of a split by a model.

    data: on the model's device. split: valid or test. max_len: length of the histories. progress: show a bar.
    precision: instead of `config.precision`: bf16 to encode histories under autocast, fp32 to leave the model as it is;
        scores are float32 always.
    backend: triton (auto on a GPU) ranks by the kernel and chooses its own batches; torch by tiles of scores, with
        batches of `config.batch` users. They differ in how a score is rounded, by about the last bit of float32.
    """
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            item_VE = _item_vectors(model, data)
            encode = _encoder(model, item_VE.device, precision or "auto")
            if resolve_backend(backend, item_VE) == "torch":
                return rank_users(_by_vectors(encode, item_VE), data, split, config, max_len, progress)
            plan = Plan(data, split, config.filter_seen, max_len)
            places, finite = rank_by_dot(encode, Catalogue.of(item_VE, backend), plan, progress)
            if not finite:
                raise ValueError(_diverged("outputs"))
            return EvalResult(plan.users_U.cpu().numpy(), places)
    finally:
        model.train(was_training)


def rank_users(
    scorer: Scorer,
    data: Sequences,
    split: str,
    config: EvalConfig,
    max_len: int,
    progress: bool = False,
    tile: int = TILE,
) -> EvalResult:
    """Rank the catalogue for every user of a split by any scorer; users come to it in the order of their t_now."""
    users = data.eval_users(split)
    if len(users) == 0:
        raise ValueError(no_users(data, split))
    users = users[torch.argsort(data.eval_batch(split, users, 1).t_now, stable=True)]
    found = []
    for part in tqdm(users.split(512), desc=f"evaluate {split}", disable=not progress, leave=False):
        batch = data.eval_batch(split, part, max_len)
        positives = Cells.distinct(batch.positives, batch.positive_offsets, data.num_items)
        seen = Cells.distinct(*data.seen(split, part, max_len, config.filter_seen), data.num_items)
        left_out = seen.without(positives, data.num_items)
        better_S, ties_S = place(scorer(batch), data.num_items, positives, left_out, len(part), tile)
        found.append(torch.stack((part[positives.rows], better_S, ties_S)).cpu())
    owner_S, better, ties = torch.cat(found, dim=1).numpy()
    order = np.argsort(owner_S, kind="stable")
    ids, counts = np.unique(owner_S, return_counts=True)
    return EvalResult(ids, Places(better[order], ties[order], np.concatenate(([0], np.cumsum(counts)))))


def _item_vectors(model: Model, data: Sequences) -> Tensor:
    """The model's items in float32, checked: they are those of the data, on its device, and finite."""
    item_VE = model.item_vectors().float()
    if len(item_VE) != data.num_items + 1:
        raise ValueError(
            f"the model knows {len(item_VE) - 1:,} items and {data.path} has {data.num_items:,}: "
            "another catalogue; evaluate on the data that the model was trained on"
        )
    if item_VE.device != data.device:
        raise ValueError(f"the model is on {item_VE.device} and the data on {data.device}; move one with .to(device)")
    if not torch.isfinite(item_VE).all():
        raise ValueError(_diverged("item vectors"))
    return item_VE


def _encoder(model: Model, device: torch.device, precision: Precision) -> Encode:
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
    """Scores are cosines in float32, whatever precision the model computes in."""

    def scorer(batch: EvalBatch) -> TileScores:
        out_BE = encode(batch.items, batch.times, batch.lengths, batch.t_now).float()
        if not torch.isfinite(out_BE).all():
            raise ValueError(_diverged("outputs"))

        def scores(first: int, last: int) -> Tensor:
            with _full_float32(out_BE.device):
                return out_BE @ item_VE[first:last].T

        return scores

    return scorer


def _diverged(what: str) -> str:
    """NaN compares as better than nothing, which would put a broken model's positives first: it is refused."""
    return f"the model's {what} contain NaN or infinity: it diverged; train again, with a lower train.lr"


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32: both round scores so coarsely that items tie by the hundred."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
