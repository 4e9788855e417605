# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The sum of a matrix over its rows, in two launches and a fixed order.

Names of the kernel arguments: p_x a matrix [T, N] with rows s_x elements apart, p_partial float32 [parts, N]; SIZE rows
make a part.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Partial rows, at most. Fixed, so that sums do not depend on the GPU. Both launches are short chains of loads: each
# program of the second has all partial rows of a few columns at once. Not tuned beyond that.
ROWS, COLUMNS = 512, 8


@triton.jit
def _partial_kernel(p_x, p_partial, T, N, s_x, SIZE, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (parts, blocks of columns): the sum of one part's rows."""
    i_part, o_n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_sum = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for i_t in range(i_part * SIZE, tl.minimum((i_part + 1) * SIZE, T), BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        m = (o_t < tl.minimum((i_part + 1) * SIZE, T))[:, None] & m_n[None, :]
        b_sum += tl.load(p_x + o_t.to(tl.int64)[:, None] * s_x + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(p_partial + i_part * N + o_n, tl.sum(b_sum, axis=0), mask=m_n)


def sum_rows(x_TN: Tensor) -> Tensor:
    """The sum over T of a matrix [T, N], float32 [N]."""
    x_TN = x_TN if x_TN.stride(-1) == 1 else x_TN.contiguous()
    T, N = x_TN.shape
    if T == 0:
        return torch.zeros(N, device=x_TN.device)
    block_n = min(128, triton.next_power_of_2(N))
    size = max(16, triton.cdiv(T, ROWS))
    parts = triton.cdiv(T, size)
    partial = torch.empty((parts, N), device=x_TN.device)
    _partial_kernel[(parts, triton.cdiv(N, block_n))](
        p_x=x_TN, p_partial=partial, T=T, N=N, s_x=x_TN.stride(0), SIZE=size, BLOCK_T=32, BLOCK_N=block_n, num_warps=4
    )
    out = torch.empty((1, N), device=x_TN.device)
    _partial_kernel[(1, triton.cdiv(N, COLUMNS))](
        p_x=partial, p_partial=out, T=parts, N=N, s_x=N, SIZE=parts, BLOCK_T=ROWS, BLOCK_N=COLUMNS, num_warps=8
    )
    return out[0]
