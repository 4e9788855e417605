"""The gradients of HSTU's bias weights: sums of the scores' gradient by distance and by bucket of time.

Heads share the bias, so the gradient is summed over heads first, into strips: a tile of queries by all its keys, in
float32. The sum comes from what the key kernel kept; or the query kernel writes one for each group of heads that a
program of it has, in the scores' dtype, and the kernels here add up the groups. Strips are taken in slices of a fixed
budget, so memory stays linear in the length. From a strip:
- by distance: entries of one distance lie one step apart in neighbouring rows, so rows are added up, read backwards;
- by bucket: sorted times make a row's buckets runs, so the sum over buckets >= k is the row's prefix sum where the run
  of k ends (attention/runs.py). Tiles with few buckets or unsorted times take one masked sum per bucket.
No atomics: each program writes a small partial sum, and the partial sums are added in a fixed order.

Arguments that attention/arguments.py does not explain:

- p_ds: the gradient of the scores that the key kernel kept, [B, H, S keys, S queries].
- p_strips: [GROUPS, units, BLOCK, S], s_group the stride of a group of heads. A unit is a tile of queries of one
  sequence; units are numbered through all sequences, TILES to a sequence, and `first` is the number of the slice's
  first unit. UNITS: units of the slice.
- p_counts, p_singles: the runs (attention/runs.py) if COUNTED. FEW: most buckets of a tile that are taken singly.
- p_partial: by bucket [B * TILES, BLOCK_K + RUNS], by distance [parts, s_partial]; `i_part` is the slice's first part.
- p_d_time [K + 1], p_d_position [2 * max_len - 1]: the results. R: partial rows to add up.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, S = row_stride(L), H heads, D head dim, K time buckets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.aside import IN_PLACE, Late
from trope.kernels.attention import runs
from trope.kernels.attention.arguments import Bias, at_least, block_of, bounds_pointers, programs_of, row_stride
from trope.kernels.attention.runs import find_runs, pair_of, sum_runs
from trope.kernels.attention.tiles import Pairs, load_buckets, unit_of
from trope.kernels.sequence_bounds import SequenceBounds

# Bytes of a slice of strips, or this share of the GPU's memory if that is more. One slice of the former holds all of
# `shop` (128 x 512 x 512 float32 is half of it), one of an H200's share all of `shop-long`: 16 x 4096 x 4096. Fewer
# slices have more programs each, whose walks are of very different length.
STRIP_BYTES, STRIP_SHARE = 1 << 28, 128
# Whether strips are summed beside the backward pass where the caller says so.
SUMS_LATE = True
LONG = 16  # tiles of a sequence from which on more warps sum it by bucket; 8 have 8 faster, 64 have 16 (H200)
MOST_UNITS = 65_535  # of a slice: the second axis of a launch has no more
# Rows of strips that a program of the distance kernel adds up: many, or few where there are few strips, whose programs
# would else be few and slow; not tuned.
ROWS, FEW_ROWS, FEW = 256, 64, 1 << 15


@triton.jit
def _sum_kernel(
    p_ds, p_strips, p_lengths, s_row, first, TILES, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, units): a tile of a strip, from the gradients that were kept for each head."""
    i_n, i_unit = tl.program_id(0), tl.program_id(1)
    i_b, i_m = (first + i_unit) // TILES, (first + i_unit) % TILES
    if (i_n > i_m) | (i_m * BLOCK >= tl.load(p_lengths + i_b)):
        return
    o_row, o_n = tl.arange(0, BLOCK), i_n * BLOCK + tl.arange(0, BLOCK)
    p_tile = p_ds + i_b.to(tl.int64) * H * s_row * s_row + o_n[:, None] * s_row + (i_m * BLOCK + o_row)[None, :]
    b_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for i_h in tl.static_range(H):
        b_sum += tl.load(p_tile + i_h * s_row * s_row).to(tl.float32)
    p_out = p_strips + i_unit.to(tl.int64) * BLOCK * s_row + o_row[:, None] * s_row + o_n[None, :]
    tl.store(p_out, tl.trans(b_sum))


