# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""A tile of attention scores and its gradient: device functions that the forward and backward kernels share.

Kernels are launched with flat keyword arguments (attention/arguments.py). Inside a kernel two small structs carry them
down the levels: `BiasInputs` is made once in each kernel, `Pairs` once for each tile.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: B sequences, L positions, T tokens, H heads, D head dim, K time buckets.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trope.kernels.attention.reference import BUCKET_WIDTH

_PER_BUCKET = tl.constexpr(1 / BUCKET_WIDTH)
# Score of a pair that a query must not see. SiLU and its slope are 0 there in float32, bf16 and fp16.
HIDDEN = tl.constexpr(-16384.0)


class BiasInputs(NamedTuple):
    """What the bias is formed from, under the names of attention/arguments.py."""

    p_position: Any
    p_time: Any
    p_times: Any
    p_query_times: Any
    p_buckets: Any
    p_sheet: Any
    s_row: Any
    s_sheet: Any
    L: Any
    centre: Any
    last: Any


class Pairs(NamedTuple):
    """The queries and keys of a tile: i_b sequence, start its first token, o_m and o_n places in the sequence of the
    queries and of the keys, m_m and m_n which of them exist."""

    i_b: Any
    start: Any
    o_m: Any
    o_n: Any
    m_m: Any
    m_n: Any


@triton.jit
def unit_of(i_program, first, UNITS, TILES):
    """Unit of a program, its sequence and its tile; units outside of 0 .. UNITS - 1 do not exist.

    A launch has arguments.programs_of(first, UNITS, TILES) programs. Last tiles come first, because their walks over
    the keys are the longest.
    """
    before = first % TILES
    sequences = (before + UNITS + TILES - 1) // TILES
    i_m = TILES - 1 - i_program // sequences
    i_sequence = i_program % sequences
    return i_sequence * TILES + i_m - before, first // TILES + i_sequence, i_m


@triton.jit
def sigmoid(b_s, FAST: tl.constexpr):
    """Logistic function; by the hardware's tanh if FAST (error 2^-11, below bf16's own)."""
    if FAST:
        b_t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [b_s * 0.5], dtype=tl.float32, is_pure=True, pack=1
        )
        b_sigmoid = 0.5 * b_t + 0.5
    else:
        b_sigmoid = 1.0 / (1.0 + tl.exp(-tl.maximum(b_s, -80.0)))  # exp(88) would be too large for float32
    return b_sigmoid


