"""The fused update of the item table: gradient, AdamW and new unit vectors of a row while it is in registers.

Notable:
- no gradient tensor and no scatter: a program owns ROWS items and gathers their entries, CHUNK of each at a time; sums
  run in the order of `invert`, so they are deterministic;
- one kernel, two regimes: one long row with many entries per program, or several short rows with few;
- weights and moments are asked for before the entries are, whose latency hides theirs;
- with one second moment a row (ROWWISE) a third less is read and written: 18 bytes a number instead of 26;
- bias corrections are formed once, in float64, by a kernel of one program: the step number is on the device.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask.
Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

# Triton's own language: its functions are compiled, not called, and its constexpr arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.softmax.reference import EPS
from trope.kernels.table.reference import InputEntries, ScoreEntries

_TILE = 2048  # gathered numbers in registers at once: fewer registers, more programs that wait side by side
_SHORT_KEYS = 1 << 16  # so many items have 16-bit sort keys: half the passes of a radix sort


@triton.jit
def _first_kernel(p_by_item, p_first, N, num_firsts, LOWEST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Where each item's entries begin: a binary search in the sorted keys, which begin at LOWEST."""
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_key = o_v + LOWEST
    b_low, b_high = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32) + N
    for _ in range(STEPS):
        b_middle = (b_low + b_high) >> 1
        m_open = b_low < b_high
        m_right = m_open & (tl.load(p_by_item + b_middle, mask=m_open, other=0).to(tl.int32) < b_key)
        b_low = tl.where(m_right, b_middle + 1, b_low)
        b_high = tl.where(m_right, b_high, b_middle)
    tl.store(p_first + o_v, b_low, mask=o_v < num_firsts)