@triton.jit
def _load_strips(p_strips, o, m, s_group, GROUPS: tl.constexpr):
    """Numbers of a strip at offsets o, summed over the groups of heads, float32; zero where masked."""
    b_sum = tl.load(p_strips + o, mask=m, other=0.0).to(tl.float32)
    for i in tl.static_range(1, GROUPS):
        b_sum += tl.load(p_strips + i * s_group + o, mask=m, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def _close(b_hist, b_open, is_open):
    """The histogram with the sum of `b_open` added to the bucket that is open."""
    return b_hist + tl.where(is_open, tl.sum(tl.sum(b_open, axis=1), axis=0), 0.0)


@triton.jit
def _by_bucket_kernel(
    p_strips, p_partial, p_times, p_query_times, p_buckets, p_counts, p_singles, p_starts, p_lengths,
    s_row, s_group, L, last, first, UNITS, TILES,
    CACHED: tl.constexpr, COUNTED: tl.constexpr, BY_RUNS: tl.constexpr, SINGLY: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, RUNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Grid (programs_of(first, UNITS, TILES),): one strip's sums in each of BLOCK_K buckets taken SINGLY, and in
    buckets >= k of its runs if BY_RUNS.

    Neighbouring tiles share buckets, so what is taken singly is added up pair by pair while its bucket stays the same:
    one such sum is open for even buckets and one for odd.
    """
    i_unit, i_b, i_m = unit_of(tl.program_id(0), first, UNITS, TILES)
    if (i_unit < 0) | (i_unit >= UNITS):
        return
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    o_row, o_k, o_run = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, RUNS)
    o_m = i_m * BLOCK + o_row
    m_m = o_m < length
    b_hist, b_runs = tl.zeros((BLOCK_K,), dtype=tl.float32), tl.zeros((BLOCK, RUNS), dtype=tl.float32)
    b_even, b_odd = tl.zeros((BLOCK, BLOCK), dtype=tl.float32), tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    even, odd = i_m * 0 - 1, i_m * 0 - 1
    p_strip = p_strips + i_unit.to(tl.int64) * BLOCK * s_row
    pair = pair_of(i_b, i_m, 0, TILES)
    tiles = i_m + 1 if i_m * BLOCK < length else 0
    lowest_ahead, end_ahead = i_m * 0, i_m * 0
    if COUNTED:
        lowest_ahead = tl.load(p_singles + pair * 2, mask=tiles > 0, other=0)
        end_ahead = tl.load(p_singles + pair * 2 + 1, mask=tiles > 0, other=0)
    for i_n in range(tiles):
        o_n = i_n * BLOCK + o_row
        m = (o_m[:, None] >= o_n[None, :]) & m_m[:, None]  # other pairs have no gradient
        o_tile = o_row[:, None] * s_row + o_n[None, :]
        pairs = Pairs(i_b, start, o_m, o_n, m_m, o_n < length)
        lowest, end = lowest_ahead, end_ahead
        if COUNTED:  # those of the next tile are on their way while this one is summed
            p_ahead = p_singles + (pair + i_n + 1) * 2
            lowest_ahead = tl.load(p_ahead, mask=i_n + 1 < tiles, other=0)
            end_ahead = tl.load(p_ahead + 1, mask=i_n + 1 < tiles, other=0)
        else:
            b_bucket = load_buckets(
                p_times=p_times, p_query_times=p_query_times, p_buckets=p_buckets, s_row=s_row, L=L, last=last,
                pairs=pairs, CACHED=CACHED,
            )  # fmt: skip
            b_count, lowest, end = find_runs(b_bucket, m, BLOCK, RUNS, FEW)
        if BY_RUNS and lowest == end:
            if COUNTED:
                p_count = p_counts + (pair + i_n) * BLOCK * RUNS
                b_count = tl.load(p_count + o_row[:, None] * RUNS + o_run[None, :]).to(tl.int32)
            b_runs += sum_runs(_load_strips(p_strip, o_tile, i_n >= 0, s_group, GROUPS), b_count)
        if SINGLY and lowest < end:
            b_sum = _load_strips(p_strip, o_tile, m, s_group, GROUPS)
            if COUNTED:
                b_bucket = tl.zeros((BLOCK, BLOCK), dtype=tl.int32) + lowest
                if end - lowest > 1:
                    b_bucket = load_buckets(
                        p_times=p_times, p_query_times=p_query_times, p_buckets=p_buckets, s_row=s_row, L=L, last=last,
                        pairs=pairs, CACHED=CACHED,
                    )  # fmt: skip
            for i_k in range(lowest, end):
                b_part = tl.where(b_bucket == i_k, b_sum, 0.0)
                if i_k % 2 == 0:
                    if i_k == even:
                        b_even += b_part
                    else:
                        b_hist = _close(b_hist, b_even, o_k == even)
                        b_even, even = b_part, i_k
                else:
                    if i_k == odd:
                        b_odd += b_part
                    else:
                        b_hist = _close(b_hist, b_odd, o_k == odd)
                        b_odd, odd = b_part, i_k
    p_row = p_partial + (first + i_unit).to(tl.int64) * (BLOCK_K + RUNS)
    if SINGLY:
        b_hist = _close(_close(b_hist, b_even, o_k == even), b_odd, o_k == odd)
        tl.store(p_row + o_k, b_hist)
    if BY_RUNS:
        tl.store(p_row + BLOCK_K + o_run, tl.sum(b_runs, axis=0))


@triton.jit
def _bucket_sum_kernel(p_partial, p_d_time, R, scale, BLOCK_K: tl.constexpr, RUNS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Grid (K + 1,): one bucket's sum over all strips. A run is the sum in buckets >= k less that in >= k + 1."""
    i_k = tl.program_id(0)
    b_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    b_above = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        p = p_partial + o_r * (BLOCK_K + RUNS) + i_k
        b_sum += tl.load(p, mask=o_r < R, other=0.0)
        b_sum += tl.load(p + BLOCK_K, mask=(o_r < R) & (i_k < RUNS), other=0.0)
        b_above += tl.load(p + BLOCK_K + 1, mask=(o_r < R) & (i_k + 1 < RUNS), other=0.0)
    tl.store(p_d_time + i_k, (tl.sum(b_sum, axis=0) - tl.sum(b_above, axis=0)) * scale)


@triton.jit
def _by_distance_kernel(
    p_strips, p_partial, p_lengths, s_row, s_group, s_partial, i_part, first, UNITS, TILES, ROWS,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Grid (parts, blocks of distances): sums of ROWS rows of strips by distance."""
    i_chunk, o_distance = tl.program_id(0), tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    b_sum = tl.zeros((BLOCK_R, BLOCK_L), dtype=tl.float32)
    for i_row in range(i_chunk * ROWS, tl.minimum((i_chunk + 1) * ROWS, UNITS * BLOCK), BLOCK_R):
        o_row = i_row + tl.arange(0, BLOCK_R)  # BLOCK_R divides BLOCK: all of one strip
        unit = first + i_row // BLOCK
        o_m = unit % TILES * BLOCK + o_row % BLOCK
        length = tl.load(p_lengths + unit // TILES).to(tl.int32)
        o_n = o_m[:, None] - o_distance[None, :]
        m = (o_n >= 0) & (o_m < length)[:, None]
        b_sum += _load_strips(p_strips, o_row.to(tl.int64)[:, None] * s_row + o_n, m, s_group, GROUPS)
    tl.store(p_partial + (i_part + i_chunk) * s_partial + o_distance, tl.sum(b_sum, axis=0))


@triton.jit
def _distance_sum_kernel(p_partial, p_d_position, R, L, centre, scale, s_partial, BLOCK_R: tl.constexpr):
    """Grid (L,): one distance's sum over all parts."""
    distance = tl.program_id(0)
    b_sum = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_partial + o_r * s_partial + distance, mask=o_r < R, other=0.0)
    tl.store(p_d_position + centre - distance, tl.sum(b_sum, axis=0) * scale)


def from_kept(
    ds: Tensor, bounds: SequenceBounds, n: int, bias: Bias, late: Late = IN_PLACE
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weights from the gradient of the scores, [B, H, keys, queries]."""

    def fill(strips: Tensor, first: int, units: int, tiles: int) -> None:
        _sum_kernel[(tiles, units)](
            p_ds=ds,
            p_strips=strips,
            p_lengths=bounds.lengths_B,
            s_row=strips.shape[-1],
            first=first,
            TILES=tiles,
            H=ds.shape[1],
            BLOCK=strips.shape[2],
            num_warps=4,
        )

    return sum_strips(fill, 1, torch.float32, bounds, n, bias, late)


def sum_strips(
    fill: Callable[[Tensor, int, int, int], None], groups: int, dtype: torch.dtype, bounds: SequenceBounds, n: int,
    bias: Bias, late: Late = IN_PLACE,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Slice by slice: have strips filled, then sum them both ways. Returns d position and d time.

    fill: writes the strips of `units` units from number `first` on, [groups, units, BLOCK, S], each the sum over a
        group of heads; called as fill(strips, first, units, tiles), also where there is no bias to have a gradient.
    late: where strips are summed, if there is one slice: each slice is written over the one before.
    """
    B, L, S, block = len(bounds.lengths_B), bounds.max_len, row_stride(bounds.max_len), block_of(bounds.max_len)
    tiles = triton.cdiv(L, block)
    position, time, gaps, _ = bias
    has_bias, device = position is not None or time is not None, bounds.lengths_B.device
    units = min(B * tiles, MOST_UNITS)
    if has_bias:
        budget = at_least(STRIP_BYTES, STRIP_SHARE, device)
        units = max(1, min(units, budget // (groups * dtype.itemsize * block * S)))
    slices = range(0, B * tiles, units)
    strips = torch.empty((groups, units if has_bias else 0, block, S), dtype=dtype, device=device)
    rows = FEW_ROWS if units * block <= FEW else ROWS
    parts = triton.cdiv(units * block, rows)
    by_distance = torch.empty(
        (len(slices) * parts, S) if position is not None else (0, S), dtype=torch.float32, device=device
    )
    block_k = 0 if time is None else triton.next_power_of_2(len(time))
    by_bucket = torch.empty((B * tiles if block_k else 0, block_k + runs.RUNS), dtype=torch.float32, device=device)
    late = late if SUMS_LATE and len(slices) == 1 else IN_PLACE
    touched = [strips, by_distance, by_bucket, bounds.starts_B, bounds.lengths_B]
    touched += [x for each in (gaps, None if gaps is None else gaps.runs) for x in each or () if isinstance(x, Tensor)]
    for i, first in enumerate(slices):
        here = min(units, B * tiles - first)
        fill(strips, first, here, tiles)
        with late.work(*touched):
            if position is not None:
                _launch_by_distance(strips, by_distance, bounds, first, here, tiles, i * parts, rows)
            if time is not None:
                _launch_by_bucket(strips, by_bucket, bounds, bias, first, here, tiles, block_k)
    with late.work():
        d_position = None if position is None else late.gradient(torch.zeros_like(position))
        d_time = None if time is None else late.gradient(torch.empty_like(time))
        if d_position is not None:
            _distance_sum_kernel[(L,)](
                p_partial=by_distance,
                p_d_position=d_position,
                R=len(by_distance),
                L=L,
                centre=bias.sizes(bounds)["centre"],
                scale=1.0 / n,
                s_partial=S,
                BLOCK_R=256,  # not tuned
            )
        if d_time is not None:
            _bucket_sum_kernel[(len(d_time),)](
                p_partial=by_bucket,
                p_d_time=d_time,
                R=B * tiles,
                scale=1.0 / n,
                BLOCK_K=block_k,
                RUNS=runs.RUNS,
                BLOCK_R=256,  # not tuned
            )
    return d_position, d_time


def _launch_by_distance(
    strips: Tensor, by_distance: Tensor, bounds: SequenceBounds, first: int, units: int, tiles: int, part: int,
    rows: int,
) -> None:  # fmt: skip
    groups, _, block, S = strips.shape
    block_l = 128 if S % 128 == 0 else block
    _by_distance_kernel[(triton.cdiv(strips.shape[1] * block, rows), S // block_l)](
        p_strips=strips,
        p_partial=by_distance,
        p_lengths=bounds.lengths_B,
        s_row=S,
        s_group=strips.stride(0),
        s_partial=S,
        i_part=part,
        first=first,
        UNITS=units,
        TILES=tiles,
        ROWS=rows,
        GROUPS=groups,
        BLOCK=block,
        BLOCK_R=16,  # not tuned; must divide BLOCK
        BLOCK_L=block_l,
        num_warps=4,
    )


def _launch_by_bucket(
    strips: Tensor, by_bucket: Tensor, bounds: SequenceBounds, bias: Bias, first: int, units: int, tiles: int,
    block_k: int,
) -> None:  # fmt: skip
    assert bias.gaps is not None
    found, pointers, sizes = bias.gaps.runs, bias.pointers(by_bucket), bias.sizes(bounds)
    arguments = {
        "p_strips": strips,
        "p_partial": by_bucket,
        **{name: pointers[name] for name in ("p_times", "p_query_times", "p_buckets")},
        "p_counts": by_bucket if found is None else found.counts,
        "p_singles": by_bucket if found is None else found.singles,
        **bounds_pointers(bounds),
        **{name: sizes[name] for name in ("s_row", "L", "last")},
        "s_group": strips.stride(0),
        "first": first,
        "UNITS": units,
        "TILES": tiles,
        "CACHED": bias.constants()["CACHED"],
        "COUNTED": found is not None,
        "GROUPS": len(strips),
        "BLOCK": strips.shape[2],
        "BLOCK_K": block_k,
        "RUNS": runs.RUNS,
        "FEW": runs.FEW,
    }
    # Both ways in one program need so many registers that a multiprocessor holds one program instead of two or three,
    # which is a third slower on an H200. Where the runs are not known beforehand, finding them is most of the work, and
    # one program does both. One tile is not worth a second launch.
    is_apart = found is not None and tiles > 1
    ways = [(True, False), (False, True)] if is_apart else [(True, True)]
    for by_runs, singly in ways:
        _by_bucket_kernel[(programs_of(first, units, tiles),)](
            BY_RUNS=by_runs,
            SINGLY=singly,
            num_warps=16 if tiles > LONG else 8,
            **arguments,
        )
