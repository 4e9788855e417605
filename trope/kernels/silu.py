# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""SiLU and its slope in registers, for the kernels that compute it on the way.

Half of the instructions of tl.sigmoid, which count in kernels that else only move memory: exp2 takes no care of
subnormals, and the reciprocal of 1 + exp(-x), as the square of rsqrt, none of that sum's range. To 3e-7 of the result.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
"""

import triton
import triton.language as tl


@triton.jit
def silu(b_x):
    b_x = b_x.to(tl.float32)
    b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -1.4426950408889634))
    return b_x * (b_root * b_root)


@triton.jit
def silu_and_slope(b_x):
    b_x = b_x.to(tl.float32)
    b_e = tl.exp2(tl.minimum(b_x * -1.4426950408889634, 126.0))  # finite, because it meets a zero below
    b_root = tl.rsqrt(1.0 + b_e)
    b_s = b_root * b_root
    b_y = b_x * b_s
    return b_y, b_s + b_y * (b_e * b_s)  # 1 - s is e s, without cancellation
