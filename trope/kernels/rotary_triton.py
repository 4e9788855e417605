"""The fused rotary kernels: times -> phases -> cos, sin -> rotated q and k in one pass, and the backward of Algorithm 3
with the gradient of the frequencies reduced inside the kernel.

Notable: cos and sin are formed once per (token, plane) in registers and serve all heads; one kernel body serves
both directions; the backward needs neither the angles nor the rotated output from memory; each program writes one
partial row of the frequency gradient and the rows are summed in a fixed order, so gradients are deterministic; inputs
may be strided views (the q and k slices of a joint projection, or the transposed gradients of attention).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B batch, L positions, T tokens (B * L), H heads, D head dim, P planes, C coordinates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TWO_PI = 6.283185307179586


@triton.jit
def _cos_sin_turns(b_turns):
    """cos and sin of 2 pi x for x in [-1/2, 1/2], float32, to 1e-7: quarter turns off, then Chebyshev polynomials.

    libdevice's cosf and sinf carry a slow path for huge arguments, which reduced turns never take but registers pay
    for; this also runs in the interpreter.
    """
    b_quarter = tl.floor(b_turns * 4.0 + 0.5)
    b_x = b_turns - b_quarter * 0.25  # exact, in [-1/8, 1/8]
    b_z = b_x * b_x
    b_s = b_x * (6.28318528781 + b_z * (-41.3416625705 + b_z * (81.5925428713 + b_z * -75.4016127027)))
    b_c = 1.0 + b_z * (-19.7392086501 + b_z * (64.9393161357 + b_z * (-85.4428446731 + b_z * 59.2201689583)))
    b_n = b_quarter.to(tl.int32)
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
        b_turns = b_angle.to(tl.float64) * 0.15915494309189535
    else:
        b_turns = tl.zeros((o_t.shape[0], o_p.shape[0]), dtype=tl.float64)
        for i_c in tl.static_range(C):
            b_f = tl.load(p_freqs + i_c * P + o_p, mask=m_p, other=0.0)
            b_t = tl.load(p_coords + i_c * T + o_t, mask=m_t, other=0).to(tl.float64)
            b_turns += b_t[:, None] * b_f[None, :]
    b_turns -= tl.floor(b_turns + 0.5)
    return _cos_sin_turns(b_turns.to(tl.float32))


@triton.jit
def _load_pair(p_x, o_row, m_row, o_p, m_p, P, INTERLEAVED: tl.constexpr):
    """The two halves of each plane, float32 [tokens, planes]. Interleaved pairs are loaded contiguously, then split."""
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * o_p.shape[0])
        b_x = tl.load(p_x + o_row[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < 2 * P)[None, :], other=0.0)
        b_0, b_1 = tl.split(tl.reshape(b_x, (o_row.shape[0], o_p.shape[0], 2)))
    else:
        p_0 = p_x + o_row[:, None] + o_p[None, :]
        m = m_row[:, None] & m_p[None, :]
        b_0, b_1 = tl.load(p_0, mask=m, other=0.0), tl.load(p_0 + P, mask=m, other=0.0)
    return b_0.to(tl.float32), b_1.to(tl.float32)


@triton.jit
def _store_pair(p_y, b_0, b_1, o_row, m_row, o_p, m_p, P, INTERLEAVED: tl.constexpr):
    b_0, b_1 = b_0.to(p_y.dtype.element_ty), b_1.to(p_y.dtype.element_ty)
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * o_p.shape[0])
        b_y = tl.reshape(tl.join(b_0, b_1), (o_row.shape[0], 2 * o_p.shape[0]))
        tl.store(p_y + o_row[:, None] + o_d[None, :], b_y, mask=m_row[:, None] & (o_d < 2 * P)[None, :])
    else:
        p_0 = p_y + o_row[:, None] + o_p[None, :]
        m = m_row[:, None] & m_p[None, :]
        tl.store(p_0, b_0, mask=m)
        tl.store(p_0 + P, b_1, mask=m)


@triton.jit
def _copy_rest(p_x, p_y, o_x, o_y, m_row, P, D, BLOCK_REST: tl.constexpr):
    """Dims past the rotary ones pass through untouched."""
    o_d = 2 * P + tl.arange(0, BLOCK_REST)
    m = m_row[:, None] & (o_d < D)[None, :]
    tl.store(p_y + o_y[:, None] + o_d[None, :], tl.load(p_x + o_x[:, None] + o_d[None, :], mask=m), mask=m)


@triton.jit
def _row(o_t, L, s_b, s_l):
    """Where each token's row of heads begins, in elements."""
    return (o_t // L).to(tl.int64) * s_b + (o_t % L).to(tl.int64) * s_l


@triton.jit
def _forward_side(
    p_x, p_y, p_coords, p_freqs, p_betas, T, L, D, P, s_b, s_l, s_h,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_p = tl.arange(0, BLOCK_P)
    m_t, m_p = o_t < T, o_p < P
    b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, m_p, T, P, C, PAPER_FP32)
    o_x = _row(o_t, L, s_b, s_l)
    o_y = o_t.to(tl.int64) * H * D
    for i_h in tl.static_range(H):
        b_0, b_1 = _load_pair(p_x, o_x + i_h * s_h, m_t, o_p, m_p, P, INTERLEAVED)
        b_y0, b_y1 = b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos
        _store_pair(p_y, b_y0, b_y1, o_y + i_h * D, m_t, o_p, m_p, P, INTERLEAVED)
        if BLOCK_REST:
            _copy_rest(p_x, p_y, o_x + i_h * s_h, o_y + i_h * D, m_t, P, D, BLOCK_REST)


@triton.jit
def _backward_side(
    p_x, p_g, p_dx, p_partial, p_coords, p_freqs, p_betas, T, L, D, P, s_b, s_l, s_h, s_gb, s_gl, s_gh,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_p = tl.arange(0, BLOCK_P)
    m_t, m_p = o_t < T, o_p < P
    b_cos, b_sin = _cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, m_p, T, P, C, PAPER_FP32)
    o_x = _row(o_t, L, s_b, s_l)
    o_g = _row(o_t, L, s_gb, s_gl)
    o_dx = o_t.to(tl.int64) * H * D
    b_dphi = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    for i_h in tl.static_range(H):
        b_x0, b_x1 = _load_pair(p_x, o_x + i_h * s_h, m_t, o_p, m_p, P, INTERLEAVED)
        b_g0, b_g1 = _load_pair(p_g, o_g + i_h * s_gh, m_t, o_p, m_p, P, INTERLEAVED)
        b_dx0, b_dx1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
        # Algorithm 3's dPhi is the cross product y x g; turning both back by the same angle makes it x x dx.
        b_dphi += b_x0 * b_dx1 - b_x1 * b_dx0
        _store_pair(p_dx, b_dx0, b_dx1, o_dx + i_h * D, m_t, o_p, m_p, P, INTERLEAVED)
        if BLOCK_REST:
            _copy_rest(p_g, p_dx, o_g + i_h * s_gh, o_dx + i_h * D, m_t, P, D, BLOCK_REST)
    for i_c in tl.static_range(C):
        b_t = tl.load(p_coords + i_c * T + o_t, mask=m_t, other=0).to(tl.float64)
        b_df = tl.sum(b_dphi.to(tl.float64) * b_t[:, None], axis=0)
        tl.store(p_partial + (tl.program_id(0) * C + i_c) * P + o_p, b_df, mask=m_p)


@triton.jit
def _forward_kernel(
    p_q, p_k, p_yq, p_yk, p_cq, p_ck, p_fq, p_fk, p_betas, T, L, D, P, s_qb, s_ql, s_qh, s_kb, s_kl, s_kh,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _forward_side(p_q, p_yq, p_cq, p_fq, p_betas, T, L, D, P, s_qb, s_ql, s_qh,
                      HQ, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST)  # fmt: skip
    else:
        _forward_side(p_k, p_yk, p_ck, p_fk, p_betas, T, L, D, P, s_kb, s_kl, s_kh,
                      HK, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST)  # fmt: skip


@triton.jit
def _backward_kernel(
    p_q, p_k, p_gq, p_gk, p_dq, p_dk, p_partial, p_cq, p_ck, p_fq, p_fk, p_betas, T, L, D, P,
    s_qb, s_ql, s_qh, s_kb, s_kl, s_kh, s_gqb, s_gql, s_gqh, s_gkb, s_gkl, s_gkh,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _backward_side(p_q, p_gq, p_dq, p_partial, p_cq, p_fq, p_betas, T, L, D, P,
                       s_qb, s_ql, s_qh, s_gqb, s_gql, s_gqh,
                       HQ, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST)  # fmt: skip
    else:
        p_partial_k = p_partial + tl.num_programs(0) * C * P
        _backward_side(p_k, p_gk, p_dk, p_partial_k, p_ck, p_fk, p_betas, T, L, D, P,
                       s_kb, s_kl, s_kh, s_gkb, s_gkl, s_gkh,
                       HK, C, PAPER_FP32, INTERLEAVED, BLOCK_T, BLOCK_P, BLOCK_REST)  # fmt: skip


def _tile(planes: int, rest: int) -> dict[str, int]:
    """Block sizes: about a thousand planes a program, 16 bytes a thread and load in bf16."""
    block_p = triton.next_power_of_2(planes)
    return {
        "BLOCK_T": max(1, min(128, 1024 // block_p)),
        "BLOCK_P": block_p,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": 4,
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
    tile = _tile(P, D - 2 * P)
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
    tile = _tile(P, D - 2 * P)
    blocks = triton.cdiv(B * L, tile["BLOCK_T"])
    partial = torch.empty((2, blocks, C, P), dtype=torch.float64, device=q_BLHD.device)
    if B * L:
        torch.library.wrap_triton(_backward_kernel)[(blocks, 2)](
            q_BLHD, k_BLHD, g_q_BLHD, g_k_BLHD, dq, dk, partial, coords_q_CBL, coords_k_CBL, freqs_q_CP, freqs_k_CP,
            freqs_q_CP if betas_P is None else betas_P, B * L, L, D, P,
            *q_BLHD.stride()[:3], *k_BLHD.stride()[:3], *g_q_BLHD.stride()[:3], *g_k_BLHD.stride()[:3],
            HQ=q_BLHD.shape[2], HK=k_BLHD.shape[2], C=C, PAPER_FP32=betas_P is not None, INTERLEAVED=interleaved,
            **tile,
        )  # fmt: skip
    # The second stage of the reduction: fixed rows in a fixed order. dPhi/dfreq is 2 pi t in turns, t / beta in fp32.
    dfreqs = partial.sum(1)
    dfreqs = dfreqs * TWO_PI if betas_P is None else dfreqs / betas_P
    return dq, dk, dfreqs.to(freqs_q_CP.dtype)