@triton.jit
def dot(b_x, b_y, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """A product summed in float32; unless FAST, of operands in float32 (the interpreter cannot multiply bf16).

    PRECISION: of a product of float32, "ieee" or "tf32x3".
    """
    if not FAST:
        b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
    return tl.dot(b_x, b_y, input_precision=PRECISION)


@triton.jit
def load_tile(p_x, o_row, m_row, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head [rows, BLOCK_D], zero where masked."""
    o_d = tl.arange(0, BLOCK_D)
    m = m_row[:, None] if D == BLOCK_D else m_row[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + o_row[:, None] * s_row + o_d[None, :], mask=m, other=0.0)


@triton.jit
def store_tile(p_x, b_x, o_row, m_row, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, where not masked: the inverse of `load_tile`."""
    o_d = tl.arange(0, BLOCK_D)
    p = p_x + o_row[:, None] * s_row + o_d[None, :]
    tl.store(p, b_x.to(p_x.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def with_one(b_all, b_x):
    """A tuple with one more element: Triton joins tuples by + alone."""
    return b_all + (b_x,)  # noqa: RUF005


@triton.jit
def load_heads(p_x, i_h, o_row, m_row, s_row, s_h, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_tile` of heads i_h .. i_h + HEADS - 1, a tuple."""
    found = ()
    for i in tl.static_range(HEADS):
        found = with_one(found, load_tile(p_x + (i_h + i) * s_h, o_row, m_row, s_row, D, BLOCK_D))
    return found


@triton.jit
def zeros(HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A float32 sum for each head, a tuple."""
    found = ()
    for _ in tl.static_range(HEADS):
        found = with_one(found, tl.zeros((ROWS, COLUMNS), dtype=tl.float32))
    return found


@triton.jit
def buckets_of(b_tq, b_tk, last):
    """Buckets [queries, keys] of int32 seconds since the sequence began."""
    b_gap = tl.maximum(tl.abs(b_tq[:, None] - b_tk[None, :]), 1)
    return tl.minimum((tl.log(b_gap.to(tl.float32)) * _PER_BUCKET).to(tl.int32), last)


@triton.jit
def load_times(p_times, o_token, m, t_first):
    """Seconds since the sequence's first event, int32, held within 34 years (2^30 s) of it."""
    b_t = tl.load(p_times + o_token, mask=m, other=0) - t_first
    return tl.minimum(tl.maximum(b_t, -(1 << 30)), 1 << 30).to(tl.int32)


@triton.jit
def buckets_from_times(p_times, p_query_times, last, pairs):
    """Buckets [queries, keys] of a tile, from the times."""
    t_first = tl.load(p_times + pairs.start)
    b_tq = load_times(p_query_times, pairs.start + pairs.o_m, pairs.m_m, t_first)
    b_tk = load_times(p_times, pairs.start + pairs.o_n, pairs.m_n, t_first)
    return buckets_of(b_tq, b_tk, last)


@triton.jit
def load_buckets(p_times, p_query_times, p_buckets, s_row, L, last, pairs, CACHED: tl.constexpr):
    """Buckets [queries, keys] of a tile, from the kept ones if CACHED, else from the times."""
    if CACHED:
        p_rows = p_buckets + pairs.i_b.to(tl.int64) * L * s_row
        p_pairs = p_rows + pairs.o_m[:, None] * s_row + pairs.o_n[None, :]
        b_bucket = tl.load(p_pairs, mask=pairs.m_m[:, None], other=0).to(tl.int32)
    else:
        b_bucket = buckets_from_times(p_times, p_query_times, last, pairs)
    return b_bucket


@triton.jit
def form_bias(bias, pairs, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr):
    """Both biases of a tile, float32 [queries, keys]; HIDDEN for keys after their query."""
    o_distance = pairs.o_n[None, :] - pairs.o_m[:, None]
    b_bias = tl.zeros(o_distance.shape, dtype=tl.float32)
    if HAS_POSITION:
        # Rows beyond a sequence may be further apart than the weights reach.
        b_bias += tl.load(bias.p_position + bias.centre + tl.maximum(tl.minimum(o_distance, 0), -bias.centre))
    if HAS_TIME:
        b_bucket = load_buckets(
            p_times=bias.p_times, p_query_times=bias.p_query_times, p_buckets=bias.p_buckets, s_row=bias.s_row,
            L=bias.L, last=bias.last, pairs=pairs, CACHED=CACHED,
        )  # fmt: skip
        # Places beyond a sequence were never written.
        b_bias += tl.load(bias.p_time + tl.minimum(b_bucket, bias.last))
    return tl.where(o_distance <= 0, b_bias, HIDDEN)


@triton.jit
def unit_tile(p_sheet, BLOCK: tl.constexpr):
    """The unit matrix by which the sheet is added."""
    o = tl.arange(0, BLOCK)
    return tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(p_sheet.dtype.element_ty)


@triton.jit
def bias_tile(
    b_unit, bias, pairs,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, CACHED: tl.constexpr, SHEET: tl.constexpr,
    FAST: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Bias of a tile, the same for all heads: float32 [queries, keys], or [keys, queries] if TRANSPOSED."""
    if SHEET:
        # Rows of a tile that are beyond the sequence are written too: nothing needs a mask.
        p_rows = bias.p_sheet + pairs.i_b.to(tl.int64) * bias.s_sheet
        b_bias = tl.load(p_rows + pairs.o_m[:, None] * bias.s_row + pairs.o_n[None, :])
    else:
        b_bias = form_bias(bias, pairs, HAS_POSITION=HAS_POSITION, HAS_TIME=HAS_TIME, CACHED=CACHED)
    if TRANSPOSED:
        b_bias = tl.trans(b_bias)
    if SHEET and FAST:
        b_bias = tl.dot(b_bias, b_unit)
    return b_bias.to(tl.float32)


@triton.jit
def score_tile(b_q, b_k, b_bias, FAST: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of one head with bias [queries, keys], or [keys, queries] if TRANSPOSED, as the bias is."""
    if TRANSPOSED:
        b_rows, b_columns = b_k, b_q
    else:
        b_rows, b_columns = b_q, b_k
    if FAST:
        return tl.dot(b_rows, tl.trans(b_columns), b_bias)
    return dot(b_rows, tl.trans(b_columns), FAST, PRECISION) + b_bias


@triton.jit
def score_gradient(b_q, b_k, b_v, b_dy, b_bias, FAST: tl.constexpr, TRANSPOSED: tl.constexpr):
    """silu(s) and the gradient of s, both without the factor 1/n, [queries, keys] or TRANSPOSED; zero where hidden."""
    b_s = score_tile(b_q, b_k, b_bias, FAST=FAST, TRANSPOSED=TRANSPOSED, PRECISION="ieee")
    b_dp = dot(b_v, tl.trans(b_dy), FAST, "ieee") if TRANSPOSED else dot(b_dy, tl.trans(b_v), FAST, "ieee")
    b_sig = sigmoid(b_s, FAST)
    b_a = b_s * b_sig
    return b_a, b_dp * (b_sig + b_a * (1.0 - b_sig))
