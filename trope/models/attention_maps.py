"""Attention as a trained model computes it, read out block by block.

The kernels never form the map; here a block's own q, k and bias are put together again as in
trope/kernels/attention/reference.py, whose output is the map times v.

Shape letters: L positions, H heads, D head dim, T tokens (one history: T = L).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.kernels.attention.reference import bias, time_buckets
from trope.kernels.norm import norm
from trope.kernels.project import project
from trope.models.context import Context, Stream
from trope.models.hstu import LAST_BUCKET, HSTUBlock
from trope.models.recommender import SequentialRecommender
from trope.models.softmax_attention import SoftmaxAttention


def attention_maps(model: SequentialRecommender, items_1L: Tensor, times_1L: Tensor, t_now_1: Tensor) -> list[Tensor]:
    """Each block's attention of every query to every key of one history, mean over heads, [L, L]; [] for TiSASRec."""
    return [weights_HLL.mean(0) for weights_HLL in _weights(model, items_1L, times_1L, t_now_1)]


def attention_shares(
    model: SequentialRecommender, items_1L: Tensor, times_1L: Tensor, t_now_1: Tensor
) -> Tensor | None:
    """The share of the last query's attention that each event has, [L], sum 1; None where the blocks do not tell.

    HSTU's weights have a sign: shares are of absolute values, mean over heads and then over blocks. A deeper block
    attends to what the blocks before have mixed, so a share says where the model looked, not what an event caused.
    """
    last = [weights_HLL[:, -1].abs().float().mean(0) for weights_HLL in _weights(model, items_1L, times_1L, t_now_1)]
    if not last:
        return None
    # Where every score is zero nothing was looked at, and the shares are zero too.
    return torch.stack([each_L / each_L.sum().clamp(min=torch.finfo(torch.float32).tiny) for each_L in last]).mean(0)


def _weights(model: SequentialRecommender, items_1L: Tensor, times_1L: Tensor, t_now_1: Tensor) -> list[Tensor]:
    """Each block's attention to one history without padding, [H, L, L]."""
    seen: list[tuple[nn.Module, tuple[Any, ...]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs)))
        for module in model.modules()
        if isinstance(module, HSTUBlock | SoftmaxAttention)
    ]
    try:
        with torch.no_grad():
            model.encode(items_1L, times_1L, torch.tensor([items_1L.shape[1]], device=items_1L.device), t_now_1)
            return [_of_block(module, inputs) for module, inputs in seen]
    finally:
        for hook in hooks:
            hook.remove()


def _of_block(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    if isinstance(module, HSTUBlock):
        return hstu_weights(module, *inputs)[0]
    assert isinstance(module, SoftmaxAttention)
    return _softmax_weights(module, *inputs)


def hstu_weights(block: HSTUBlock, stream: Stream, context: Context) -> tuple[Tensor, Tensor]:
    """silu(q k + bias) / n of one history, [H, L, L], and the block's v, [L, H, D]."""
    _, normed_TE = norm(stream.x_TE, stream.delta_TE, out_dtype=context.dtype)
    _, v, q, k = block.split(project(normed_TE, block.uvqk), context)
    scores_HLL = q.transpose(0, 1) @ k.permute(1, 2, 0)
    time = block.bias.time
    looking_from, times = context.query_times_T[None], context.times_T[None]
    buckets = None if time is None else time_buckets(looking_from, times, LAST_BUCKET)
    added = bias(len(q), block.bias.position, time, buckets)
    if added is not None:
        scores_HLL = scores_HLL + added
    return (F.silu(scores_HLL) / block.max_len).tril(), v


def _softmax_weights(attention: SoftmaxAttention, x_TE: Tensor, context: Context) -> Tensor:
    """Softmax attention of one history, [H, L, L]."""
    q, k, _ = attention.split(x_TE, context)
    scores_HLL = q[0].transpose(0, 1) @ k[0].permute(1, 2, 0) / math.sqrt(q.shape[-1])
    causal = torch.ones_like(scores_HLL, dtype=torch.bool).tril()
    return scores_HLL.masked_fill(~causal, -torch.inf).softmax(dim=-1)
