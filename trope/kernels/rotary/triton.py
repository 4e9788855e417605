"""The fused rotary kernels: times -> phases -> cos, sin -> rotated q and k in one pass, and the backward of Algorithm 3
with the gradient of the frequencies reduced inside the kernel.

Notable: one launch turns q and k, whose directions are signs of their frequencies; cos and sin are formed in
registers and serve a group of heads; the backward needs neither the angles nor the rotated output from memory; each
program writes one partial row of the frequency gradient and the rows are summed in a fixed order, so gradients are
deterministic; inputs may be strided views (the q and k slices of a joint projection, the transposed gradients of
attention).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B batch, L positions, T tokens (B * L), H heads, D head dim, P planes, C coordinates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 512  # partial rows of the frequency gradient per side, at most; fixed, so that sums do not depend on the GPU


@triton.jit
def _cos_sin_quarters(b_quarters):
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
def _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, m_p, T, P, C: tl.constexpr, PAPER_FP32: tl.constexpr):
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
    return _cos_sin_quarters(b_quarters)


@triton.jit
def _offsets(o_row, s_h, i_g, H: tl.constexpr, GROUP: tl.constexpr):
    """Where each head of a group begins, in elements, [tokens, group, 1], and which heads exist."""
    o_h = i_g * GROUP + tl.arange(0, GROUP)
    return (o_row[:, None] + o_h[None, :] * s_h)[:, :, None], (o_h < H)[None, :, None]


@triton.jit
def _load_pair(p_x, o_x, m_x, o_p, P, INTERLEAVED: tl.constexpr):
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
def _store_pair(p_y, b_0, b_1, o_y, m_y, o_p, P, INTERLEAVED: tl.constexpr):
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
def _copy_rest(p_x, p_y, o_x, o_y, m_x, P, D, BLOCK_REST: tl.constexpr):
    """Dims past the rotary ones pass through untouched."""
    o_d = 2 * P + tl.arange(0, BLOCK_REST)[None, None, :]
    m = m_x & (o_d < D)
    tl.store(p_y + o_y + o_d, tl.load(p_x + o_x + o_d, mask=m), mask=m)


@triton.jit
def _row(o_t, L, s_b, s_l):
    """Where each token's heads begin, in elements."""
    return (o_t // L).to(tl.int64) * s_b + (o_t % L).to(tl.int64) * s_l


@triton.jit
def _forward_side(
    p_x, p_y, p_coords, p_freqs, p_betas, T, L, D, P, s_b, s_l, s_h,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_p = tl.arange(0, BLOCK_P)
    m_t = o_t < T
    o_row_x, o_row_y = _row(o_t, L, s_b, s_l), o_t.to(tl.int64) * H * D
    # A group of heads is always loaded before the group ahead of it is stored (the first before the angles are
    # computed): the compiler cannot move a load over a store, so the kernel says so.
    o_x, m_h = _offsets(o_row_x, s_h, 0, H, GROUP)
    b_next0, b_next1 = _load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
    b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, o_p < P, T, P, C, PAPER_FP32)
    b_cos, b_sin = b_cos[:, None, :], b_sin[:, None, :]  # the same angle for every head
    for i_g in tl.static_range((H + GROUP - 1) // GROUP):
        o_x, m_h = _offsets(o_row_x, s_h, i_g, H, GROUP)
        o_y, _ = _offsets(o_row_y, D, i_g, H, GROUP)
        m = m_t[:, None, None] & m_h
        b_0, b_1 = b_next0.to(tl.float32), b_next1.to(tl.float32)
        if (i_g + 1) * GROUP < H:
            o_next, m_h = _offsets(o_row_x, s_h, i_g + 1, H, GROUP)
            b_next0, b_next1 = _load_pair(p_x, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        _store_pair(p_y, b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos, o_y, m, o_p, P, INTERLEAVED)
        if BLOCK_REST:
            _copy_rest(p_x, p_y, o_x, o_y, m, P, D, BLOCK_REST)


@triton.jit
def _backward_side(
    p_x, p_g, p_dx, p_partial, p_coords, p_freqs, p_betas, T, L, D, P, TILES, s_b, s_l, s_h, s_gb, s_gl, s_gh,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    o_p = tl.arange(0, BLOCK_P)
    # Sums of dPhi * coordinate, kept apart per token, head and plane until the end: no exchange between threads before.
    b_df0 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    b_df1 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (tl.program_id(0) * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        o_row_x, o_row_g, o_row_dx = _row(o_t, L, s_b, s_l), _row(o_t, L, s_gb, s_gl), o_t.to(tl.int64) * H * D
        o_x, m_h = _offsets(o_row_x, s_h, 0, H, GROUP)
        o_g, _ = _offsets(o_row_g, s_gh, 0, H, GROUP)
        b_next_x0, b_next_x1 = _load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_next_g0, b_next_g1 = _load_pair(p_g, o_g, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, o_p < P, T, P, C, PAPER_FP32)
        b_cos, b_sin = b_cos[:, None, :], b_sin[:, None, :]
        b_dphi = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float32)
        for i_g in tl.static_range((H + GROUP - 1) // GROUP):
            o_g, m_h = _offsets(o_row_g, s_gh, i_g, H, GROUP)
            o_dx, _ = _offsets(o_row_dx, D, i_g, H, GROUP)
            m = m_t[:, None, None] & m_h
            b_x0, b_x1 = b_next_x0.to(tl.float32), b_next_x1.to(tl.float32)
            b_g0, b_g1 = b_next_g0.to(tl.float32), b_next_g1.to(tl.float32)
            if (i_g + 1) * GROUP < H:
                o_x, m_h = _offsets(o_row_x, s_h, i_g + 1, H, GROUP)
                o_next, _ = _offsets(o_row_g, s_gh, i_g + 1, H, GROUP)
                b_next_x0, b_next_x1 = _load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
                b_next_g0, b_next_g1 = _load_pair(p_g, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
            b_dx0, b_dx1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
            # Algorithm 3's dPhi is the cross product y x g; turning both back by the same angle makes it x x dx.
            b_dphi += b_x0 * b_dx1 - b_x1 * b_dx0
            _store_pair(p_dx, b_dx0, b_dx1, o_dx, m, o_p, P, INTERLEAVED)
            if BLOCK_REST:
                _copy_rest(p_g, p_dx, o_g, o_dx, m, P, D, BLOCK_REST)
        b_dphi64 = b_dphi.to(tl.float64)
        b_df0 += b_dphi64 * tl.load(p_coords + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
        if C == 2:
            b_df1 += b_dphi64 * tl.load(p_coords + T + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
    p_row = p_partial + tl.program_id(0) * C * P
    _store_frequency_row(p_row, b_df0, p_betas, o_p, P, PAPER_FP32)
    if C == 2:
        _store_frequency_row(p_row + P, b_df1, p_betas, o_p, P, PAPER_FP32)


@triton.jit
def _store_frequency_row(p_row, b_df, p_betas, o_p, P, PAPER_FP32: tl.constexpr):
    """Sum over tokens and heads; dPhi / dfreq is 2 pi t for turns and t / beta for the paper's phases."""
    b_row = tl.sum(tl.reshape(b_df, (b_df.shape[0] * b_df.shape[1], b_df.shape[2])), axis=0)
    if PAPER_FP32:
        b_row = b_row / tl.load(p_betas + o_p, mask=o_p < P, other=1.0).to(tl.float64)
    else:
        b_row = b_row * 6.283185307179586
    tl.store(p_row + o_p, b_row, mask=o_p < P)


@triton.jit
def _forward_kernel(
    p_q, p_k, p_yq, p_yk, p_cq, p_ck, p_fq, p_fk, p_betas, T, L, D, P, s_qb, s_ql, s_qh, s_kb, s_kl, s_kh,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _forward_side(p_q, p_yq, p_cq, p_fq, p_betas, T, L, D, P, s_qb, s_ql, s_qh,
                      HQ, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
    else:
        _forward_side(p_k, p_yk, p_ck, p_fk, p_betas, T, L, D, P, s_kb, s_kl, s_kh,
                      HK, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip


@triton.jit
def _backward_kernel(
    p_q, p_k, p_gq, p_gk, p_dq, p_dk, p_partial, p_cq, p_ck, p_fq, p_fk, p_betas, T, L, D, P, TILES,
    s_qb, s_ql, s_qh, s_kb, s_kl, s_kh, s_gqb, s_gql, s_gqh, s_gkb, s_gkl, s_gkh,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _backward_side(p_q, p_gq, p_dq, p_partial, p_cq, p_fq, p_betas, T, L, D, P, TILES,
                       s_qb, s_ql, s_qh, s_gqb, s_gql, s_gqh,
                       HQ, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip
    else:
        p_partial_k = p_partial + tl.num_programs(0) * C * P
        _backward_side(p_k, p_gk, p_dk, p_partial_k, p_ck, p_fk, p_betas, T, L, D, P, TILES,
                       s_kb, s_kl, s_kh, s_gkb, s_gkl, s_gkh,
                       HK, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST, GROUP)  # fmt: skip


@triton.jit
def _sum_rows_kernel(p_rows, p_sum, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum float64 rows [side, R, N] to [side, N] in a fixed order, a few columns a program."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_side = p_rows + tl.program_id(1) * R * N
    b_sum = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float64)
    for i_r in range(0, R, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_side + o_r[:, None] * N + o_n[None, :], mask=(o_r < R)[:, None] & m_n[None, :], other=0.0)
    b_out = tl.sum(b_sum, axis=0).to(p_sum.dtype.element_ty)
    tl.store(p_sum + tl.program_id(1) * N + o_n, b_out, mask=m_n)


def _tile(planes: int, rest: int, heads: int) -> dict[str, int]:
    """Block sizes, from measurements on an H200: 64 planes in a row (256 bytes in bf16), of several heads where heads
    are small, by 8 tokens; two warps, so that a thread moves 16 bytes at a time and many programs share an SM."""
    block_p = triton.next_power_of_2(planes)
    group = min(max(1, 64 // block_p), triton.next_power_of_2(heads))
    return {
        "BLOCK_T": max(1, min(128, 512 // (block_p * group))),
        "BLOCK_P": block_p,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "GROUP": group,
        "num_warps": 2,
    }


def _check(q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor) -> None:
    """What the kernels take for granted; rotary.py has already told users about their side of it."""
    assert q.stride(-1) == 1 and k.stride(-1) == 1, "planes must be contiguous"
    assert coords_q.is_contiguous() and coords_k.is_contiguous() and freqs_q.is_contiguous() and freqs_k.is_contiguous()
    assert coords_q.shape == coords_k.shape and freqs_q.shape == freqs_k.shape


def forward(
    q_BLHD: Tensor, k_BLHD: Tensor, coords_q_CBL: Tensor, coords_k_CBL: Tensor, freqs_q_CP: Tensor, freqs_k_CP: Tensor,
    betas_P: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotated q and k, contiguous."""
    _check(q_BLHD, k_BLHD, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP)
    B, L, _, D = q_BLHD.shape
    C, P = freqs_q_CP.shape
    y_q = torch.empty(q_BLHD.shape, dtype=q_BLHD.dtype, device=q_BLHD.device)
    y_k = torch.empty(k_BLHD.shape, dtype=k_BLHD.dtype, device=k_BLHD.device)
    tile = _tile(P, D - 2 * P, q_BLHD.shape[2])
    if B * L:
        torch.library.wrap_triton(_forward_kernel)[(triton.cdiv(B * L, tile["BLOCK_T"]), 2)](
            q_BLHD, k_BLHD, y_q, y_k, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP,
            freqs_q_CP if betas_P is None else betas_P, B * L, L, D, P,
            *q_BLHD.stride()[:3], *k_BLHD.stride()[:3],
            HQ=q_BLHD.shape[2], HK=k_BLHD.shape[2], C=C, PAPER_FP32=betas_P is not None, INTERLEAVED=interleaved,
            **tile,
        )  # fmt: skip
    return y_q, y_k


def backward(
    g_q_BLHD: Tensor, g_k_BLHD: Tensor,
    q_BLHD: Tensor, k_BLHD: Tensor, coords_q_CBL: Tensor, coords_k_CBL: Tensor, freqs_q_CP: Tensor, freqs_k_CP: Tensor,
    betas_P: Tensor | None, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Algorithm 3: dq, dk, and the gradients of both frequency tensors, [2, C, P] in their dtype."""
    _check(q_BLHD, k_BLHD, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP)
    B, L, _, D = q_BLHD.shape
    C, P = freqs_q_CP.shape
    dq = torch.empty(q_BLHD.shape, dtype=q_BLHD.dtype, device=q_BLHD.device)
    dk = torch.empty(k_BLHD.shape, dtype=k_BLHD.dtype, device=k_BLHD.device)
    tile = _tile(P, D - 2 * P, q_BLHD.shape[2])
    tiles = triton.cdiv(triton.cdiv(B * L, tile["BLOCK_T"]), ROWS)
    blocks = triton.cdiv(B * L, tiles * tile["BLOCK_T"]) if B * L else 0
    partial = torch.empty((2, blocks, C, P), dtype=torch.float64, device=q_BLHD.device)
    if B * L:
        torch.library.wrap_triton(_backward_kernel)[(blocks, 2)](
            q_BLHD, k_BLHD, g_q_BLHD, g_k_BLHD, dq, dk, partial, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP,
            freqs_q_CP if betas_P is None else betas_P, B * L, L, D, P, tiles,
            *q_BLHD.stride()[:3], *k_BLHD.stride()[:3], *g_q_BLHD.stride()[:3], *g_k_BLHD.stride()[:3],
            HQ=q_BLHD.shape[2], HK=k_BLHD.shape[2], C=C, PAPER_FP32=betas_P is not None, INTERLEAVED=interleaved,
            **tile,
        )  # fmt: skip
    # The second stage of the reduction, in a fixed order and the frequencies' dtype.
    dfreqs = torch.empty((2, C, P), dtype=freqs_q_CP.dtype, device=q_BLHD.device)
    torch.library.wrap_triton(_sum_rows_kernel)[(triton.cdiv(C * P, 4), 2)](
        partial, dfreqs, blocks, C * P, BLOCK_R=512, BLOCK_N=4, num_warps=4
    )
    return dq, dk, dfreqs
