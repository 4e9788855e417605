"""Dropout masks from (seed, stream, row, column) in plain PyTorch: bit for bit what the kernels draw in registers.

A mask is a function, not a state: Philox4x32-10 (Salmon et al., 2011) of a counter, so the backward of a kernel draws
the same mask again instead of reading it, and the CPU path drops what the GPU drops. The counter is (column // 8, row,
stream, 1), the key is the seed; the 128 bits of one call serve 8 columns, 16 bits each, so a rate is met to 2^-16. The
last word is 0 in Triton's own tl.rand and tl.randint, so these may be used with the same seed.

Shape letters: T rows, F columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """16-bit numbers below this one drop."""
    assert 0 <= p < 1, "a dropout rate is at least 0 and below 1"
    return round(p * 65536)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words, carried in int64, of a counter of four words and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, which leaves the bits of an unsigned product
        c0, c1, c2, c3 = ((b >> 32) & LOW) ^ c1 ^ k0, b & LOW, ((a >> 32) & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, stream: int, shape: tuple[int, int], p: float) -> Tensor:
    """Which elements dropout keeps, bool [T, F].

    Args:
        seed: int64 [1], on the device the mask is wanted on.
        stream: tells masks of one seed apart: one number per place in the model.
        p: the rate of dropping.
    """
    rows, columns = shape
    row_T = torch.arange(rows, device=seed.device)[:, None]
    group_G = torch.arange((columns + 7) // 8, device=seed.device)[None, :]
    zero = torch.zeros_like(row_T * group_G)
    words = torch.stack(philox((zero + group_G, zero + row_T, zero + stream, zero + 1), seed), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.flatten(1)[:, :columns] >= threshold(p)
