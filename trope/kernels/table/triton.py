"""The fused update of the item table: gradient, AdamW and new unit vectors of a row while it is in registers.

Notable:
- no gradient tensor and no scatter: a program owns ROWS items and gathers their entries, CHUNK of each at a time; sums
  run in the order of `invert`, so they are deterministic;
- one kernel, two regimes: one long row with many entries per program, or several short rows with few;
- weights and moments are asked for before the entries are, whose latency hides theirs;
- with one second moment a row (ROWWISE) a third less is read and written: 18 bytes a number instead of 26.

Names of the kernel arguments:

- p_table, p_avg: weights and first moment, float32 [V + 1, E]. p_sq: second moment [V + 1, E], or [V + 1] if ROWWISE.
  p_unit: unit vectors [V + 1, E]. p_grad: the gradient [V + 1, E]. If UPDATE all but p_grad are written, else p_grad
  alone.
- p_order, p_first, p_coefs, p_out: the score entries (`ScoreEntries`). p_in_order, p_in_first, p_in_grad: the input
  entries (`InputEntries`), whose sum is multiplied by `scale`. p_in_items: the item of each token.
- p_factors: float32 [8], of AdamW (`trope.kernels.adamw.factors_of`).
- p_partial: squared gradient of each program's rows. num_rows: V + 1, or T if OF_INPUTS.
- OF_INPUTS: only rows that are some token's input; the first token of an item takes its row. OF_OTHERS: only the rest,
  whose gradient has no part from the inputs.
- ROWS: items of a program. CHUNK, IN_CHUNK: score and input entries of each in registers at once. BLOCK_E: E rounded
  up.
- p_by_item: sorted keys [N]; num_firsts: V + 2.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask.
Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

# Triton's own language: its functions are compiled, not called, and its constexpr arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.adamw.triton import moved
from trope.kernels.softmax.reference import EPS
from trope.kernels.table.reference import InputEntries, Part, ScoreEntries

# Gathered numbers in registers at once: fewer registers, more programs that wait side by side. results/table-h200.txt
# compares rows, chunks, warps and cache hints on an H200; none is better by more than a few percent.
_TILE = 2048
# More partial sums are added up in `_SUMS` parts first: torch takes 34 microseconds for a hundred thousand at once.
MOST_PARTS, _SUMS = 1 << 14, 256
# Below this many items sort keys have 16 bits: half the passes of a radix sort.
_SHORT_KEYS = 1 << 16


@triton.jit
def _first_kernel(p_by_item, p_first, N, num_firsts, LOWEST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of items,): where each item's entries begin; a binary search in the sorted keys, from LOWEST on."""
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
    p_order, p_first, p_coefs, p_out, p_in_items, p_in_order, p_in_first, p_in_grad, scale, num_rows,
    C: tl.constexpr, E: tl.constexpr, EPS: tl.constexpr, UPDATE: tl.constexpr, ROWWISE: tl.constexpr,
    OF_INPUTS: tl.constexpr, OF_OTHERS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, IN_CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS items,): gradient, and if UPDATE the AdamW step and the new unit vectors."""
    o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    if OF_INPUTS:
        o_t, m_t = o_v, o_v < num_rows
        o_v = tl.load(p_in_items + o_t, mask=m_t, other=0).to(tl.int32)
        b_first = tl.load(p_in_order + tl.load(p_in_first + o_v), mask=o_v > 0, other=-1)
        m_v = (o_v > 0) & (b_first == o_t)
    else:
        m_v = (o_v > 0) & (o_v < num_rows)
    if OF_OTHERS:
        b_begin, b_end = tl.load(p_in_first + o_v, mask=m_v, other=0), tl.load(p_in_first + o_v + 1, mask=m_v, other=0)
        m_v = m_v & (b_begin == b_end)
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

    b_g = _entry_sums(
        p_order=p_order, p_first=p_first, p_coefs=p_coefs, p_rows=p_out, o_v=o_v, m_v=m_v, o_e=o_e, C=C, E=E,
        WEIGHTED=True, CHUNK=CHUNK,
    )  # fmt: skip
    b_length = tl.sqrt(tl.sum(b_w * b_w, axis=1))
    b_inverse = 1.0 / tl.maximum(b_length, EPS)
    # Back through the normalisation: without the radial part, over the length.
    b_radial = tl.where(b_length > EPS, tl.sum(b_g * b_w, axis=1) * b_inverse * b_inverse, 0.0)
    b_g = (b_g - b_w * b_radial[:, None]) * b_inverse[:, None]
    if not OF_OTHERS:
        b_g += scale * _entry_sums(
            p_order=p_in_order, p_first=p_in_first, p_coefs=p_coefs, p_rows=p_in_grad, o_v=o_v, m_v=m_v, o_e=o_e, C=1,
            E=E, WEIGHTED=False, CHUNK=IN_CHUNK,
        )  # fmt: skip

    if UPDATE:
        b_square = b_g * b_g
        tl.store(p_partial + tl.program_id(0), tl.sum(b_square))
        if ROWWISE:
            b_square = tl.sum(b_square, axis=1)[:, None] / E
        b_w, b_avg, b_sq = moved(b_w, b_avg, b_sq, b_g, b_square, tl.load(p_factors), p_factors)
        tl.store(p_table + o_w, b_w, mask=m, eviction_policy="evict_first")
        tl.store(p_avg + o_w, b_avg, mask=m, eviction_policy="evict_first")
        tl.store(p_sq + o_sq, b_sq, mask=m_sq, eviction_policy="evict_first")
        b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_w * b_w, axis=1)), EPS)
        tl.store(p_unit + o_w, (b_w * b_inverse[:, None]).to(p_unit.dtype.element_ty), mask=m)
    else:
        tl.store(p_grad + o_w, b_g, mask=(o_v < num_rows)[:, None] & (o_e < E)[None, :])


@triton.jit
def _unit_kernel(
    p_table, p_unit, num_rows, E: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Grid (blocks of ROWS items,)."""
    o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    m = (o_v < num_rows)[:, None] & (o_e < E)[None, :]
    o_w = o_v.to(tl.int64)[:, None] * E + o_e[None, :]
    b_w = tl.load(p_table + o_w, mask=m, other=0.0)
    b_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(b_w * b_w, axis=1)), EPS)
    tl.store(p_unit + o_w, (b_w * b_inverse[:, None]).to(p_unit.dtype.element_ty), mask=m)


