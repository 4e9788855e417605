"""Attention of a few new tokens to remembered keys and to each other, in plain PyTorch.

Each of B histories has M sequences of G new tokens, one sequence for each moment. A token sees its history's remembered
keys and the tokens of its own sequence up to itself. The remembered keys are read in place, not copied per moment.

Few operations on purpose: with one moment, each costs more than what it computes.

Shape letters: B histories, M moments, G new tokens of a sequence, Q = M G queries of a history, T = B M G tokens,
S remembered keys, K = S + G keys of a token, H heads, D head dim.
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


Shape = tuple[int, int, int]
"""B, M, G."""


def look_silu(
    q_THD: Tensor, own: KeysValues, past: KeysValues, shape: Shape, seen_BGK: Tensor | None, n: int,
    bias_BMGK: Tensor | None,
) -> Tensor:  # fmt: skip
    """HSTU's attention, y [T, H, D]: the new tokens' rows of `trope.kernels.attention`.

    Args:
        q_THD: queries of the new tokens, ordered by history, moment and place; `own` has their keys and values.
        past: remembered keys and values, [B, H, S, D].
        seen_BGK: which keys a token sees, the remembered ones first; None if all.
        n: what attention is divided by.
        bias_BMGK: what is added to the scores; M or G may be 1.
    """
    scores_BHMGK = _scores(q_THD, own.keys, past.keys, shape)
    if bias_BMGK is not None:
        scores_BHMGK += bias_BMGK[:, None]
    # In place: at hundreds of moments, a new tensor for each of these passes costs as much as the products.
    weights_BHMGK = F.silu(scores_BHMGK, inplace=True).div_(n)
    if seen_BGK is not None:
        weights_BHMGK *= seen_BGK[:, None, None]
    return _sum(weights_BHMGK, own.values, past.values, shape)


def step_silu(q_BHD: Tensor, kept: KeysValues, n: int, bias_BK: Tensor | None) -> Tensor:
    """HSTU's attention of one token of each history, y [B, H, D]; its own key and value are the last of `kept`.

    The same as `look_silu` with one moment and one new token, in fewer operations.

    kept: [B, H, K, D]. bias_BK: what is added to the scores.
    """
    B, H, D = q_BHD.shape
    q, keys_T, values = q_BHD.reshape(B * H, 1, D), kept.keys.flatten(0, 1).transpose(1, 2), kept.values.flatten(0, 1)
    if bias_BK is None:
        scores = torch.bmm(q, keys_T)
    else:
        scores = torch.baddbmm((bias_BK if B == 1 else bias_BK.repeat_interleave(H, dim=0))[:, None], q, keys_T)
    return torch.bmm(F.silu(scores, inplace=True), values).div_(n).view(B, H, D)


def look_softmax(q_THD: Tensor, own: KeysValues, past: KeysValues, shape: Shape, seen_BGK: Tensor | None) -> Tensor:
    """Softmax attention with scores divided by sqrt(D), y [T, H, D]. Arguments as in `look_silu`."""
    scores_BHMGK = _scores(q_THD * (1 / math.sqrt(q_THD.shape[2])), own.keys, past.keys, shape)
    if seen_BGK is not None:
        scores_BHMGK.masked_fill_(~seen_BGK[:, None, None], -torch.inf)
    return _sum(scores_BHMGK.softmax(dim=-1).to(own.values.dtype), own.values, past.values, shape)


def _scores(q_THD: Tensor, keys_THD: Tensor, past_BHSD: Tensor, shape: Shape) -> Tensor:
    """Dot products with remembered keys and with those of each sequence, a new tensor [B, H, M, G, K]."""
    B, M, G = shape
    H, D = q_THD.shape[1:]
    q_BHQD = q_THD.view(B, M * G, H, D).transpose(1, 2).reshape(B * H, M * G, D)
    past_BHMGS = torch.bmm(q_BHQD, past_BHSD.flatten(0, 1).transpose(1, 2)).view(B, H, M, G, -1)
    if G == 1:  # a product of 1 x D with D x 1 for each head and moment is slower than this sum
        own_TH = (q_THD * keys_THD).sum(-1)
        own_BHMGG = own_TH.view(B, M, H, 1, 1).transpose(1, 2)
    else:
        q, k = (x.view(B, M, G, H, D).transpose(2, 3) for x in (q_THD, keys_THD))
        own_BHMGG = (q @ k.transpose(-1, -2)).transpose(1, 2)
    return torch.cat((past_BHMGS, own_BHMGG), dim=-1)


def _sum(weights_BHMGK: Tensor, values_THD: Tensor, past_BHSD: Tensor, shape: Shape) -> Tensor:
    """Values summed by their weights, [T, H, D]."""
    (B, M, G), (H, D), S = shape, values_THD.shape[1:], past_BHSD.shape[2]
    weights_BHQS = weights_BHMGK.view(B * H, M * G, S + G)[:, :, :S]
    y_BHQD = torch.bmm(weights_BHQS, past_BHSD.flatten(0, 1)).view(B, H, M * G, D)
    y_THD = y_BHQD.transpose(1, 2).reshape(B * M * G, H, D)
    own_BMHGG = weights_BHMGK[..., S:].transpose(1, 2)
    if G == 1:
        return torch.addcmul(y_THD, own_BMHGG.reshape(B * M, H, 1), values_THD)
    own_BMHGD = own_BMHGG @ values_THD.view(B, M, G, H, D).transpose(2, 3)
    return y_THD + own_BMHGD.transpose(2, 3).reshape(y_THD.shape)
