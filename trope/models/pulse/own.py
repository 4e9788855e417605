"""What the user chose before: for each item of a history how often, and how long ago.

Shapes: B users, N events of their histories, C pairs of a user and an item of the user's history, K half-lives,
F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEATURES = 3
"""Features before those of the half-lives: chosen before; log of how often; log of its share of the history."""


class OwnItems(NamedTuple):
    """The distinct pairs of a user's row and an item of the history, sorted by row and item."""

    rows_C: Tensor
    items_C: Tensor
    features_CF: Tensor  # float32


def own_items(
    items_N: Tensor, times_N: Tensor, offsets: Tensor, t_now_B: Tensor, half_lives: Tensor, num_items: int
) -> OwnItems:
    """Features of the users' own items at t_now.

    items_N, times_N: whole histories, user b's are offsets[b] .. offsets[b+1]. half_lives: seconds, [K]; an item last
    chosen one half-life ago has the feature 1/2.
    """
    _, keys_C, place_N = _pairs(items_N, offsets, num_items)
    counts_C = torch.bincount(place_N, minlength=len(keys_C)).float()
    last_C = torch.zeros_like(keys_C).scatter_reduce_(0, place_N, times_N, "amax", include_self=False)
    rows_C, items_C = keys_C // (num_items + 1), keys_C % (num_items + 1)
    return own_features(rows_C, items_C, counts_C, last_C, offsets.diff(), t_now_B, half_lives)


def own_features(
    rows_C: Tensor,
    items_C: Tensor,
    counts_C: Tensor,
    last_C: Tensor,
    lengths_B: Tensor,
    t_now_B: Tensor,
    half_lives: Tensor,
) -> OwnItems:
    """`own_items` of histories that are counted already.

    counts_C: how often the user chose the item, float32. last_C: when last. lengths_B: of the whole histories.
    """
    ages_C = (t_now_B[rows_C] - last_C).clamp(min=0).double()
    recent_CK = torch.exp2(-ages_C[:, None] / half_lives.double().to(ages_C.device)).float()
    shares_C = counts_C / lengths_B[rows_C]
    first = torch.stack((torch.ones_like(counts_C), counts_C.log(), shares_C.log()), dim=1)
    return OwnItems(rows_C, items_C, torch.cat((first, recent_CK), dim=1))


def own_counts(
    items_N: Tensor, times_N: Tensor, offsets: Tensor, t_now_B: Tensor, half_life: int, num_items: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Decayed counts of the users' own events at t_now: rows [C], items [C] and counts, float64 [C].

    items_N, times_N, offsets: as in `own_items`. half_life: seconds after which an event counts half.
    """
    rows_N, keys_C, place_N = _pairs(items_N, offsets, num_items)
    left_N = torch.exp2(-(t_now_B[rows_N] - times_N).clamp(min=0).double() / half_life)
    counts_C = torch.zeros(len(keys_C), dtype=torch.float64, device=items_N.device).index_add_(0, place_N, left_N)
    return keys_C // (num_items + 1), keys_C % (num_items + 1), counts_C


def _pairs(items_N: Tensor, offsets: Tensor, num_items: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each event's row [N], the distinct keys row * (V + 1) + item [C], and each event's place among them [N]."""
    rows_N = torch.repeat_interleave(offsets.diff())
    keys_C, place_N = torch.unique(rows_N * (num_items + 1) + items_N, return_inverse=True)
    return rows_N, keys_C, place_N
