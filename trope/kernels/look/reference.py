"""Attention of a few new tokens to remembered keys and to each other, in plain PyTorch.

Each of B histories has M sequences of G new tokens, one sequence for each moment. A token sees the history's remembered
keys, and the tokens of its own sequence up to itself. The remembered keys are read in place, not copied per moment.

Shape letters: B histories, M moments, G new tokens of a sequence, R = B M sequences, Q = M G queries of a history,
S remembered keys, K = S + G keys of a token, H heads,
D head dim.
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
    q_RGHD: Tensor, own: KeysValues, past: KeysValues, is_past_BS: Tensor | None, n: int, bias_BMGK: Tensor | None
) -> Tensor:
    """HSTU's attention, y [R, G, H, D]: the new tokens' rows of `trope.kernels.attention`.

    Args:
        q_RGHD: queries of the new tokens; `own` has their keys and values in this shape.
        past: remembered keys and values, [B, H, S, D].
        is_past_BS: which of them exist; None if all do.
        n: what attention is divided by.
        bias_BMGK: what is added to the scores of remembered keys and of a sequence's own; M or G may be 1.
    """
    past_BHMGS, own_BHMGG = _scores(q_RGHD, own.keys, past.keys)
    if bias_BMGK is not None:
        S = past_BHMGS.shape[4]
        past_BHMGS += bias_BMGK[:, None, ..., :S]
        own_BHMGG += bias_BMGK[:, None, ..., S:]
    # In place: at hundreds of moments a new tensor for each of these passes costs as much as the products.
    weights_BHMGS = F.silu(past_BHMGS, inplace=True).div_(n)
    if is_past_BS is not None:
        weights_BHMGS *= is_past_BS[:, None, None, None]
    own_BHMGG = F.silu(own_BHMGG) / n
    return _sum(weights_BHMGS, past.values, own_BHMGG if q_RGHD.shape[1] == 1 else own_BHMGG.tril(), own.values)


def look_softmax(q_RGHD: Tensor, own: KeysValues, past: KeysValues, is_past_BS: Tensor | None) -> Tensor:
    """Softmax attention with scores divided by sqrt(D), y [R, G, H, D]. Arguments as in `look_silu`."""
    G, D = q_RGHD.shape[1], q_RGHD.shape[3]
    past_BHMGS, own_BHMGG = _scores(q_RGHD * (1 / math.sqrt(D)), own.keys, past.keys)
    if is_past_BS is not None:
        past_BHMGS.masked_fill_(~is_past_BS[:, None, None, None], -torch.inf)
    if G > 1:
        later_GG = torch.ones(G, G, dtype=torch.bool, device=q_RGHD.device).triu(1)
        own_BHMGG = own_BHMGG.masked_fill(later_GG, -torch.inf)
    weights = torch.cat((past_BHMGS, own_BHMGG), dim=-1).softmax(dim=-1).to(own.values.dtype)
    weights_BHMGS, weights_BHMGG = weights.split((past_BHMGS.shape[4], G), dim=-1)
    return _sum(weights_BHMGS, past.values, weights_BHMGG, own.values)


def _scores(q_RGHD: Tensor, keys_RGHD: Tensor, past_BHSD: Tensor) -> tuple[Tensor, Tensor]:
    """New dot products with remembered keys [B, H, M, G, S], and with the keys of each sequence [B, H, M, G, G]."""
    (R, G, H, D), (B, _, S, _) = q_RGHD.shape, past_BHSD.shape
    M = R // B
    q_BHQD = q_RGHD.reshape(B, M * G, H, D).transpose(1, 2)
    past_BHMGS = (q_BHQD @ past_BHSD.transpose(-1, -2)).view(B, H, M, G, S)
    if G == 1:  # a product of 1 x D with D x 1 for each head and moment is slower than this sum
        return past_BHMGS, (q_RGHD * keys_RGHD).sum(-1).view(B, M, H, 1, 1).transpose(1, 2)
    own_RHGG = q_RGHD.transpose(1, 2) @ keys_RGHD.permute(0, 2, 3, 1)
    return past_BHMGS, own_RHGG.view(B, M, H, G, G).transpose(1, 2)


def _sum(weights_BHMGS: Tensor, past_BHSD: Tensor, weights_BHMGG: Tensor, values_RGHD: Tensor) -> Tensor:
    """Values summed by their weights, [R, G, H, D], contiguous."""
    R, G, H, D = values_RGHD.shape
    y_RGHD = (weights_BHMGS.flatten(2, 3) @ past_BHSD).transpose(1, 2).reshape(R, G, H, D)
    weights_RHGG = weights_BHMGG.transpose(1, 2).reshape(R, H, G, G)
    if G == 1:
        return torch.addcmul(y_RGHD, weights_RHGG.transpose(1, 2), values_RGHD)
    own_RGHD = (weights_RHGG @ values_RGHD.transpose(1, 2)).transpose(1, 2)
    return y_RGHD.add_(own_RGHD)
