# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Dropout masks drawn in registers, by the definition in random/reference.py.

Notable: one Philox call gives 8 neighbouring columns, 16 bits each: a call per element, as tl.rand does it, would cost
more than the memory traffic of the kernels it serves. The 8 end up in the thread that loads these columns.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.random.reference import threshold


@triton.jit
def keep(p_seed, i_stream, o_row, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of rows `o_row` dropout keeps, [rows, BLOCK]; BLOCK columns from 0 on, at least 8."""
    b_zero = tl.zeros((o_row.shape[0], BLOCK // 8), dtype=tl.int32)
    b_group = b_zero + tl.arange(0, BLOCK // 8)[None, :]
    b_0, b_1, b_2, b_3 = tl.philox(
        tl.load(p_seed), b_group, b_zero + o_row.to(tl.int32)[:, None], b_zero + i_stream, b_zero + 1
    )
    b_words = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))  # the last axis runs fastest: words 0, 1, 2, 3
    b_halves = tl.join(b_words & 0xFFFF, b_words >> 16)
    return tl.reshape(b_halves, (o_row.shape[0], BLOCK)).to(tl.int32) >= THRESHOLD


@triton.jit
def dropped(b_x, p_seed, i_stream, o_row, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """Inverted dropout of a block of rows: what is kept grows by SCALE = 1 / (1 - p). Without a rate, the block."""
    if THRESHOLD:
        b_x = tl.where(keep(p_seed, i_stream, o_row, THRESHOLD, b_x.shape[1]), b_x * SCALE, 0.0)
    return b_x


@triton.jit(do_not_specialize=["i_stream"])
def _keep_mask_kernel(
    p_mask, p_seed, i_stream, T, F, THRESHOLD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (blocks of rows,): p_mask int8 [T, F], from p_seed int64 [1] and the number of the stream."""
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_f = tl.arange(0, BLOCK)
    m_keep = keep(p_seed, i_stream, o_row, THRESHOLD, BLOCK)
    o_mask = o_row.to(tl.int64)[:, None] * F + o_f[None, :]
    tl.store(p_mask + o_mask, m_keep.to(tl.int8), mask=(o_row < T)[:, None] & (o_f < F)[None, :])


def keep_mask(seed: Tensor, stream: int, shape: tuple[int, int], p: float) -> Tensor:
    """The mask that the kernels draw, as a tensor: bool [T, F]. For tests."""
    mask = torch.empty(shape, dtype=torch.int8, device=seed.device)
    block = max(8, triton.next_power_of_2(shape[1]))
    _keep_mask_kernel[(triton.cdiv(shape[0], 8),)](
        p_mask=mask,
        p_seed=seed,
        i_stream=stream,
        T=shape[0],
        F=shape[1],
        THRESHOLD=threshold(p),
        BLOCK_R=8,
        BLOCK=block,
        num_warps=4,
    )
    return mask.bool()


def dropout_arguments(dropout: float, seed: Tensor | None, fallback: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The seed for a kernel's p_seed, and the constants THRESHOLD and SCALE.

    Without dropout, THRESHOLD is 0 and the kernel never reads the seed; `fallback` is any tensor of the device.
    """
    if seed is None or dropout == 0:
        return fallback, {"THRESHOLD": 0, "SCALE": 1.0}
    assert seed.dtype == torch.int64, "a seed is an int64 tensor on the device"
    return seed, {"THRESHOLD": threshold(dropout), "SCALE": 1 / (1 - dropout)}
