"""Dropout of one global batch, drawn by each of several processes: what a row drops depends on no number of processes.

Every process has the same generator in the same state, draws the mask of the whole batch, and keeps its own rows. That
is the mask, bit for bit, that one process draws. It costs a draw for each activation of the whole batch. Where kernels
drop (on a GPU), they draw from a seed of the process instead, and `SameDropout` is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SameDropout(TorchFunctionMode):
    """Inside, torch's dropout and attention drop as they would for the whole batch.

    Their inputs begin with this process's rows of the batch, or with a multiple of them: [B, ..] or [B * L, ..].

    Args:
        first, rows: this process's rows of the batch. total: rows of the whole batch.
    """

    def __init__(self, first: int, rows: int, total: int) -> None:
        super().__init__()
        assert first >= 0 and first + rows <= total, "these rows are not of the batch"
        self.first, self.rows, self.total = first, rows, total

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert not inplace, "no model of ours drops in place"
        return input * self._kept(input, input.shape, p).div_(1 - p) if training and p > 0 else input

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        if dropout_p == 0:
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        assert is_causal and query.shape[-2] == key.shape[-2], "attention of ours is causal and over itself"
        # What torch computes where it drops. It cannot be given a mask without a warning.
        root, L = query.shape[-1] ** -0.25, query.shape[-2]
        future = torch.ones(L, L, dtype=torch.bool, device=query.device).triu(1)
        scores = ((query * root) @ (key * root).transpose(-1, -2)).masked_fill(future, -torch.inf)
        kept = self._kept(scores, scores.shape, dropout_p).div_(1 - dropout_p)
        return (scores.softmax(dim=-1) * kept) @ value

    def _kept(self, like: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
        """1 where a number of this process is kept, 0 where it is dropped."""
        each, rest = divmod(shape[0], self.rows)
        assert rest == 0, "dropout of something that does not begin with the batch's rows"
        whole = like.new_empty((self.total * each, *shape[1:])).bernoulli_(1 - p)
        return whole[self.first * each : (self.first + self.rows) * each]