@triton.jit
def _entry_sums(
    p_order, p_first, p_coefs, p_rows, o_v, m_v, o_e,
    C: tl.constexpr, E: tl.constexpr, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over each row's entries e of (coefs[e] *) rows[e // C], [ROWS, E]."""
    b_at = tl.load(p_first + o_v, mask=m_v, other=0)
    b_end = tl.load(p_first + o_v + 1, mask=m_v, other=0)
    b_sum = tl.zeros((o_v.shape[0], o_e.shape[0]), tl.float32)
    o_chunk = tl.arange(0, CHUNK)
    for i in range(0, tl.max(b_end - b_at), CHUNK):
        o_i = b_at[:, None] + i + o_chunk[None, :]
        m_i = o_i < b_end[:, None]
        b_entry = tl.load(p_order + o_i, mask=m_i, other=0).to(tl.int32)
        p_row = p_rows + (b_entry // C).to(tl.int64)[:, :, None] * E + o_e[None, None, :]
        b_rows = tl.load(p_row, mask=m_i[:, :, None] & (o_e < E)[None, None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            b_rows *= tl.load(p_coefs + b_entry, mask=m_i, other=0.0)[:, :, None]
        b_sum += tl.sum(b_rows, axis=1)
    return b_sum


@triton.jit
def _table_kernel(
    p_table, p_avg, p_sq, p_unit, p_grad, p_partial, p_factors,
    p_order, p_first, p_coefs, p_out, p_in_order, p_in_first, p_in_grad, scale, num_rows,
    C: tl.constexpr, E: tl.constexpr, EPS: tl.constexpr, UPDATE: tl.constexpr, ROWWISE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, IN_CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    m_v = (o_v > 0) & (o_v < num_rows)
    m = m_v[:, None] & (o_e < E)[None, :]
    o_w = o_v.to(tl.int64)[:, None] * E + o_e[None, :]
    b_w = tl.load(p_table + o_w, mask=m, other=0.0, eviction_policy="evict_first")
    if ROWWISE:  # one second moment a row
        o_sq, m_sq = o_v[:, None], m_v[:, None]
    else:
        o_sq, m_sq = o_w, m
    if UPDATE:
        b_avg = tl.load(p_avg + o_w, mask=m, other=0.0, eviction_policy="evict_first")
        b_sq = tl.load(p_sq + o_sq, mask=m_sq, other=0.0, eviction_policy="evict_first")

    b_g = _entry_sums(p_order, p_first, p_coefs, p_out, o_v, m_v, o_e, C, E, True, CHUNK)
    b_length = tl.sqrt(tl.sum(b_w * b_w, axis=1))
    b_inverse = 1.0 / tl.maximum(b_length, EPS)
    # Back through the normalisation: without the radial part, over the length.
    b_radial = tl.where(b_length > EPS, tl.sum(b_g * b_w, axis=1) * b_inverse * b_inverse, 0.0)
    b_g = (b_g - b_w * b_radial[:, None]) * b_inverse[:, None]
    b_g += scale * _entry_sums(p_in_order, p_in_first, p_coefs, p_in_grad, o_v, m_v, o_e, 1, E, False, IN_CHUNK)

    if UPDATE:
        decay, beta1, rest1, beta2, rest2 = (
            tl.load(p_factors), tl.load(p_factors + 1), tl.load(p_factors + 2),
            tl.load(p_factors + 3), tl.load(p_factors + 4),
        )  # fmt: skip
        step_size, inv_root2, eps = tl.load(p_factors + 5), tl.load(p_factors + 6), tl.load(p_factors + 7)
        b_square = b_g * b_g
        tl.store(p_partial + tl.program_id(0), tl.sum(b_square))
        if ROWWISE:
            b_square = tl.sum(b_square, axis=1)[:, None] / E
        b_avg = b_avg * beta1 + b_g * rest1
        b_sq = b_sq * beta2 + b_square * rest2
        b_w = b_w * decay - b_avg * (step_size / (tl.sqrt(b_sq) * inv_root2 + eps))
        tl.store(p_table + o_w, b_w, mask=m, eviction_policy="evict_first")
        tl.store(p_avg + o_w, b_avg, mask=m, eviction_policy="evict_first")
        tl.store(p_sq + o_sq, b_sq, mask=m_sq, eviction_policy="evict_first")
        b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_w * b_w, axis=1)), EPS)
        tl.store(p_unit + o_w, (b_w * b_inverse[:, None]).to(p_unit.dtype.element_ty), mask=m)
    else:
        tl.store(p_grad + o_w, b_g, mask=(o_v < num_rows)[:, None] & (o_e < E)[None, :])


@triton.jit
def _factors_kernel(p_hyper, p_factors):
    """From the hyperparameters to what a row multiplies by, in float64."""
    lr, beta1 = tl.load(p_hyper).to(tl.float64), tl.load(p_hyper + 1).to(tl.float64)
    beta2, eps = tl.load(p_hyper + 2).to(tl.float64), tl.load(p_hyper + 3).to(tl.float64)
    weight_decay, step = tl.load(p_hyper + 4).to(tl.float64), tl.load(p_hyper + 5).to(tl.float64)
    # A beta of 0 has no logarithm, and a power of 0.
    power1 = tl.where(beta1 > 0, tl.exp(step * tl.log(tl.where(beta1 > 0, beta1, 1.0))), 0.0)
    power2 = tl.where(beta2 > 0, tl.exp(step * tl.log(tl.where(beta2 > 0, beta2, 1.0))), 0.0)
    tl.store(p_factors, (1 - lr * weight_decay).to(tl.float32))
    tl.store(p_factors + 1, beta1.to(tl.float32))
    tl.store(p_factors + 2, (1 - beta1).to(tl.float32))
    tl.store(p_factors + 3, beta2.to(tl.float32))
    tl.store(p_factors + 4, (1 - beta2).to(tl.float32))
    tl.store(p_factors + 5, (lr / (1 - power1)).to(tl.float32))
    tl.store(p_factors + 6, (1 / tl.sqrt(1 - power2)).to(tl.float32))
    tl.store(p_factors + 7, eps.to(tl.float32))


@triton.jit
def _unit_kernel(
    p_table, p_unit, num_rows, E: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):
    o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    m = (o_v < num_rows)[:, None] & (o_e < E)[None, :]
    o_w = o_v.to(tl.int64)[:, None] * E + o_e[None, :]
    b_w = tl.load(p_table + o_w, mask=m, other=0.0)
    b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_w * b_w, axis=1)), EPS)
    tl.store(p_unit + o_w, (b_w * b_inverse[:, None]).to(p_unit.dtype.element_ty), mask=m)


