"""Runs of equal buckets of time: what the gradient of the time weights needs to know about the times.

Sorted times make a row's buckets fall, so the keys in buckets >= k come first in the row, and a sum over them is a
prefix sum. How many keys these are is the same in every block. So one kernel finds the counts once a step, for all rows
and buckets of a tile, by a binary search. Tiles of FEW buckets at most, with times out of order, or with buckets past
RUNS, are summed one bucket at a time.

Arguments: p_buckets, p_lengths, s_row and L are as in attention/arguments.py. p_counts uint8 [B, P, BLOCK, RUNS] and
p_singles int32 [B, P, 2] are the two parts of `Runs`. TILES: tiles of a sequence of length L.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, P pairs of tiles: a tile of queries with a tile of keys not after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention.arguments import block_of, row_stride
from trope.kernels.attention.gaps import Runs
from trope.kernels.sequence_bounds import SequenceBounds

# Buckets whose runs are looked for: with 0.301 a bucket (reference.py), e^(64 * 0.301) s is seven years. Chosen by that
# reach, not tuned. The prefix sums of a tile hold BLOCK x RUNS numbers in registers.
RUNS = 64
# A tile of so many buckets needs no runs: far from the diagonal most have one or two, and a masked sum of each is
# cheaper than a prefix sum. 2 and 8 are not faster on an H200 (results/attention-h200.txt).
FEW = 4


@triton.jit
def pair_of(i_b, i_m, i_n, TILES):
    """Index of a pair of tiles. A sequence has TILES * (TILES + 1) / 2; those of one tile of queries are adjacent."""
    return i_b.to(tl.int64) * (TILES * (TILES + 1) // 2) + i_m * (i_m + 1) // 2 + i_n


@triton.jit
def find_runs(b_bucket, m, BLOCK: tl.constexpr, RUNS: tl.constexpr, FEW: tl.constexpr):
    """Counts [rows, RUNS] and both singles of a tile of buckets; masked pairs are in no bucket.

    Both singles are equal where the counts hold the whole tile.
    """
    o_n, o_k = tl.arange(0, BLOCK), tl.arange(0, RUNS)
    b_bucket = tl.where(m, b_bucket, -1)
    lowest = tl.min(tl.min(tl.where(m, b_bucket, 1 << 30), axis=1), axis=0)
    highest = tl.max(tl.max(b_bucket, axis=1), axis=0)
    b_count = tl.zeros((BLOCK, RUNS), dtype=tl.int32)
    if highest - lowest >= FEW:
        o_next = tl.minimum(o_n + 1, BLOCK - 1)[None, :] + tl.zeros((BLOCK, BLOCK), dtype=tl.int32)
        b_rise = tl.gather(b_bucket, o_next, axis=1) - b_bucket
        if (tl.max(tl.max(b_rise, axis=1), axis=0) <= 0) & (highest < RUNS):
            for i_step in tl.static_range(7):  # BLOCK is at most 64
                b_next = b_count + (BLOCK >> i_step)
                b_there = tl.gather(b_bucket, tl.maximum(tl.minimum(b_next, BLOCK) - 1, 0), axis=1)
                b_count = tl.where((b_next <= BLOCK) & (b_there >= o_k[None, :]), b_next, b_count)
            lowest = highest + 1
    return b_count, lowest, highest + 1


@triton.jit
def sum_runs(b_gradient, b_count):
    """Sums of each row over its keys in buckets >= k, [rows, RUNS]."""
    b_prefix = tl.gather(tl.cumsum(b_gradient, axis=1), tl.maximum(b_count - 1, 0), axis=1)
    return tl.where(b_count > 0, b_prefix, 0.0)


@triton.jit
def _runs_kernel(
    p_buckets, p_counts, p_singles, p_lengths, s_row, L, TILES,
    BLOCK: tl.constexpr, RUNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, tiles of keys, B): writes the runs of one pair of tiles."""
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(p_lengths + i_b).to(tl.int32)
    if (i_n > i_m) | (i_m * BLOCK >= length):
        return
    o_row, o_k = tl.arange(0, BLOCK), tl.arange(0, RUNS)
    o_m, o_n = i_m * BLOCK + o_row, i_n * BLOCK + o_row
    m = (o_m < length)[:, None] & (o_m[:, None] >= o_n[None, :])
    p_tile = p_buckets + i_b.to(tl.int64) * L * s_row + o_m[:, None] * s_row + o_n[None, :]
    b_count, lowest, end = find_runs(tl.load(p_tile, mask=m, other=0).to(tl.int32), m, BLOCK, RUNS, FEW)
    pair = pair_of(i_b, i_m, i_n, TILES)
    if lowest == end:
        tl.store(p_counts + pair * BLOCK * RUNS + o_row[:, None] * RUNS + o_k[None, :], b_count.to(tl.uint8))
    tl.store(p_singles + pair * 2, lowest)
    tl.store(p_singles + pair * 2 + 1, end)


def cache_runs(buckets: Tensor, bounds: SequenceBounds) -> Runs:
    """Runs of the buckets that `cache_buckets` wrote; tiles beyond a sequence, and counts of tiles that are summed one
    bucket at a time, are not written."""
    B, L, block = len(bounds.lengths_B), bounds.max_len, block_of(bounds.max_len)
    tiles = triton.cdiv(L, block)
    pairs = tiles * (tiles + 1) // 2
    counts = torch.empty((B, pairs, block, RUNS), dtype=torch.uint8, device=buckets.device)
    singles = torch.empty((B, pairs, 2), dtype=torch.int32, device=buckets.device)
    if B * L:
        _runs_kernel[(tiles, tiles, B)](
            p_buckets=buckets,
            p_counts=counts,
            p_singles=singles,
            p_lengths=bounds.lengths_B,
            s_row=row_stride(L),
            L=L,
            TILES=tiles,
            BLOCK=block,
            RUNS=RUNS,
            FEW=FEW,
        )
    return Runs(counts, singles)
