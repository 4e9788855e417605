# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Planes in registers: their angles, loading and storing them, and the sums of frequency gradients. The rotary,
silu_rotate, split_rotate and readout kernels share these device functions.

Names: p_coords coordinates [C, T], p_freqs turns per unit [C, P], p_betas [P]; p_slopes and p_deltas [P], constants and
learned coefficients of frequencies freqs + slopes * deltas; o_t and m_t are tokens and which exist, o_p and m_p planes
and which exist.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, H heads, D head dim, P planes, C coordinates.
"""

import triton
import triton.language as tl

# Partial rows of the frequency gradient per side, at most. Fixed, so that sums do not depend on the GPU; about four
# programs for each of an H200's 132 multiprocessors. Not tuned.
ROWS = 512
# Tile of the sums over partial rows. Not tuned: a launch takes longer than its sums.
SUM_TILE = {"BLOCK_R": 512, "BLOCK_N": 4, "num_warps": 4}


@triton.jit
def cos_sin_quarters(b_quarters):
    """cos and sin of x quarter turns, float64 in and float32 out, to 1e-7: whole quarters off, then polynomials.

    Added to 1.5 * 2^52 a number is rounded to a whole one, whose last bits are the sum's last bits: no floor and no
    conversion, which GPUs do at an eighth of their speed. libdevice's cosf and sinf carry a slow path for huge
    arguments, which reduced ones never take but registers pay for; this also runs in the interpreter.
    """
    b_sum = b_quarters + 6755399441055744.0
    b_x = (b_quarters - (b_sum - 6755399441055744.0)).to(tl.float32)
    # Past 2^51 quarters, where phases mean nothing, still a rotation; but a frequency that is not a number shows.
    b_x = tl.clamp(b_x, -0.5, 0.5, propagate_nan=tl.PropagateNan.ALL)
    b_z = b_x * b_x
    b_s = b_x * (1.57079630509 + b_z * (-0.645962938167 + b_z * (0.0796759029699 + b_z * -0.00459228907545)))
    b_c = 1.0 + b_z * (-1.23370054065 + b_z * (0.253669203939 + b_z * (-0.0208600713199 + b_z * 0.000903631705343)))
    b_n = b_sum.to(tl.int64, bitcast=True).to(tl.int32)
    m_odd = (b_n & 1) != 0
    b_cos = tl.where(m_odd, b_s, b_c)
    b_sin = tl.where(m_odd, b_c, b_s)
    b_cos = tl.where(((b_n + 1) & 2) != 0, -b_cos, b_cos)
    b_sin = tl.where((b_n & 2) != 0, -b_sin, b_sin)
    return b_cos, b_sin


@triton.jit
def cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, m_p, T, P, C: tl.constexpr, PAPER_FP32: tl.constexpr):
    """cos and sin [tokens, planes] of the phases; float64 until the whole turns are dropped."""
    if PAPER_FP32:
        b_alpha = tl.load(p_freqs + o_p, mask=m_p, other=0.0)
        b_beta = tl.load(p_betas + o_p, mask=m_p, other=1.0)
        b_t = tl.load(p_coords + o_t, mask=m_t, other=0).to(tl.float32)
        # The paper's rounding happens here; what follows only evaluates cos and sin of that float32 angle faithfully.
        b_angle = tl.div_rn(
            b_alpha[None, :] * b_t[:, None], tl.broadcast_to(b_beta[None, :], (o_t.shape[0], o_p.shape[0]))
        )
        b_quarters = b_angle.to(tl.float64) * 0.6366197723675814
    else:
        b_quarters = tl.zeros((o_t.shape[0], o_p.shape[0]), dtype=tl.float64)
        for i_c in tl.static_range(C):
            b_f = 4.0 * tl.load(p_freqs + i_c * P + o_p, mask=m_p, other=0.0)
            b_t = tl.load(p_coords + i_c * T + o_t, mask=m_t, other=0).to(tl.float64)
            b_quarters += b_t[:, None] * b_f[None, :]
    return cos_sin_quarters(b_quarters)


@triton.jit
def frequencies(p_freqs, p_slopes, p_deltas, o_p, m_p, LINEAR: tl.constexpr):
    """Turns per unit of each plane, float64; if LINEAR, formed from the coefficients."""
    b_f = tl.load(p_freqs + o_p, mask=m_p, other=0.0)
    if LINEAR:
        b_delta = tl.load(p_deltas + o_p, mask=m_p, other=0.0).to(tl.float64)
        b_f += tl.load(p_slopes + o_p, mask=m_p, other=0.0) * b_delta
    return b_f


@triton.jit
def offsets(o_row, s_h, i_g, H: tl.constexpr, GROUP: tl.constexpr):
    """Where each head of a group begins, in elements, [tokens, group, 1], and which heads exist."""
    o_h = i_g * GROUP + tl.arange(0, GROUP)
    return (o_row[:, None] + o_h[None, :] * s_h)[:, :, None], (o_h < H)[None, :, None]


@triton.jit
def load_pair(p_x, o_x, m_x, o_p, P, INTERLEAVED: tl.constexpr):
    """The two components of each plane [tokens, group, planes]. Interleaved ones are loaded together, then split."""
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * o_p.shape[0])[None, None, :]
        b_x = tl.load(p_x + o_x + o_d, mask=m_x & (o_d < 2 * P), other=0.0)
        b_0, b_1 = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1], o_p.shape[0], 2)))
    else:
        p_0, m = p_x + o_x + o_p[None, None, :], m_x & (o_p < P)[None, None, :]
        b_0, b_1 = tl.load(p_0, mask=m, other=0.0), tl.load(p_0 + P, mask=m, other=0.0)
    return b_0, b_1


@triton.jit
def store_pair(p_y, b_0, b_1, o_y, m_y, o_p, P, INTERLEAVED: tl.constexpr):
    b_0, b_1 = b_0.to(p_y.dtype.element_ty), b_1.to(p_y.dtype.element_ty)
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * o_p.shape[0])[None, None, :]
        b_y = tl.reshape(tl.join(b_0, b_1), (b_0.shape[0], b_0.shape[1], 2 * o_p.shape[0]))
        tl.store(p_y + o_y + o_d, b_y, mask=m_y & (o_d < 2 * P))
    else:
        p_0, m = p_y + o_y + o_p[None, None, :], m_y & (o_p < P)[None, None, :]
        tl.store(p_0, b_0, mask=m)
        tl.store(p_0 + P, b_1, mask=m)


@triton.jit
def store_frequency_row(p_row, b_df, p_betas, o_p, P, PAPER_FP32: tl.constexpr):
    """Sum over tokens and heads; dPhi / dfreq is 2 pi t for turns and t / beta for the paper's phases."""
    b_row = tl.sum(tl.reshape(b_df, (b_df.shape[0] * b_df.shape[1], b_df.shape[2])), axis=0)
    if PAPER_FP32:
        b_row = b_row / tl.load(p_betas + o_p, mask=o_p < P, other=1.0).to(tl.float64)
    else:
        b_row = b_row * 6.283185307179586
    tl.store(p_row + o_p, b_row, mask=o_p < P)


