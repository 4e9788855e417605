"""What the kept gradient of the scores gives: dq, and its sum over the heads for the bias weights.

Both read every kept tile, at the speed of memory. Where all heads of a tile of queries fit the registers, one kernel
reads each tile once and gives both. Else there are two kernels, here and in attention/bias_gradient.py.

Arguments that attention/arguments.py does not explain:

- p_ds: the gradient of the scores that the key kernel kept, [B, H, S keys, S queries], without the factor 1 / n.
- p_dq: [T, H, D] with strides s_dq_t and s_dq_h.
- p_strips, first, UNITS, TILES: as in attention/bias_gradient.py; there is one group of heads.
- H: heads. BLOCK: queries of a tile. BLOCK_N: keys of a step, which divide BLOCK.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, S = row_stride(L), T tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.attention.arguments import bounds_pointers, programs_of, strides, tile
from trope.kernels.attention.tiles import dot, load_tile, store_tile, unit_of, with_one, zeros
from trope.kernels.limits import HOPPER
from trope.kernels.sequence_bounds import SequenceBounds

# Numbers of a token in all heads, and heads, that one program takes: dq of a tile of 64 queries is then 64 registers of
# a thread. More heads would need more shared memory, however narrow they are.
WIDEST, MOST_HEADS = 256, 8
# The fastest of eleven on an H200 (results/attention-h200.txt).
LAUNCH = {"BLOCK_N": 16, "num_warps": 4, "num_stages": 4}


@triton.jit
def _query_from_kept_kernel(
    p_ds, p_k, p_dq, p_starts, p_lengths, s_k_t, s_dq_t, s_k_h, s_dq_h, s_row, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, H, B): dq of one tile, from the gradient of the scores that the key kernel kept."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    b_dq = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    p_tiles = p_ds + (i_b.to(tl.int64) * tl.num_programs(1) + i_h) * s_row * s_row
    for i_n in range(i_m + 1):
        o_n = i_n * BLOCK + tl.arange(0, BLOCK)
        b_ds = tl.load(p_tiles + o_n[:, None] * s_row + o_m[None, :])
        b_k = load_tile(p_k + i_h * s_k_h, start + o_n, o_n < length, s_k_t, D, BLOCK_D)
        b_dq += dot(tl.trans(b_ds), b_k, FAST, "ieee")
    store_tile(p_dq + i_h * s_dq_h, b_dq * scale, start + o_m, o_m < length, s_dq_t, D, BLOCK_D)


@triton.jit
def _query_and_sum_kernel(
    p_ds, p_k, p_dq, p_strips, p_starts, p_lengths, s_k_t, s_dq_t, s_k_h, s_dq_h, s_row, scale, first, UNITS, TILES,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (programs_of(first, UNITS, TILES),): dq of one tile of all heads, and its strip: the sum over the heads."""
    i_unit, i_b, i_m = unit_of(tl.program_id(0), first, UNITS, TILES)
    if (i_unit < 0) | (i_unit >= UNITS):
        return
    start, length = tl.load(p_starts + i_b).to(tl.int64), tl.load(p_lengths + i_b).to(tl.int32)
    if i_m * BLOCK >= length:
        return
    o_row, o_step = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK + o_row
    b_dq = zeros(H, BLOCK, BLOCK_D)
    p_tiles = p_ds + i_b.to(tl.int64) * H * s_row * s_row
    p_strip = p_strips + i_unit.to(tl.int64) * BLOCK * s_row
    for i_n in range(0, (i_m + 1) * BLOCK, BLOCK_N):
        o_n = i_n + o_step
        p_tile = p_tiles + o_n[:, None] * s_row + o_m[None, :]
        b_next, b_sum = (), tl.zeros((BLOCK_N, BLOCK), dtype=tl.float32)
        for i in tl.static_range(H):
            b_ds = tl.load(p_tile + i * s_row * s_row)
            b_k = load_tile(p_k + i * s_k_h, start + o_n, o_n < length, s_k_t, D, BLOCK_D)
            b_sum += b_ds.to(tl.float32)
            b_next = with_one(b_next, b_dq[i] + dot(tl.trans(b_ds), b_k, FAST, "ieee"))
        b_dq = b_next
        tl.store(p_strip + o_row[:, None] * s_row + o_n[None, :], tl.trans(b_sum))
    for i in tl.static_range(H):
        store_tile(p_dq + i * s_dq_h, b_dq[i] * scale, start + o_m, o_m < length, s_dq_t, D, BLOCK_D)


def is_joint(q: Tensor, tiles: int, shared: int) -> bool:
    """Whether one program takes all heads of a tile of queries.

    tiles: of a sequence; those of one tile would give too few programs. shared: bytes of shared memory of a program.
    """
    heads, width = q.shape[1], max(16, triton.next_power_of_2(q.shape[2]))
    fits = q.element_size() == 2 and heads <= MOST_HEADS and heads * width <= WIDEST and shared >= HOPPER
    return fits and tiles > 1


def query_from_kept(ds: Tensor, k: Tensor, dq: Tensor, bounds: SequenceBounds, n: int) -> None:
    """Fill dq, head by head."""
    (B, H, S, _), constants = ds.shape, tile(k, bounds) | {"num_stages": 3}  # not tuned
    _query_from_kept_kernel[(S // constants["BLOCK"], H, B)](
        p_ds=ds,
        p_k=k,
        p_dq=dq,
        **bounds_pointers(bounds),
        **strides(k=k, dq=dq),
        s_row=S,
        scale=1.0 / n,
        **constants,
    )


def query_and_sum(
    ds: Tensor, k: Tensor, dq: Tensor, bounds: SequenceBounds, n: int
) -> Callable[[Tensor, int, int, int], None]:
    """What `bias_gradient.sum_strips` has its strips filled by; it fills dq too."""
    arguments: dict[str, Any] = {
        "p_ds": ds,
        "p_k": k,
        "p_dq": dq,
        **bounds_pointers(bounds),
        **strides(k=k, dq=dq),
        "s_row": ds.shape[-1],
        "scale": 1.0 / n,
        "H": ds.shape[1],
        **tile(k, bounds),
        **LAUNCH,
    }
    arguments["BLOCK_N"] = min(arguments["BLOCK_N"], arguments["BLOCK"])

    def fill(strips: Tensor, first: int, units: int, tiles: int) -> None:
        programs = programs_of(first, units, tiles)
        _query_and_sum_kernel[(programs,)](p_strips=strips, first=first, UNITS=units, TILES=tiles, **arguments)

    return fill
