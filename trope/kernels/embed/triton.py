# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The model's input in one launch, and its backward in two: rows by token, then positions by index.

Notable: padding reads neither table nor positions; the gradient of a position is a sum over sequences in a fixed order,
a program per index and block of columns, so no atomics and no sorting; dropout is drawn again in the backward.

Names of the kernel arguments: p_items, p_index item and place of each token [T]; p_table [V, E], p_positions [L, E];
p_x the input [T, E]; p_g its gradient, p_rows the gradient of the scaled item vectors, both [T, E]; p_first a further
gradient of the input's first dims [T, F], read if F is not 0; p_starts, p_lengths [B] where sequences lie. All are
contiguous. p_seed, i_stream, THRESHOLD, SCALE: dropout (random/triton.py).

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E width, F first dims, V rows of the table, L positions, B sequences, R rows of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.aside import Aside
from trope.kernels.norm.triton import row_tile
from trope.kernels.random.triton import dropout_arguments, dropped


@triton.jit(do_not_specialize=["i_stream"])
def _embed_kernel(
    p_items, p_index, p_table, p_positions, p_x, p_seed, i_stream, T, scale,
    E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens,)."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_e = tl.arange(0, BLOCK_E)[None, :]
    m_r = o_r < T
    b_item = tl.load(p_items + o_r, mask=m_r, other=0).to(tl.int64)
    b_index = tl.load(p_index + o_r, mask=m_r, other=0).to(tl.int64)
    m = (b_item != 0)[:, None] & (o_e < E)
    b_x = tl.load(p_table + b_item[:, None] * E + o_e, mask=m, other=0.0).to(tl.float32) * scale
    b_x += tl.load(p_positions + b_index[:, None] * E + o_e, mask=m, other=0.0).to(tl.float32)
    b_x = dropped(b_x, p_seed, i_stream, o_r, THRESHOLD, SCALE)
    tl.store(p_x + o_r.to(tl.int64)[:, None] * E + o_e, b_x, mask=m_r[:, None] & (o_e < E))


@triton.jit(do_not_specialize=["i_stream"])
def _rows_kernel(
    p_g, p_first, p_items, p_rows, p_seed, i_stream, T,
    E: tl.constexpr, F: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens,): dropout and padding applied to the gradient."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_e = tl.arange(0, BLOCK_E)[None, :]
    m_r = o_r < T
    m_item = tl.load(p_items + o_r, mask=m_r, other=0) != 0
    o_x = o_r.to(tl.int64)[:, None] * E + o_e
    b_g = tl.load(p_g + o_x, mask=m_item[:, None] & (o_e < E), other=0.0).to(tl.float32)
    if F:
        o_first = o_r.to(tl.int64)[:, None] * F + o_e
        b_g += tl.load(p_first + o_first, mask=m_item[:, None] & (o_e < F), other=0.0).to(tl.float32)
    b_g = dropped(b_g, p_seed, i_stream, o_r, THRESHOLD, SCALE)
    tl.store(p_rows + o_x, b_g, mask=m_r[:, None] & (o_e < E))


@triton.jit
def _positions_kernel(
    p_rows, p_starts, p_lengths, p_positions, B, E: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Grid (L, blocks of columns): the gradient of one position."""
    i_l = tl.program_id(0)
    o_e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    b_sum = tl.zeros((BLOCK_B, BLOCK_E), dtype=tl.float32)
    for i_b in range(0, B, BLOCK_B):
        o_b = i_b + tl.arange(0, BLOCK_B)
        b_start = tl.load(p_starts + o_b, mask=o_b < B, other=0).to(tl.int64)
        m_b = i_l < tl.load(p_lengths + o_b, mask=o_b < B, other=0)
        o_x = (b_start + i_l)[:, None] * E + o_e[None, :]
        b_sum += tl.load(p_rows + o_x, mask=m_b[:, None] & (o_e < E)[None, :], other=0.0)
    tl.store(p_positions + i_l.to(tl.int64) * E + o_e, tl.sum(b_sum, axis=0), mask=o_e < E)


def embed(
    items_T: Tensor, index_T: Tensor, table_VE: Tensor, positions_LE: Tensor, scale: float, dropout: float,
    seed: Tensor | None, stream: int,
) -> Tensor:  # fmt: skip
    assert table_VE.is_contiguous() and positions_LE.is_contiguous() and items_T.shape == index_T.shape
    T, E = len(items_T), table_VE.shape[1]
    x_TE = torch.empty((T, E), dtype=torch.float32, device=table_VE.device)
    p_seed, constants = dropout_arguments(dropout, seed, fallback=table_VE)
    tile = row_tile(E)
    if T:
        _embed_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
            p_items=items_T.contiguous(),
            p_index=index_T.contiguous(),
            p_table=table_VE,
            p_positions=positions_LE,
            p_x=x_TE,
            p_seed=p_seed,
            i_stream=stream,
            T=T,
            scale=scale,
            E=E,
            **constants,
            **tile,
        )
    return x_TE


def embed_backward(
    grad_x_TE: Tensor, items_T: Tensor, starts_B: Tensor, lengths_B: Tensor, max_len: int, dropout: float,
    seed: Tensor | None, stream: int, grad_first_TF: Tensor | None, beside: Aside,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    T, E = grad_x_TE.shape
    first_TF = grad_x_TE[:, :0] if grad_first_TF is None else grad_first_TF
    assert items_T.shape == (T,) and starts_B.shape == lengths_B.shape
    rows_TE = torch.empty((T, E), dtype=torch.float32, device=grad_x_TE.device)
    p_seed, constants = dropout_arguments(dropout, seed, fallback=grad_x_TE)
    tile = row_tile(E)
    if T:
        _rows_kernel[(triton.cdiv(T, tile["BLOCK_R"]),)](
            p_g=grad_x_TE.contiguous(),
            p_first=first_TF.contiguous(),
            p_items=items_T.contiguous(),
            p_rows=rows_TE,
            p_seed=p_seed,
            i_stream=stream,
            T=T,
            E=E,
            F=first_TF.shape[1],
            **constants,
            **tile,
        )
    block_e = min(64, triton.next_power_of_2(E))
    starts_B, lengths_B = starts_B.contiguous(), lengths_B.contiguous()
    with beside.work(rows_TE, starts_B, lengths_B):
        positions_LE = torch.empty((max_len, E), dtype=torch.float32, device=grad_x_TE.device)
        _positions_kernel[(max_len, triton.cdiv(E, block_e))](
            p_rows=rows_TE,
            p_starts=starts_B,
            p_lengths=lengths_B,
            p_positions=positions_LE,
            B=len(starts_B),
            E=E,
            BLOCK_B=64,  # not tuned
            BLOCK_E=block_e,
            num_warps=4,
        )
    return rows_TE, positions_LE
