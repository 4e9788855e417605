"""Losses: the next item's score against sampled items, or against the whole catalogue.

Outputs and item vectors are L2-normalised, so scores are cosines over a temperature. Notable:
- negatives are drawn apart from the loss and by an explicit generator, so that a run can be resumed and several
  processes can each take their rows of the global batch's;
- nothing waits for the device, not even finding the batch's unique items;
- the [T, N, E] tensor of gathered negatives is avoided for small catalogues and never kept for the backward pass.

Shapes: T tokens (positions with a target), E model width, V catalogue (rows 1 .. V of the table, row 0 is padding),
N negatives, C candidates of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trope.config import TrainConfig

# Scoring the whole catalogue is one matrix product: cheaper than gathering candidates up to about this many times more.
_DENSE = 32
# Most numbers that a piece of work may hold at once; a GB in float32.
_PIECE = 1 << 28


def draw_negatives(
    targets_T: Tensor,
    num_items: int,
    config: TrainConfig,
    generator: torch.Generator | None,
    tokens: int | None = None,
) -> Tensor | None:
    """Negatives of a batch, uniform with replacement: [T, N], or [N] if tokens share them; None for the full softmax.

    Args:
        targets_T: the next items of the whole batch, over which `negative_source = "batch"` draws; 0 is padding.
        generator: on the targets' device; None takes torch's own.
        tokens: how many of the batch's tokens to draw for; None for all.
    """
    if config.loss == "full":
        return None
    device = targets_T.device
    tokens = len(targets_T) if tokens is None else tokens
    shape = (config.negatives,) if config.shared_negatives else (tokens, config.negatives)
    if config.negative_source == "uniform":
        return torch.randint(1, num_items + 1, shape, generator=generator, device=device)
    is_here_V = torch.zeros(num_items + 1, dtype=torch.int64, device=device).index_fill_(0, targets_T, 1)
    is_here_V[:1].zero_()  # not `[0] = 0`, which copies from the CPU and so cannot be captured in a CUDA graph
    # The k-th unique item is the first row by which k of them have been counted.
    counts_V = is_here_V.cumsum(0)
    places = (torch.rand(shape, generator=generator, device=device, dtype=torch.float64) * counts_V[-1]).long()
    return torch.searchsorted(counts_V, places + 1)


def token_losses(
    out_TE: Tensor, targets_T: Tensor, vectors_VE: Tensor, negatives: Tensor | None, temperature: float
) -> Tensor:
    """-log softmax of each target's score among its candidates', float32 [T]; 0 where the target is 0 (padding).

    A negative equal to the target is left out.

    Args:
        out_TE: normalised outputs. vectors_VE: normalised item vectors, [V+1, E].
        negatives: [T, N], or [N] shared by all tokens; None compares with the whole catalogue.
    """
    query_TE = out_TE / temperature
    if negatives is None:
        return _in_pieces(_full_losses, query_TE, targets_T, vectors_VE, width=len(vectors_VE))
    positives_T1 = targets_T[:, None]
    if negatives.dim() == 1:
        positive_T1 = _candidate_scores(query_TE, positives_T1, vectors_VE)
        negative_TN = (query_TE @ F.embedding(negatives, vectors_VE).T).float()
    else:
        candidates_TC = torch.cat((positives_T1, negatives), dim=1)
        score_TC = _candidate_scores(query_TE, candidates_TC, vectors_VE)
        positive_T1, negative_TN = score_TC[:, :1], score_TC[:, 1:]
    negative_TN = negative_TN.masked_fill(negatives == positives_T1, -math.inf)
    losses_T = torch.cat((positive_T1, negative_TN), dim=1).logsumexp(dim=1) - positive_T1[:, 0]
    return losses_T.masked_fill(targets_T == 0, 0.0)


def _full_losses(query_TE: Tensor, targets_T: Tensor, vectors_VE: Tensor) -> Tensor:
    score_TV = (query_TE @ vectors_VE[1:].T).float()
    return F.cross_entropy(score_TV, targets_T - 1, ignore_index=-1, reduction="none")


def _candidate_scores(query_TE: Tensor, items_TC: Tensor, vectors_VE: Tensor) -> Tensor:
    """Scores of each token with its own candidates, float32 [T, C]."""
    width = items_TC.shape[1]
    if len(vectors_VE) <= _DENSE * width:
        return (query_TE @ vectors_VE.T).gather(1, items_TC).float()
    return _in_pieces(_gathered_scores, query_TE, items_TC, vectors_VE, width=width * query_TE.shape[1])


def _gathered_scores(query_TE: Tensor, items_TC: Tensor, vectors_VE: Tensor) -> Tensor:
    return torch.einsum("te,tce->tc", query_TE, F.embedding(items_TC, vectors_VE)).float()


def _in_pieces(
    score: Callable[[Tensor, Tensor, Tensor], Tensor], query_TE: Tensor, items: Tensor, vectors_VE: Tensor, width: int
) -> Tensor:
    """`score` over some tokens at a time, computed again in the backward pass instead of kept.

    width: how many numbers `score` holds for one token.
    """
    rows = max(1, _PIECE // width)
    if len(query_TE) <= rows:
        return score(query_TE, items, vectors_VE)
    pieces = zip(query_TE.split(rows), items.split(rows), strict=True)
    # Every call in here is a function of its arguments: there is no random state to put back.
    return torch.cat(
        [checkpoint(score, q, i, vectors_VE, use_reentrant=False, preserve_rng_state=False) for q, i in pieces]
    )
