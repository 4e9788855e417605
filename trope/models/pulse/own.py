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
    lengths_B = offsets.diff()
    rows_N = torch.repeat_interleave(lengths_B)
    keys_C, place_N = torch.unique(rows_N * (num_items + 1) + items_N, return_inverse=True)
    rows_C = keys_C // (num_items + 1)
    counts_C = torch.bincount(place_N, minlength=len(keys_C)).float()
    last_C = torch.zeros_like(keys_C).scatter_reduce_(0, place_N, times_N, "amax", include_self=False)
    ages_C = (t_now_B[rows_C] - last_C).clamp(min=0).double()
    recent_CK = torch.exp2(-ages_C[:, None] / half_lives.double().to(ages_C.device)).float()
    shares_C = counts_C / lengths_B[rows_C]
    first = torch.stack((torch.ones_like(counts_C), counts_C.log(), shares_C.log()), dim=1)
    return OwnItems(rows_C, keys_C % (num_items + 1), torch.cat((first, recent_CK), dim=1))
