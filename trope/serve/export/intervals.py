"""TiSASRec's attention as programs compute it: of all events, and of the last one alone.

Shape letters: B histories, L events, T = B L tokens, H heads, D head dim, E width, K intervals.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.models.context import Context
from trope.models.transformer import IntervalAttention


class FrozenIntervals(nn.Module):
    """`IntervalAttention` with its tables apart by head, as constants.

    The model multiplies [B, H, L, D] with the tables, and torch copies the tables for that in every call. Here heads
    come first and histories are rows, so the tables are read in place.
    """

    by_keys_HDK: Tensor
    by_values_HKD: Tensor

    def __init__(self, attention: IntervalAttention) -> None:
        super().__init__()
        self.heads, self.qkv, self.out, self.tables = attention.heads, attention.qkv, attention.out, attention.tables
        keys, values = self.tables.interval_keys.detach(), self.tables.interval_values.detach()
        rows = len(keys)
        self.register_buffer("by_keys_HDK", keys.view(rows, self.heads, -1).permute(1, 2, 0).contiguous())
        self.register_buffer("by_values_HKD", values.view(rows, self.heads, -1).transpose(0, 1).contiguous())

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        B, L = context.padded_shape
        H, E = self.heads, x_TE.shape[1]
        q, k, v = self.qkv(x_TE).view(B, L, 3 * E).chunk(3, dim=-1)
        k, v = k + self.tables.position_keys[:L], v + self.tables.position_values[:L]
        q, k, v = (part.view(B, L, H, -1).permute(2, 0, 1, 3) for part in (q, k, v))  # [H, B, L, D]
        index_HBLL = context.intervals(self._most)[None].expand(H, B, L, L)
        by_interval = torch.bmm(q.reshape(H, B * L, -1), self.by_keys_HDK).view(H, B, L, -1)
        scores = (q @ k.transpose(-1, -2) + by_interval.gather(-1, index_HBLL)) / math.sqrt(E // H)
        causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
        shares = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
        summed = shares.new_zeros(H, B, L, self._most + 1).scatter_add(-1, index_HBLL, shares)
        y = shares @ v + torch.bmm(summed.view(H, B * L, -1), self.by_values_HKD).view(H, B, L, -1)
        return self.out(y.permute(1, 2, 0, 3).reshape(B * L, E))

    def of_last(self, x_TE: Tensor, last_B: Tensor, context: Context) -> Tensor:
        """The rows last_B of `forward`, [B, E], where these are the last tokens of the histories.

        One query has one interval to each event, so the intervals' rows are added to keys and values, as the paper has
        it. With L queries that would be L times as many keys.
        """
        B, L = context.padded_shape
        E = x_TE.shape[1]
        place_B = last_B - torch.arange(B, device=last_B.device) * L
        intervals_BLL = context.intervals(self._most)
        row_BL = intervals_BLL.gather(1, place_B[:, None, None].expand(B, 1, L))[:, 0]
        weight, bias = self.qkv.weight, self.qkv.bias
        q_BE = F.linear(x_TE[last_B], weight[:E], bias[:E])
        k_BLE, v_BLE = F.linear(x_TE, weight[E:], bias[E:]).view(B, L, 2 * E).chunk(2, dim=-1)
        k_BLE = k_BLE + self.tables.position_keys[:L] + F.embedding(row_BL, self.tables.interval_keys)
        v_BLE = v_BLE + self.tables.position_values[:L] + F.embedding(row_BL, self.tables.interval_values)
        scores_BLH = (q_BE[:, None] * k_BLE).view(B, L, self.heads, -1).sum(-1) / math.sqrt(E // self.heads)
        is_later_BL = torch.arange(L, device=last_B.device) > place_B[:, None]
        shares_BLH = scores_BLH.masked_fill(is_later_BL[..., None], -torch.inf).softmax(dim=1)
        y_BE = (shares_BLH[..., None] * v_BLE.view(B, L, self.heads, -1)).sum(1).flatten(1)
        return self.out(y_BE)

    @property
    def _most(self) -> int:
        return self.by_keys_HDK.shape[2] - 1
