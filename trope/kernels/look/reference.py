"""Attention of a few new tokens to remembered keys and to each other, in plain PyTorch.

Each of B histories has M sequences of G new tokens, one sequence for each moment. A token sees the history's remembered
keys, and the tokens of its own sequence up to itself. The remembered keys are read in place, not copied per moment.

Shape letters: B histories, M moments, G new tokens of a sequence, R = B M sequences, Q = M G queries of a history,
S remembered keys, H heads, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KeysValues(NamedTuple):
    """Keys, rotated where there is an encoding, and values: [B, H, S, D] remembered, [T, H, D] of new tokens."""

    keys: Tensor
    values: Tensor


def look_silu(
    q_RGHD: Tensor,
    own: KeysValues,
    past: KeysValues,
    is_past_BS: Tensor,
    n: int,
    bias: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """HSTU's attention, y [R, G, H, D]: the new tokens' rows of `trope.kernels.attention`.

    Args:
        q_RGHD: queries of the new tokens; `own` has their keys and values in this shape.
        past: remembered keys and values, [B, H, S, D].
        is_past_BS: which of them exist.
        n: what attention is divided by.
        bias: what is added to the scores: [B, Q, S] for remembered keys, [R, G, G] among the new tokens.
    """
    past_BHQS, own_RHGG = _scores(q_RGHD, own.keys, past.keys)
    if bias is not None:
        past_BHQS += bias[0][:, None]
        own_RHGG += bias[1][:, None]
    # In place from here on: at hundreds of moments these passes over the scores cost as much as the products.
    weights_BHQS = F.silu(past_BHQS, inplace=True).div_(n)
    weights_BHQS *= is_past_BS[:, None, None]
    weights_RHGG = F.silu(own_RHGG).div_(n).tril_()
    return _sum(weights_BHQS, past.values, weights_RHGG, own.values)


def look_softmax(q_RGHD: Tensor, own: KeysValues, past: KeysValues, is_past_BS: Tensor) -> Tensor:
    """Softmax attention with scores divided by sqrt(D), y [R, G, H, D]. Arguments as in `look_silu`."""
    past_BHQS, own_RHGG = _scores(q_RGHD * (1 / math.sqrt(q_RGHD.shape[3])), own.keys, past.keys)
    past_BHQS.masked_fill_(~is_past_BS[:, None, None], -torch.inf)
    G, S = q_RGHD.shape[1], past_BHQS.shape[3]
    if G > 1:
        later_GG = torch.ones(G, G, dtype=torch.bool, device=q_RGHD.device).triu(1)
        own_RHGG = own_RHGG.masked_fill(later_GG, -torch.inf)
    scores = torch.cat((past_BHQS, _by_history(own_RHGG, len(past_BHQS))), dim=-1)
    weights_BHQS, weights_BHQG = scores.softmax(dim=-1).to(own.values.dtype).split((S, G), dim=-1)
    weights_RHGG = weights_BHQG.unflatten(2, (-1, G)).transpose(1, 2).flatten(0, 1)
    return _sum(weights_BHQS, past.values, weights_RHGG, own.values)


def _scores(q_RGHD: Tensor, keys_RGHD: Tensor, past_BHSD: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products with remembered keys [B, H, Q, S], and within each sequence [R, H, G, G]; new tensors."""
    q_BHQD = q_RGHD.reshape(len(past_BHSD), -1, *q_RGHD.shape[2:]).transpose(1, 2)
    past_BHQS = q_BHQD @ past_BHSD.transpose(-1, -2)
    if q_RGHD.shape[1] == 1:  # a product of 1 x D with D x 1 for each head and moment is slower than this sum
        return past_BHQS, (q_RGHD * keys_RGHD).sum(-1).transpose(1, 2)[..., None]
    return past_BHQS, q_RGHD.transpose(1, 2) @ keys_RGHD.permute(0, 2, 3, 1)


def _sum(weights_BHQS: Tensor, past_BHSD: Tensor, weights_RHGG: Tensor, values_RGHD: Tensor) -> Tensor:
    """Values summed by their weights, [R, G, H, D]."""
    R, G, H, D = values_RGHD.shape
    y_RGHD = (weights_BHQS @ past_BHSD).transpose(1, 2).reshape(R, G, H, D)
    if G == 1:
        return torch.addcmul(y_RGHD, weights_RHGG.transpose(1, 2), values_RGHD)
    return y_RGHD + (weights_RHGG @ values_RGHD.transpose(1, 2)).transpose(1, 2)


def _by_history(own_RHGG: Tensor, B: int) -> Tensor:
    """Scores within sequences as [B, H, Q, G]."""
    return own_RHGG.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)
