"""Places by counting exact scores in plain PyTorch: what "better" and "equal" mean, and the ground truth of the kernel.

Notable: a score is the float64 dot product of two float32 vectors, rounded to float32. The products are exact; they are
summed in 64-bit fixed point, so that no order of summation, tile or device can change the sum, and equal vectors tie
exactly. For that, users' vectors are scaled by a power of two each and all items by a common one, which changes no
user's order: the largest element then lies in [0.5, 1), and a sum is off by at most E * 2^-SHIFT, 2^-44 for E = 512.

Shape letters: B users, S positives of these users (a row each), V items (ids 1 .. V), T items left out, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Products held at a time: 32 MiB of them. A bound on memory, not tuned.
_PRODUCTS = 1 << 22


def shift_of(width: int) -> int:
    """Fractional bits of a fixed-point score: a sum of `width` products below 1 stays below 2^62."""
    return 62 - (width - 1).bit_length()


def scaled(x_NE: Tensor, common: bool = False) -> Tensor:
    """Rows (or with `common` all of them together) times the power of two that puts the largest element in [0.5, 1)."""
    largest = x_NE.abs().amax() if common else x_NE.abs().amax(1, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-126, 126)
    # A float32 power of two by its bits: exact on every device, which exp2 need not be.
    return x_NE * ((127 - exponent.to(torch.int32)) << 23).view(torch.float32)


def exact_scores(users_NE: Tensor, items_ME: Tensor) -> Tensor:
    """Scores of every user with every item, float32 [N, M], in units of 2^-shift; both scaled."""
    factor = 2.0 ** shift_of(users_NE.shape[1])
    products_NME = (users_NE.double() * factor)[:, None] * items_ME.double()
    return products_NME.long().sum(-1).float()


def places(
    users_BE: Tensor,
    items_VE: Tensor,
    rows_S: Tensor,
    positives_S: Tensor,
    left_out_T: Tensor,
    left_offsets_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Better-scored items and ties of each positive, both int32 [S]; see `trope.kernels.ranking.places`.

    users_BE, items_VE: scaled.
    """
    S, V = len(rows_S), len(items_VE) - 1
    better_S, equal_S = (torch.zeros(S, dtype=torch.int32, device=rows_S.device) for _ in range(2))
    width = users_BE.shape[1]
    items_at_once = max(1, min(V, _PRODUCTS // width))
    step = max(1, _PRODUCTS // (width * items_at_once))
    for first in range(0, S, step):
        part = slice(first, first + step)
        mine_NE = users_BE[rows_S[part]]
        own_N = torch.diagonal(exact_scores(mine_NE, items_VE[positives_S[part]]))[:, None]
        for low in range(1, V + 1, items_at_once):
            scores_NM = exact_scores(mine_NE, items_VE[low : low + items_at_once][: V + 1 - low])
            better_S[part] += (scores_NM > own_N).sum(1, dtype=torch.int32)
            equal_S[part] += (scores_NM == own_N).sum(1, dtype=torch.int32)
    for row, (user, positive) in enumerate(zip(rows_S.tolist(), positives_S.tolist(), strict=True)):
        gone = left_out_T[left_offsets_B[user] : left_offsets_B[user + 1]]
        gone = gone[gone > 0]
        scores = exact_scores(users_BE[user, None], items_VE[torch.cat((gone.new_tensor([positive]), gone))])[0]
        better_S[row] -= (scores[1:] > scores[0]).sum(dtype=torch.int32)
        equal_S[row] -= (scores[1:] == scores[0]).sum(dtype=torch.int32)
    return better_S, equal_S - 1  # a positive equals itself
