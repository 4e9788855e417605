"""The fused rotary kernels: times -> phases -> cos, sin -> rotated q and k in one pass, and the backward of Algorithm 3
with the gradient of the frequencies reduced inside the kernel.

Notable: one launch turns q and k, whose directions are signs of their frequencies; cos and sin are formed in
registers and serve a group of heads; the backward needs neither the angles nor the rotated output from memory; each
program writes one partial row of the frequency gradient and the rows are summed in a fixed order, so gradients are
deterministic; inputs may be strided views (the q and k slices of a joint projection, the transposed gradients of
attention).

Names of the kernel arguments:

- p_q, p_k: queries and keys [B, L, H, D], any strides but the last: s_q_b, s_q_l, s_q_h are the strides of a sequence,
  a position and a head of q, in elements. p_out_q, p_out_k: the rotated ones, contiguous.
- p_g_q, p_g_k: gradients of the rotated q and k, strides s_g_q_b and so on. p_dq, p_dk: gradients of q and k,
  contiguous.
- p_coords_q, p_coords_k: coordinates [C, T], int64 or float64. p_freqs_q, p_freqs_k: turns per unit, float64 [C, P]; if
  PAPER_FP32 they hold alpha and p_betas [P] is read too.
- p_partial: partial rows of the frequency gradient, float64 [2, blocks, C, P].
- TILES: tiles of BLOCK_T tokens that a program takes one after the other.
- HQ, HK: heads of q and k. BLOCK_P: P rounded up. BLOCK_REST: the dims past 2P rounded up, 0 if there are none. GROUP:
  heads that a program turns at once.
- In `_forward_side` and `_backward_side` the same names without q or k: x, out, g and dx are of one side.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B batch, L positions, T tokens (B * L), H heads, D head dim, P planes, C coordinates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.rotary.planes import (
    ROWS,
    SUM_TILE,
    cos_sin,
    load_pair,
    offsets,
    store_frequency_row,
    store_pair,
    sum_rows_kernel,
)


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
    p_x, p_out, p_coords, p_freqs, p_betas, T, L, D, P, s_b, s_l, s_h,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_T tokens of q or of k."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_p = tl.arange(0, BLOCK_P)
    m_t = o_t < T
    o_row_x, o_row_y = _row(o_t, L, s_b, s_l), o_t.to(tl.int64) * H * D
    # A group of heads is always loaded before the group ahead of it is stored (the first before the angles are
    # computed): the compiler cannot move a load over a store, so the kernel says so.
    o_x, m_h = offsets(o_row_x, s_h, 0, H, GROUP)
    b_next0, b_next1 = load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
    b_cos, b_sin = cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, o_p < P, T, P, C, PAPER_FP32)
    b_cos, b_sin = b_cos[:, None, :], b_sin[:, None, :]  # the same angle for every head
    for i_g in tl.static_range((H + GROUP - 1) // GROUP):
        o_x, m_h = offsets(o_row_x, s_h, i_g, H, GROUP)
        o_y, _ = offsets(o_row_y, D, i_g, H, GROUP)
        m = m_t[:, None, None] & m_h
        b_0, b_1 = b_next0.to(tl.float32), b_next1.to(tl.float32)
        if (i_g + 1) * GROUP < H:
            o_next, m_h = offsets(o_row_x, s_h, i_g + 1, H, GROUP)
            b_next0, b_next1 = load_pair(p_x, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        store_pair(p_out, b_0 * b_cos - b_1 * b_sin, b_0 * b_sin + b_1 * b_cos, o_y, m, o_p, P, INTERLEAVED)
        if BLOCK_REST:
            _copy_rest(p_x, p_out, o_x, o_y, m, P, D, BLOCK_REST)


@triton.jit
def _backward_side(
    p_x, p_g, p_dx, p_partial, p_coords, p_freqs, p_betas, T, L, D, P, TILES, s_b, s_l, s_h, s_g_b, s_g_l, s_g_h,
    H: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of TILES x BLOCK_T tokens of q or of k, and one partial row of the frequency gradient."""
    o_p = tl.arange(0, BLOCK_P)
    # Sums of dPhi * coordinate, kept apart per token, head and plane until the end: no exchange between threads before.
    b_df0 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    b_df1 = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float64)
    for i_tile in range(TILES):
        o_t = (tl.program_id(0) * TILES + i_tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        o_row_x, o_row_g, o_row_dx = _row(o_t, L, s_b, s_l), _row(o_t, L, s_g_b, s_g_l), o_t.to(tl.int64) * H * D
        o_x, m_h = offsets(o_row_x, s_h, 0, H, GROUP)
        o_g, _ = offsets(o_row_g, s_g_h, 0, H, GROUP)
        b_next_x0, b_next_x1 = load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_next_g0, b_next_g1 = load_pair(p_g, o_g, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
        b_cos, b_sin = cos_sin(p_coords, p_freqs, p_betas, o_t, m_t, o_p, o_p < P, T, P, C, PAPER_FP32)
        b_cos, b_sin = b_cos[:, None, :], b_sin[:, None, :]
        b_dphi = tl.zeros((BLOCK_T, GROUP, BLOCK_P), dtype=tl.float32)
        for i_g in tl.static_range((H + GROUP - 1) // GROUP):
            o_g, m_h = offsets(o_row_g, s_g_h, i_g, H, GROUP)
            o_dx, _ = offsets(o_row_dx, D, i_g, H, GROUP)
            m = m_t[:, None, None] & m_h
            b_x0, b_x1 = b_next_x0.to(tl.float32), b_next_x1.to(tl.float32)
            b_g0, b_g1 = b_next_g0.to(tl.float32), b_next_g1.to(tl.float32)
            if (i_g + 1) * GROUP < H:
                o_x, m_h = offsets(o_row_x, s_h, i_g + 1, H, GROUP)
                o_next, _ = offsets(o_row_g, s_g_h, i_g + 1, H, GROUP)
                b_next_x0, b_next_x1 = load_pair(p_x, o_x, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
                b_next_g0, b_next_g1 = load_pair(p_g, o_next, m_t[:, None, None] & m_h, o_p, P, INTERLEAVED)
            b_dx0, b_dx1 = b_g0 * b_cos + b_g1 * b_sin, b_g1 * b_cos - b_g0 * b_sin
            # Algorithm 3's dPhi is the cross product y x g; turning both back by the same angle makes it x x dx.
            b_dphi += b_x0 * b_dx1 - b_x1 * b_dx0
            store_pair(p_dx, b_dx0, b_dx1, o_dx, m, o_p, P, INTERLEAVED)
            if BLOCK_REST:
                _copy_rest(p_g, p_dx, o_g, o_dx, m, P, D, BLOCK_REST)
        b_dphi64 = b_dphi.to(tl.float64)
        b_df0 += b_dphi64 * tl.load(p_coords + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
        if C == 2:
            b_df1 += b_dphi64 * tl.load(p_coords + T + o_t, mask=m_t, other=0).to(tl.float64)[:, None, None]
    p_row = p_partial + tl.program_id(0) * C * P
    store_frequency_row(p_row, b_df0, p_betas, o_p, P, PAPER_FP32)
    if C == 2:
        store_frequency_row(p_row + P, b_df1, p_betas, o_p, P, PAPER_FP32)


@triton.jit
def _forward_kernel(
    p_q, p_k, p_out_q, p_out_k, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_betas, T, L, D, P,
    s_q_b, s_q_l, s_q_h, s_k_b, s_k_l, s_k_h,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, 2): column 0 rotates q, column 1 rotates k."""
    if tl.program_id(1) == 0:
        _forward_side(
            p_x=p_q, p_out=p_out_q, p_coords=p_coords_q, p_freqs=p_freqs_q, p_betas=p_betas, T=T, L=L, D=D, P=P,
            s_b=s_q_b, s_l=s_q_l, s_h=s_q_h, H=HQ, C=C, PAPER_FP32=PAPER_FP32, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    else:
        _forward_side(
            p_x=p_k, p_out=p_out_k, p_coords=p_coords_k, p_freqs=p_freqs_k, p_betas=p_betas, T=T, L=L, D=D, P=P,
            s_b=s_k_b, s_l=s_k_l, s_h=s_k_h, H=HK, C=C, PAPER_FP32=PAPER_FP32, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip


@triton.jit
def _backward_kernel(
    p_q, p_k, p_g_q, p_g_k, p_dq, p_dk, p_partial, p_coords_q, p_coords_k, p_freqs_q, p_freqs_k, p_betas,
    T, L, D, P, TILES,
    s_q_b, s_q_l, s_q_h, s_k_b, s_k_l, s_k_h, s_g_q_b, s_g_q_l, s_g_q_h, s_g_k_b, s_g_k_l, s_g_k_h,
    HQ: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, PAPER_FP32: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of TILES tiles, 2): column 0 is q's gradient, column 1 is k's."""
    if tl.program_id(1) == 0:
        _backward_side(
            p_x=p_q, p_g=p_g_q, p_dx=p_dq, p_partial=p_partial, p_coords=p_coords_q, p_freqs=p_freqs_q,
            p_betas=p_betas, T=T, L=L, D=D, P=P, TILES=TILES, s_b=s_q_b, s_l=s_q_l, s_h=s_q_h,
            s_g_b=s_g_q_b, s_g_l=s_g_q_l, s_g_h=s_g_q_h, H=HQ, C=C, PAPER_FP32=PAPER_FP32, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip
    else:
        p_partial_k = p_partial + tl.num_programs(0) * C * P
        _backward_side(
            p_x=p_k, p_g=p_g_k, p_dx=p_dk, p_partial=p_partial_k, p_coords=p_coords_k, p_freqs=p_freqs_k,
            p_betas=p_betas, T=T, L=L, D=D, P=P, TILES=TILES, s_b=s_k_b, s_l=s_k_l, s_h=s_k_h,
            s_g_b=s_g_k_b, s_g_l=s_g_k_l, s_g_h=s_g_k_h, H=HK, C=C, PAPER_FP32=PAPER_FP32, INTERLEAVED=INTERLEAVED,
            BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, BLOCK_REST=BLOCK_REST, GROUP=GROUP,
        )  # fmt: skip


def _tile(planes: int, rest: int, heads: int) -> dict[str, int]:
    """Block sizes, from measurements on an H200 (results/kernels-h200.csv is with these): 64 planes in a row (256 bytes
    in bf16), of several heads where heads are small, by 8 tokens; two warps, so that a thread moves 16 bytes at a time
    and many programs share a multiprocessor."""
    block_p = triton.next_power_of_2(planes)
    group = min(max(1, 64 // block_p), triton.next_power_of_2(heads))
    return {
        "BLOCK_T": max(1, min(128, 512 // (block_p * group))),
        "BLOCK_P": block_p,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "GROUP": group,
        "num_warps": 2,
    }


def _strides(**tensors: Tensor) -> dict[str, int]:
    """s_x_b, s_x_l and s_x_h of every tensor x [B, L, H, D]."""
    return {f"s_{name}_{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate("blh")}


def _check(q: Tensor, k: Tensor, coords_q: Tensor, coords_k: Tensor, freqs_q: Tensor, freqs_k: Tensor) -> None:
    """What the kernels take for granted; trope.rotary has already checked what users pass."""
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
    tile = _tile(P, D - 2 * P, max(q_BLHD.shape[2], k_BLHD.shape[2]))
    if B * L:
        torch.library.wrap_triton(_forward_kernel)[(triton.cdiv(B * L, tile["BLOCK_T"]), 2)](
            p_q=q_BLHD,
            p_k=k_BLHD,
            p_out_q=y_q,
            p_out_k=y_k,
            p_coords_q=coords_q_CBL,
            p_coords_k=coords_k_CBL,
            p_freqs_q=freqs_q_CP,
            p_freqs_k=freqs_k_CP,
            p_betas=freqs_q_CP if betas_P is None else betas_P,  # read only if PAPER_FP32
            T=B * L,
            L=L,
            D=D,
            P=P,
            **_strides(q=q_BLHD, k=k_BLHD),
            HQ=q_BLHD.shape[2],
            HK=k_BLHD.shape[2],
            C=C,
            PAPER_FP32=betas_P is not None,
            INTERLEAVED=interleaved,
            **tile,
        )
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
    tile = _tile(P, D - 2 * P, max(q_BLHD.shape[2], k_BLHD.shape[2]))
    tiles = triton.cdiv(triton.cdiv(B * L, tile["BLOCK_T"]), ROWS)
    blocks = triton.cdiv(B * L, tiles * tile["BLOCK_T"]) if B * L else 0
    partial = torch.empty((2, blocks, C, P), dtype=torch.float64, device=q_BLHD.device)
    if B * L:
        torch.library.wrap_triton(_backward_kernel)[(blocks, 2)](
            p_q=q_BLHD,
            p_k=k_BLHD,
            p_g_q=g_q_BLHD,
            p_g_k=g_k_BLHD,
            p_dq=dq,
            p_dk=dk,
            p_partial=partial,
            p_coords_q=coords_q_CBL,
            p_coords_k=coords_k_CBL,
            p_freqs_q=freqs_q_CP,
            p_freqs_k=freqs_k_CP,
            p_betas=freqs_q_CP if betas_P is None else betas_P,  # read only if PAPER_FP32
            T=B * L,
            L=L,
            D=D,
            P=P,
            TILES=tiles,
            **_strides(q=q_BLHD, k=k_BLHD, g_q=g_q_BLHD, g_k=g_k_BLHD),
            HQ=q_BLHD.shape[2],
            HK=k_BLHD.shape[2],
            C=C,
            PAPER_FP32=betas_P is not None,
            INTERLEAVED=interleaved,
            **tile,
        )
    # The second stage of the reduction, in the frequencies' dtype.
    dfreqs = torch.empty((2, C, P), dtype=freqs_q_CP.dtype, device=q_BLHD.device)
    torch.library.wrap_triton(sum_rows_kernel)[(triton.cdiv(C * P, SUM_TILE["BLOCK_N"]), 2)](
        p_rows=partial, p_sum=dfreqs, R=blocks, N=C * P, **SUM_TILE
    )
    return dq, dk, dfreqs
