"""What attention's backward has of the kept gradient of the scores: dq, and sums for the gradients of the bias weights.

The key kernel (attention_backward.py) leaves the gradient of the scores in tiles [keys, queries], one behind the other:
all heads of a pair of tiles, all pairs of a tile of queries. One program owns a tile of queries and some heads, and
walks over their pairs, reading each tile once: a product with the keys for dq, and, summed over its heads,
- by distance: rows are turned, so that entries of one distance are in one column. What is left of the diagonal belongs
  to this pair's distances, what is right of it to those of the next;
- by bucket of time: prefix sums where runs end, see attention_runs.py.
A tile passes from memory to the tensor cores without registers: the sum over heads is a product with the unit matrix,
exact, as for the sheet. Bias weights are shared by heads and sequences, so what programs leave is summed at the end, in
a fixed order (attention_bias_gradient.py).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, S = row_stride(L), P pairs of tiles, H heads, G heads of a program, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels import attention_runs
from trope.kernels.attention_bias_gradient import Partial
from trope.kernels.attention_runs import pair_of, sum_runs
from trope.kernels.attention_triton import Bias, block_of, dot, load_tile, row_stride, store_tile, tile, unit_tile
from trope.kernels.spans import Spans

# Of a program, so that an H200 holds two: tiles and keys of a pair and of the next, in shared memory (half of it is 113
# KiB, and 16 are needed to change layouts); and dq, in registers (a quarter of a thread's).
MOST_TILE_BYTES = 96 << 10
MOST_SUM_BYTES = 32 << 10


def kept_shape(spans: Spans, H: int) -> tuple[int, ...]:
    """Of the kept gradient: [B, P, H, keys, queries]."""
    block = block_of(spans.max_len)
    tiles = triton.cdiv(spans.max_len, block)
    return len(spans.lengths_B), tiles * (tiles + 1) // 2, H, block, block


def heads_of_program(H: int, block: int, block_d: int, dtype: torch.dtype) -> int:
    """The most that divide the heads and fit; one in float32, whose products need the registers."""
    tile_bytes, sum_bytes = 2 * block * (block + block_d) * dtype.itemsize, 4 * block * block_d
    most = min(MOST_TILE_BYTES // tile_bytes, MOST_SUM_BYTES // sum_bytes)
    fitting = [g for g in range(1, H + 1) if H % g == 0 and g <= most]
    return 1 if dtype == torch.float32 else max(fitting, default=1)


@triton.jit
def kept_tile(p_ds, i_b, i_m, i_n, i_h, TILES, H, BLOCK: tl.constexpr):
    """Pointers [keys, queries] to a kept tile."""
    o = tl.arange(0, BLOCK)
    i_tile = pair_of(i_b, i_m, i_n, TILES) * H + i_h
    return p_ds + i_tile * BLOCK * BLOCK + o[:, None] * BLOCK + o[None, :]


@triton.jit
def _turn(b_x, BLOCK: tl.constexpr):
    """Column j of row i to column i - j, modulo BLOCK."""
    o = tl.arange(0, BLOCK)
    return tl.gather(b_x, (o[:, None] - o[None, :]) & (BLOCK - 1), axis=1)


@triton.jit
def _query_kernel(
    p_ds, p_k, p_dq, p_by_distance, p_by_bucket, p_buckets, p_ends, p_singles, p_starts, p_lengths,
    s_k, s_dq, s_kh, s_dqh, s_row, L, scale, TILES, H,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, G: tl.constexpr, BLOCK_K: tl.constexpr, RUNS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    # Against the order in which the tiles were written: the last are still in the cache, and the longest walk is first.
    i_part = tl.num_programs(0) - 1 - tl.program_id(0)
    i_unit, i_first = i_part // (H // G), i_part % (H // G) * G
    i_b, i_m = i_unit // TILES, i_unit % TILES
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    o_row, o_k, o_run = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, RUNS)
    o_m = i_m * BLOCK + o_row
    pairs = i_m + 1 if i_m * BLOCK < length else 0
    p_distance = p_by_distance + i_part.to(tl.int64) * s_row + o_row
    b_unit = unit_tile(p_ds, BLOCK)
    b_hist = tl.zeros((BLOCK_K,), dtype=tl.float32)
    b_runs = tl.zeros((RUNS,), dtype=tl.float32)
    b_before = tl.zeros((BLOCK,), dtype=tl.float32)
    b_dq = ()  # Triton's tuples grow by addition only
    for _ in tl.static_range(G):
        b_dq = b_dq + (tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32),)  # type: ignore  # noqa: RUF005
    for i_n in range(pairs):
        o_n = i_n * BLOCK + o_row
        b_sum, b_next = tl.zeros((BLOCK, BLOCK), dtype=tl.float32), ()
        for i_h in tl.static_range(G):
            b_ds = tl.load(kept_tile(p_ds, i_b, i_m, i_n, i_first + i_h, TILES, H, BLOCK))
            b_k = load_tile(p_k + (i_first + i_h).to(tl.int64) * s_kh, start + o_n, o_n < length, s_k, D, BLOCK_D)
            b_next = b_next + (b_dq[i_h] + dot(tl.trans(b_ds), b_k, FAST),)  # type: ignore  # noqa: RUF005
            if HAS_POSITION or HAS_TIME:
                if FAST:
                    b_sum = tl.dot(b_unit, b_ds, b_sum)
                else:
                    b_sum += b_ds.to(tl.float32)
        b_dq = b_next
        b_gradient = tl.trans(b_sum * scale)
        # Always true: the compiler starts to load the next pair before an `if` at a loop's end, but after all else.
        if i_n * BLOCK < length:
            if HAS_POSITION:
                b_turned = _turn(b_gradient, BLOCK)
                m_here = o_row[:, None] >= o_row[None, :]
                b_here = tl.sum(tl.where(m_here, b_turned, 0.0), axis=0)
                tl.store(p_distance + (i_m - i_n) * BLOCK, b_here + b_before)
                b_before = tl.sum(tl.where(m_here, 0.0, b_turned), axis=0)
            if HAS_TIME:
                pair = pair_of(i_b, i_m, i_n, TILES)
                b_end = tl.load(p_ends + pair * BLOCK * RUNS + o_row[:, None] * RUNS + o_run[None, :]).to(tl.int32)
                b_runs += tl.sum(sum_runs(b_gradient, b_end, BLOCK), axis=0)
                lowest, end = tl.load(p_singles + pair * 2), tl.load(p_singles + pair * 2 + 1)
                if lowest < end:
                    m = (o_m < length)[:, None] & (o_m[:, None] >= o_n[None, :])
                    p_tile = p_buckets + i_b.to(tl.int64) * L * s_row + o_m[:, None] * s_row + o_n[None, :]
                    b_bucket = tl.load(p_tile, mask=m, other=0).to(tl.int32)
                    for i_k in range(lowest, end):
                        in_bucket = tl.sum(tl.sum(tl.where(m & (b_bucket == i_k), b_gradient, 0.0), axis=1), axis=0)
                        b_hist += tl.where(o_k == i_k, in_bucket, 0.0)
    for i_h in tl.static_range(G):
        p_head = p_dq + (i_first + i_h).to(tl.int64) * s_dqh
        store_tile(p_head, b_dq[i_h] * scale, start + o_m, o_m < length, s_dq, D, BLOCK_D)
    if HAS_POSITION:
        for i_n in range(pairs, TILES):
            tl.store(p_distance + i_n * BLOCK, tl.zeros((BLOCK,), dtype=tl.float32))
    if HAS_TIME:
        p_row = p_by_bucket + i_part.to(tl.int64) * (BLOCK_K + RUNS)
        tl.store(p_row + o_k, b_hist)
        tl.store(p_row + BLOCK_K + o_run, b_runs)


def from_kept(
    ds: Tensor,
    k: Tensor,
    dq: Tensor,
    spans: Spans,
    n: int,
    bias: Bias,
    d_position: Tensor | None,
    d_time: Tensor | None,
) -> None:
    """Fill dq and the gradients of the weights from the gradient of the scores, `kept_shape`."""
    B, _, H, block, _ = ds.shape
    constants = tile(k, spans)
    S, G = row_stride(spans.max_len), heads_of_program(H, block, constants["BLOCK_D"], ds.dtype)
    parts = B * (S // block) * (H // G)
    partial = Partial.empty(parts, parts, S, d_position, d_time, ds.device)
    *_, buckets, _ = bias.pointers(ds)
    ends, singles = (ds, ds) if d_time is None else bias.gaps.runs
    _query_kernel[(parts,)](
        ds, k, dq, partial.by_distance, partial.by_bucket, buckets, ends, singles, spans.starts_B, spans.lengths_B,
        k.stride(0), dq.stride(0), k.stride(1), dq.stride(1), S, spans.max_len, 1.0 / n, S // block, H,
        HAS_POSITION=d_position is not None, HAS_TIME=d_time is not None, G=G, BLOCK_K=partial.block_k,
        RUNS=attention_runs.RUNS, **constants | {"num_stages": 1 if ds.dtype == torch.float32 else 2},
    )  # fmt: skip
    partial.sum_into(d_position, d_time, spans.max_len, scale=1.0)
