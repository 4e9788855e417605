"""Attention as a trained model computes it, read out block by block on the CPU.

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

from trope.data.sequences import EvalBatch
from trope.kernels.attention.reference import bias, time_buckets
from trope.kernels.norm import norm
from trope.kernels.project import project
from trope.models.context import Context, Stream
from trope.models.hstu import LAST_BUCKET, HSTUBlock
from trope.models.recommender import SequentialRecommender
from trope.models.softmax_attention import SoftmaxAttention


def attention_maps(model: SequentialRecommender, batch: EvalBatch) -> list[Tensor]:
    """Each block's attention of every query to every key of one history, mean over heads, [L, L]; [] for TiSASRec.

    batch: one history, not padded (see `unpadded`).
    """
    seen: list[tuple[nn.Module, tuple[Any, ...]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs)))
        for module in model.modules()
        if isinstance(module, HSTUBlock | SoftmaxAttention)
    ]
    try:
        with torch.no_grad():
            model.encode(batch.items, batch.times, batch.lengths, batch.t_now)
            return [_map(module, inputs) for module, inputs in seen]
    finally:
        for hook in hooks:
            hook.remove()


def unpadded(batch: EvalBatch) -> EvalBatch:
    """One history without the padding behind it."""
    length = int(batch.lengths[0])
    return batch._replace(items=batch.items[:, :length], times=batch.times[:, :length])


def _map(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    if isinstance(module, HSTUBlock):
        return hstu_weights(module, *inputs)[0].mean(0)
    assert isinstance(module, SoftmaxAttention)
    return _softmax_weights(module, *inputs).mean(0)


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
