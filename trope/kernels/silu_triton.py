# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""SiLU and its slope in registers, for the kernels that compute it on the way.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
"""

import triton
import triton.language as tl


@triton.jit
def silu(b_x):
    b_x = b_x.to(tl.float32)
    return b_x * tl.sigmoid(b_x)


@triton.jit
def silu_and_slope(b_x):
    b_x = b_x.to(tl.float32)
    b_s = tl.sigmoid(b_x)
    b_y = b_x * b_s
    return b_y, b_s + b_y * (1.0 - b_s)