def _rows(width: int) -> dict[str, int]:
    """Rows of a program that has nothing to wait for: 512 numbers a warp, 16 a thread."""
    block_e = max(16, triton.next_power_of_2(width))
    return {"ROWS": max(1, 512 // block_e), "BLOCK_E": block_e, "num_warps": max(1, block_e // 512)}


def _tile(width: int, per_item: float) -> dict[str, int]:
    """Block sizes for so many score entries per item: few are gathered for several rows at once, many by chunks."""
    tile = _rows(width)
    tile["ROWS"] = 1 if per_item >= 16 else max(1, tile["ROWS"] // 2)
    room = _TILE // (tile["ROWS"] * tile["BLOCK_E"]) * tile["num_warps"]
    tile["CHUNK"] = max(1, min(room, 32, max(2, triton.next_power_of_2(int(per_item) + 1))))
    # Popular items are the input of many tokens, others of none.
    tile["IN_CHUNK"] = max(min(2, tile["CHUNK"]), tile["CHUNK"] // 4)
    return tile


def invert(items: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """See table.py."""
    flat = items.reshape(-1)
    if num_items < _SHORT_KEYS:
        lowest = -(_SHORT_KEYS // 2)
        keys = torch.add(flat, lowest, out=torch.empty(flat.shape, dtype=torch.int16, device=items.device))
    else:
        lowest, keys = 0, flat.int()
    by_item, order = torch.sort(keys, stable=True)
    first_V = torch.empty(num_items + 2, dtype=torch.int32, device=items.device)
    block = 512
    _first_kernel[(triton.cdiv(num_items + 2, block),)](
        by_item, first_V, flat.numel(), num_items + 2,
        LOWEST=lowest, STEPS=flat.numel().bit_length(), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return order, first_V


def _check(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries) -> None:
    """What the kernel takes for granted."""
    (rows, E), (T, C) = table_VE.shape, scores.coefs_TC.shape
    assert table_VE.dtype == torch.float32 and table_VE.is_contiguous()
    assert scores.out_TE.shape == (T, E) and scores.order.numel() == T * C < 2**31
    assert inputs.grad_TE.shape == (inputs.order.numel(), E)
    assert scores.first_V.numel() == inputs.first_V.numel() == rows + 1
    tensors = (*scores, *inputs[:3])
    assert all(tensor.is_contiguous() for tensor in tensors)


def _launch(
    table_VE: Tensor, others: tuple[Tensor, ...], scores: ScoreEntries, inputs: InputEntries, update: bool,
    tile: dict[str, int],
) -> None:  # fmt: skip
    (rows, E), exp_avg_sq = table_VE.shape, others[1]
    _table_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        table_VE, *others, *scores, *inputs, rows,
        C=scores.coefs_TC.shape[1], E=E, EPS=EPS, UPDATE=update, ROWWISE=exp_avg_sq.ndim == 1, **tile,
    )  # fmt: skip


def table_gradient(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries) -> Tensor:
    """See table.py; float32."""
    _check(table_VE, scores, inputs)
    grad_VE = torch.empty_like(table_VE)
    tile = _tile(table_VE.shape[1], scores.order.numel() / len(table_VE))
    # Of the other tensors only the gradient is touched.
    _launch(table_VE, (*[table_VE] * 3, grad_VE, *[table_VE] * 2), scores, inputs, False, tile)
    return grad_VE


def update_table(
    table_VE: Tensor, exp_avg_VE: Tensor, exp_avg_sq: Tensor, unit_VE: Tensor,
    scores: ScoreEntries, inputs: InputEntries, hyper: Tensor,
) -> Tensor:  # fmt: skip
    """See table.py; float32."""
    _check(table_VE, scores, inputs)
    for other in (exp_avg_VE, unit_VE):
        assert other.shape == table_VE.shape and other.is_contiguous()
    assert exp_avg_sq.shape in (table_VE.shape, table_VE.shape[:1]) and exp_avg_sq.is_contiguous()
    assert exp_avg_VE.dtype == exp_avg_sq.dtype == torch.float32 and hyper.shape == (6,)
    tile = _tile(table_VE.shape[1], scores.order.numel() / len(table_VE))
    factors = torch.empty(8, dtype=torch.float32, device=table_VE.device)
    _factors_kernel[(1,)](hyper.contiguous(), factors, num_warps=1)
    partial = torch.empty(triton.cdiv(len(table_VE), tile["ROWS"]), dtype=torch.float32, device=table_VE.device)
    others = (exp_avg_VE, exp_avg_sq, unit_VE, table_VE, partial, factors)
    _launch(table_VE, others, scores, inputs, True, tile)
    return partial.sum(dim=0, keepdim=True)


def unit_vectors(table_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """See table.py."""
    assert table_VE.dtype == torch.float32 and table_VE.is_contiguous()
    unit_VE = torch.empty(table_VE.shape, dtype=dtype, device=table_VE.device)
    tile = _rows(table_VE.shape[1])
    _unit_kernel[(triton.cdiv(len(table_VE), tile["ROWS"]),)](
        table_VE, unit_VE, len(table_VE), E=table_VE.shape[1], EPS=EPS, **tile
    )
    return unit_VE
