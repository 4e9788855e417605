"""Keyword arguments of the attention kernels, built once here: pointers, strides, sizes and compile-time constants.

Every attention kernel uses the same names:

- p_q, p_k, p_v, p_y: queries, keys, values and output [T, H, D]; p_dq .. p_dy: their gradients. s_x_t and s_x_h are the
  strides of a token and of a head of x, in elements; the last stride is 1.
- p_position: position weights [2 * max_len - 1]; `centre` is the index of distance 0.
- p_time: time weights [K + 1]; `last` is the last bucket, K.
- p_times, p_query_times: int64 seconds [T].
- p_buckets: kept buckets, uint8 [B, L, S]; p_sheet: kept bias [B or 1, S, S]. S = s_row = row_stride(L) is the stride
  of a row in both, s_sheet the stride of a sequence's sheet (0 if all sequences share one).
- p_starts, p_lengths: first token and number of tokens of each sequence, [B].
- L: longest length. scale: 1 / n.
- HAS_POSITION, HAS_TIME: which biases exist. CACHED: buckets are kept. SHEET: the bias is kept.
- D: head dim. BLOCK: queries and keys of a tile. BLOCK_D: D rounded up. HEADS: heads of a program. FAST: bf16
  products and the hardware's tanh. PRECISION: of products of float32.

A pointer that a kernel does not need gets any tensor, because Triton would compile another kernel for None; it is never
read. Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trope.kernels.attention.gaps import Gaps
from trope.kernels.sequence_bounds import SequenceBounds

# Queries and keys of a tile, fewer for short sequences. Measured on an H200: 128 was slower (docs/speed.md, "Tried
# without success"), because shared memory then holds one program where it holds three. attention/runs.py counts keys
# of a tile in 7 steps of a binary search and stores them as bytes, so a tile may not be larger than 64.
BLOCK = 64

# What lives only while one block is computed may take this many times the budget of what is kept for all blocks: the
# bias of all pairs, which is then written once more for the backward, and the gradient of the scores. 16 is 4.5 GiB:
# the latter for 17 sequences of 4,096 positions and 8 heads. With it a block takes 4.5 ms on an H200, without it 5.1
# (results/attention-h200.txt). On a smaller card it is at most this share of the memory.
PASSING, SHARE = 16, 16


class Bias(NamedTuple):
    """The weights of both biases, the gaps between times, and the sheet made of them; each may be None."""

    position: Tensor | None
    time: Tensor | None
    gaps: Gaps | None
    sheet: Tensor | None = None

    def pointers(self, like: Tensor) -> dict[str, Tensor]:
        """p_position .. p_sheet; `like` stands in for what is absent."""
        gaps = self.gaps
        given = {
            "p_position": self.position,
            "p_time": self.time,
            "p_times": None if gaps is None else gaps.times_T,
            "p_query_times": None if gaps is None else gaps.query_times_T,
            "p_buckets": None if gaps is None else gaps.buckets,
            "p_sheet": self.sheet,
        }
        return {name: like if x is None else x for name, x in given.items()}

    def sizes(self, bounds: SequenceBounds) -> dict[str, int]:
        """s_row, s_sheet, L, centre, last."""
        centre = 0 if self.position is None else (len(self.position) - 1) // 2
        assert self.position is None or bounds.max_len <= centre + 1, "sequences are longer than the position weights"
        return {
            "s_row": row_stride(bounds.max_len),
            "s_sheet": 0 if self.sheet is None or len(self.sheet) == 1 else self.sheet.stride(0),
            "L": bounds.max_len,
            "centre": centre,
            "last": 0 if self.gaps is None else self.gaps.last,
        }

    def constants(self) -> dict[str, bool]:
        """HAS_POSITION, HAS_TIME, CACHED, SHEET."""
        return {
            "HAS_POSITION": self.position is not None,
            "HAS_TIME": self.time is not None,
            "CACHED": self.gaps is not None and self.gaps.buckets is not None,
            "SHEET": self.sheet is not None,
        }

    def arguments(self, like: Tensor, bounds: SequenceBounds) -> dict[str, Any]:
        """All of the above and the bounds: what a kernel needs that forms scores."""
        return {**self.pointers(like), **bounds_pointers(bounds), **self.sizes(bounds), **self.constants()}


def bounds_pointers(bounds: SequenceBounds) -> dict[str, Tensor]:
    """p_starts, p_lengths."""
    return {"p_starts": bounds.starts_B, "p_lengths": bounds.lengths_B}


def strides(**tensors: Tensor) -> dict[str, int]:
    """s_x_t and s_x_h of every tensor x [T, H, D]."""
    found = {}
    for name, x in tensors.items():
        found[f"s_{name}_t"], found[f"s_{name}_h"] = x.stride(0), x.stride(1)
    return found


def block_of(L: int) -> int:
    """Queries and keys of a tile."""
    return min(BLOCK, max(16, triton.next_power_of_2(L)))


def row_stride(L: int) -> int:
    """Stride of a row of buckets and sheets: rows begin at 16 bytes, and a tile never reaches beyond a row."""
    return triton.cdiv(L, block_of(L)) * block_of(L)


def at_least(least: int, share: int, device: torch.device) -> int:
    """A budget in bytes: `least`, or one `share`-th of the GPU's memory if that is more. A budget of 0 stays 0."""
    if device.type != "cuda" or not least:
        return least
    return max(least, torch.cuda.get_device_properties(device).total_memory // share)


def passing_bytes(most_bytes: int, device: torch.device) -> int:
    """How much may be held while one block is computed, if `most_bytes` may be kept for all blocks."""
    passing = PASSING * most_bytes
    if device.type == "cuda":
        passing = min(passing, torch.cuda.get_device_properties(device).total_memory // SHARE)
    return passing


def kept_bytes(heads: int, like: Tensor, bounds: SequenceBounds) -> int:
    """Bytes of the gradient of the scores, in `like`'s dtype."""
    return len(bounds.lengths_B) * heads * row_stride(bounds.max_len) ** 2 * like.element_size()


def programs_of(first: int, units: int, tiles: int) -> int:
    """Programs of a launch over units (attention/tiles.py: `unit_of`): all tiles of each sequence that has a unit."""
    return triton.cdiv(first % tiles + units, tiles) * tiles


def heads_of(q: Tensor, width: int) -> dict[str, int]:
    """HEADS: how many heads a program has, so that all of them together are at most `width` wide, one at least.

    Heads share the bias, so several in a program load and add it once.
    """
    heads = max(1, width // max(16, triton.next_power_of_2(q.shape[2])))
    return {"HEADS": math.gcd(heads, q.shape[1])}


def tile(q: Tensor, bounds: SequenceBounds, wide_stages: int = 2) -> dict[str, Any]:
    """D, BLOCK, BLOCK_D, FAST, warps and stages of the kernels that form scores.

    Measured on an H200: more warps were slower, for the same reason as larger tiles.
    wide_stages: stages of the pipeline for heads wider than 64, whose tiles fill the shared memory.
    """
    D = q.shape[2]
    return {
        "BLOCK": block_of(bounds.max_len),
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "D": D,
        # The interpreter has no inline assembly, and float32 has no reason to approximate.
        "FAST": q.dtype != torch.float32 and os.environ.get("TRITON_INTERPRET") != "1",
        "num_warps": 4,
        "num_stages": 3 if D <= 64 else wide_stages,
    }