@triton.jit
def _sum_rows(p_rows, i_side, o_n, m_n, R, N, BLOCK_R: tl.constexpr):
    """The sum over R of one side of float64 rows [side, R, N], in a fixed order."""
    p_side = p_rows + i_side * R * N
    b_sum = tl.zeros((BLOCK_R, o_n.shape[0]), dtype=tl.float64)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_side + o_r[:, None] * N + o_n[None, :], mask=(o_r < R)[:, None] & m_n[None, :], other=0.0)
    return tl.sum(b_sum, axis=0)


@triton.jit
def sum_rows_kernel(p_rows, p_sum, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid (blocks of columns, sides): the gradient of frequencies [side, N] from its partial rows [side, R, N]."""
    i_side = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = _sum_rows(p_rows, i_side, o_n, o_n < N, R, N, BLOCK_R)
    tl.store(p_sum + i_side * N + o_n, b_sum.to(p_sum.dtype.element_ty), mask=o_n < N)


@triton.jit
def sum_coefficients_kernel(p_rows, p_slopes_q, p_slopes_k, p_sum, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same for coefficients: a frequency's gradient times the slope of its side, q or k. A single side is q."""
    i_side = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_sum = _sum_rows(p_rows, i_side, o_n, m_n, R, N, BLOCK_R)
    if i_side == 0:
        b_slope = tl.load(p_slopes_q + o_n, mask=m_n, other=0.0)
    else:
        b_slope = tl.load(p_slopes_k + o_n, mask=m_n, other=0.0)
    tl.store(p_sum + i_side * N + o_n, (b_sum * b_slope).to(p_sum.dtype.element_ty), mask=m_n)