def _rows(width: int) -> dict[str, int]:
    """Block sizes of a program that has nothing to wait for: 512 numbers a warp, 16 a thread. Not tuned."""
    block_e = max(16, triton.next_power_of_2(width))
    return {"ROWS": max(1, 512 // block_e), "BLOCK_E": block_e, "num_warps": max(1, block_e // 512)}


def _tile(width: int, per_item: float) -> dict[str, int]:
    """Block sizes for so many score entries per item: few are gathered for several rows at once, many by chunks.

    For `shop` (E 128, under two entries an item) this is rows 2, chunk 2, one warp: the fastest tile in
    results/table-h200.txt, where other cache hints gain at most 3 %.
    """
    tile = _rows(width)
    tile["ROWS"] = 1 if per_item >= 16 else max(1, tile["ROWS"] // 2)
    room = _TILE // (tile["ROWS"] * tile["BLOCK_E"]) * tile["num_warps"]
    tile["CHUNK"] = max(1, min(room, 32, max(2, triton.next_power_of_2(int(per_item) + 1))))
    # Popular items are the input of many tokens, others of none.
    tile["IN_CHUNK"] = max(min(2, tile["CHUNK"]), tile["CHUNK"] // 4)
    return tile


def invert(items: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """See `trope.kernels.table.invert`."""
    flat = items.reshape(-1)
    assert flat.numel() <= 2**30, "the binary search adds two places in 32 bits"
    if num_items < _SHORT_KEYS:
        lowest = -(_SHORT_KEYS // 2)
        keys = torch.add(flat, lowest, out=torch.empty(flat.shape, dtype=torch.int16, device=items.device))
    else:
        lowest, keys = 0, flat.int()
    by_item, order = torch.sort(keys, stable=True)
    first_V = torch.empty(num_items + 2, dtype=torch.int32, device=items.device)
    block = 512  # not tuned
    _first_kernel[(triton.cdiv(num_items + 2, block),)](
        p_by_item=by_item,
        p_first=first_V,
        N=flat.numel(),
        num_firsts=num_items + 2,
        LOWEST=lowest,
        STEPS=flat.numel().bit_length(),
        BLOCK=block,
        num_warps=4,
    )
    return order, first_V


def check_entries(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries) -> None:
    """What the kernels take for granted of a table and its entries."""
    (rows, E), (T, C) = table_VE.shape, scores.coefs_TC.shape
    assert table_VE.dtype == torch.float32 and table_VE.is_contiguous()
    assert scores.out_TE.shape == (T, E) and scores.order.numel() == T * C < 2**31
    assert inputs.grad_TE is None or inputs.grad_TE.shape == (inputs.order.numel(), E)
    assert scores.first_V.numel() == inputs.first_V.numel() == rows + 1
    tensors = (*scores, *inputs[:4])
    assert all(tensor.is_contiguous() for tensor in tensors if tensor is not None)


def check_state(table_VE: Tensor, exp_avg_VE: Tensor, exp_avg_sq: Tensor, unit_VE: Tensor, factors: Tensor) -> None:
    """What the kernels take for granted of what an update writes, and of AdamW's factors."""
    for other in (exp_avg_VE, unit_VE):
        assert other.shape == table_VE.shape and other.is_contiguous()
    assert exp_avg_sq.shape in (table_VE.shape, table_VE.shape[:1]) and exp_avg_sq.is_contiguous()
    assert exp_avg_VE.dtype == exp_avg_sq.dtype == factors.dtype == torch.float32 and factors.shape == (8,)


def _entry_arguments(scores: ScoreEntries, inputs: InputEntries) -> dict[str, Any]:
    """What the gradient is made of, as `_table_kernel` names it."""
    return {
        "p_order": scores.order,
        "p_first": scores.first_V,
        "p_coefs": scores.coefs_TC,
        "p_out": scores.out_TE,
        "p_in_items": inputs.items_T,
        "p_in_order": inputs.order,
        "p_in_first": inputs.first_V,
        "p_in_grad": scores.out_TE if inputs.grad_TE is None else inputs.grad_TE,  # the former is not read
        "scale": inputs.scale,
        "C": scores.coefs_TC.shape[1],
    }


def table_gradient(table_VE: Tensor, scores: ScoreEntries, inputs: InputEntries) -> Tensor:
    """See `trope.kernels.table.table_gradient`; float32."""
    check_entries(table_VE, scores, inputs)
    rows, E = table_VE.shape
    grad_VE = torch.empty_like(table_VE)
    tile = _tile(E, scores.order.numel() / rows)
    # Without UPDATE the kernel touches the table, the entries and the gradient; the table stands in for the rest.
    unused = dict.fromkeys(("p_avg", "p_sq", "p_unit", "p_partial", "p_factors"), table_VE)
    _table_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        p_table=table_VE,
        p_grad=grad_VE,
        **unused,
        **_entry_arguments(scores, inputs),
        num_rows=rows,
        E=E,
        EPS=EPS,
        UPDATE=False,
        ROWWISE=False,
        OF_INPUTS=False,
        OF_OTHERS=False,
        **tile,
    )
    return grad_VE


def update_table(
    table_VE: Tensor, exp_avg_VE: Tensor, exp_avg_sq: Tensor, unit_VE: Tensor,
    scores: ScoreEntries, inputs: InputEntries, factors: Tensor, part: Part = "all",
) -> Tensor:  # fmt: skip
    """See `trope.kernels.table.update_table`; float32."""
    check_entries(table_VE, scores, inputs)
    check_state(table_VE, exp_avg_VE, exp_avg_sq, unit_VE, factors)
    rows, E = table_VE.shape
    tile = _tile(E, scores.order.numel() / rows)
    num_rows = inputs.order.numel() if part == "inputs" else rows
    blocks = triton.cdiv(num_rows, tile["ROWS"])
    sums = _SUMS if blocks > MOST_PARTS else 1
    blocks = triton.cdiv(blocks, sums) * sums  # rows beyond the last have no gradient
    if not blocks:
        return torch.zeros(1, dtype=torch.float32, device=table_VE.device)
    partial = torch.empty(blocks, dtype=torch.float32, device=table_VE.device)
    _table_kernel[(blocks,)](
        p_table=table_VE,
        p_avg=exp_avg_VE,
        p_sq=exp_avg_sq,
        p_unit=unit_VE,
        p_grad=table_VE,  # not touched with UPDATE
        p_partial=partial,
        p_factors=factors,
        **_entry_arguments(scores, inputs),
        num_rows=num_rows,
        E=E,
        EPS=EPS,
        UPDATE=True,
        ROWWISE=exp_avg_sq.ndim == 1,
        OF_INPUTS=part == "inputs",
        OF_OTHERS=part == "others",
        **tile,
    )
    return partial if sums == 1 else partial.view(sums, -1).sum(dim=1)


def unit_vectors(table_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """See `trope.kernels.table.unit_vectors`."""
    assert table_VE.dtype == torch.float32 and table_VE.is_contiguous()
    unit_VE = torch.empty(table_VE.shape, dtype=dtype, device=table_VE.device)
    tile = _rows(table_VE.shape[1])
    _unit_kernel[(triton.cdiv(len(table_VE), tile["ROWS"]),)](
        p_table=table_VE, p_unit=unit_VE, num_rows=len(table_VE), E=table_VE.shape[1], EPS=EPS, **tile
    )
    return unit_VE
