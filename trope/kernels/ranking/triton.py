"""Places by counting in tiles on tensor cores, exact: the score matrix never exists.

Notable: a float32 vector is split into two bf16 parts (hi, lo), and lo*hi + hi*lo + hi*hi is accumulated in float32 as
one product of three times the width; the small terms come first, while the sum is small. That score is off by at most
`margin` (below). An item that is further than this from the positive's own score is counted at once. The others, about
one in a thousand, are near: their bits go into a short list of 32-item words per row, and a second kernel decides them
by the exact score of ranking/reference.py. A row whose list is full (a collapsed model: everything ties) is decided
item by item, so the result is exact whatever the model, without a word to the host. The order of a list depends on
atomics; sums of integers do not.

Names of the kernel arguments:

- d_u, d_v: tensor descriptors of the split users [S, 2 E'] and items [V, 2 E'], high parts then low parts.
- p_users [B, E], p_items [V + 1, E]: the scaled float32 vectors. p_rows, p_positives: user's row and item of each
  positive.
- p_own: exact score of each positive, float32 [S]. p_low, p_high: scores in between are near, float32 [S].
- p_fill: words in each row's list [S], may pass C. p_places, p_words: the lists [S, C], which 32 items and which of
  them.
- p_left, p_offsets: the items left out, and where each user's begin [B + 1].
- p_better, p_ties: the results, int32 [S].
- S_TILES, V_TILES: tiles of positives and of items; PER_SPLIT: item tiles of a program. FACTOR: 2^shift of the exact
  score.
- WIDEN: multiply in float32, for the interpreter. STEPS: steps of BLOCK_E over the width.

Prefixes: i_ index, o_ offset, p_ pointer, d_ tensor descriptor, b_ block in registers, m_ mask.
Shape letters: S positives (a row each), V items, E width (as stored), C words of a row's list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trope.kernels.ranking.reference import shift_of

# Bytes of the near lists of one launch: a bound on memory, not tuned.
LISTS = 1 << 29
# Programs of the counting kernel: 8 waves over an H200's 132 multiprocessors, so that the last wave hardly counts. The
# number 8 was not tuned.
PROGRAMS = 8 * 132


def margin(width: int) -> float:
    """How far a counted score may be from the exact one, relative to the product of the vectors' lengths.

    Each part rounds by 2^-9 of what it stands for, so that lo*lo and the two remainders, which are left out, are
    3 * 2^-18. A tensor core adds 16 products to the sum at a time: aligned to the largest and cut off at 24 bits or
    more, that is 18 errors of at most 2^-23 of the sum of all sizes; an addition after the other has fewer. The smaller
    terms come to 2^-8 of that. The exact score and the thresholds are rounded to float32.
    """
    return 1.02 * (3 * 2.0**-18 + width * 2.0**-23 * (18 / 16 + 2.0**-6) + 2.0**-21)


def split(x_NE: Tensor) -> Tensor:
    """bf16 [N, 2 E']: high parts, then low parts, each with zeros up to a whole number of the kernel's steps."""
    step = _tile(x_NE)["BLOCK_E"]
    padding = -x_NE.shape[1] % step
    hi_NE = x_NE.bfloat16()
    lo_NE = (x_NE - hi_NE).bfloat16()
    return torch.cat([torch.nn.functional.pad(part, (0, padding)) for part in (hi_NE, lo_NE)], dim=1)


@triton.jit
def _exact(p_u, p_items, o_n, m_n, E, FACTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
           STEPS: tl.constexpr):  # fmt: skip
    """Fixed-point scores of the user at p_u with the items o_n where m_n, rounded to float32 [BLOCK_N]."""
    b_sum = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.int64)
    for i_e in tl.static_range(STEPS):
        o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
        m_e = o_e < E
        b_u = tl.load(p_u + o_e, mask=m_e, other=0.0).to(tl.float64) * FACTOR
        p_v = p_items + o_n.to(tl.int64)[:, None] * E + o_e[None, :]
        b_v = tl.load(p_v, mask=m_n[:, None] & m_e[None, :], other=0.0)
        b_sum += (b_v.to(tl.float64) * b_u[None, :]).to(tl.int64)
    return tl.sum(b_sum, axis=1).to(tl.float32)


@triton.jit
def _own_kernel(p_users, p_items, p_rows, p_positives, p_own, E, FACTOR: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_E: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Grid (S,): the exact score of one positive."""
    i_s = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    p_u = p_users + tl.load(p_rows + i_s) * E
    b_item = tl.load(p_positives + i_s + 0 * o_n)
    b_own = _exact(
        p_u=p_u, p_items=p_items, o_n=b_item, m_n=o_n == 0, E=E, FACTOR=FACTOR, BLOCK_N=BLOCK_N, BLOCK_E=BLOCK_E,
        STEPS=STEPS,
    )  # fmt: skip
    tl.store(p_own + i_s + 0 * o_n, b_own, mask=o_n == 0)


# Sizes that change from batch to batch must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["S", "V", "S_TILES", "V_TILES", "PER_SPLIT", "C"])
def _count_kernel(
    d_u, d_v, p_low, p_high, p_better, p_fill, p_places, p_words, S, V, S_TILES, V_TILES, PER_SPLIT, C,
    E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (S_TILES x splits,): a tile of positives against PER_SPLIT item tiles.

    Programs that run together share items, which stay in the cache.
    """
    i_s = tl.program_id(0) % S_TILES
    i_first = tl.program_id(0) // S_TILES * PER_SPLIT
    o_s = i_s * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < S
    # A row past the end is neither better than nor near anything.
    b_low = tl.load(p_low + o_s, mask=m_s, other=float("inf"))
    b_high = tl.load(p_high + o_s, mask=m_s, other=float("inf"))
    b_better = tl.zeros((BLOCK_S,), dtype=tl.int32)
    o_bit = tl.arange(0, 32)
    o_word = tl.arange(0, BLOCK_V // 32)
    for i_v in range(i_first, min(i_first + PER_SPLIT, V_TILES)):
        b_score = tl.zeros((BLOCK_S, BLOCK_V), dtype=tl.float32)
        for i_k in range(3 * (E // BLOCK_E)):
            # lo of the users with hi of the items, hi with lo, hi with hi.
            i_part = i_k // (E // BLOCK_E)
            o_k = i_k * BLOCK_E - i_part * E
            b_u = d_u.load([i_s * BLOCK_S, o_k + tl.where(i_part == 0, E, 0)])
            b_v = d_v.load([i_v * BLOCK_V, o_k + tl.where(i_part == 1, E, 0)])
            if WIDEN:  # the interpreter multiplies bf16 as if its bits were whole numbers
                b_u, b_v = b_u.to(tl.float32), b_v.to(tl.float32)
            b_score = tl.dot(b_u, b_v.T, b_score)
        m_v = (i_v * BLOCK_V + tl.arange(0, BLOCK_V) < V)[None, :]
        b_score = tl.where(m_v, b_score, float("-inf"))
        b_above = (b_score > b_high[:, None]).to(tl.int32)
        b_better += tl.sum(b_above, axis=1)
        b_near = (b_score >= b_low[:, None]).to(tl.int32) - b_above
        b_bits = tl.reshape(b_near, (BLOCK_S, BLOCK_V // 32, 32)) << o_bit[None, None, :]
        b_word = tl.sum(b_bits, axis=2)
        m_word = b_word != 0
        p_row = p_fill + o_s[:, None] + 0 * o_word[None, :]
        b_slot = tl.atomic_add(p_row, 1 + 0 * b_word, mask=m_word, sem="relaxed")
        o_slot = o_s.to(tl.int64)[:, None] * C + b_slot
        m_slot = m_word & (b_slot < C)
        tl.store(p_places + o_slot, i_v * (BLOCK_V // 32) + o_word[None, :] + 0 * b_word, mask=m_slot)
        tl.store(p_words + o_slot, b_word, mask=m_slot)
    tl.atomic_add(p_better + o_s, b_better, mask=m_s, sem="relaxed")


@triton.jit
def _lowest_bit(b_low):
    """The place of the only bit set in each number below 2^32."""
    b_place = ((b_low & 0xAAAAAAAA) != 0).to(tl.int64) + 2 * ((b_low & 0xCCCCCCCC) != 0).to(tl.int64)
    b_place += 4 * ((b_low & 0xF0F0F0F0) != 0).to(tl.int64) + 8 * ((b_low & 0xFF00FF00) != 0).to(tl.int64)
    return b_place + 16 * ((b_low & 0xFFFF0000) != 0).to(tl.int64)


@triton.jit(do_not_specialize=["V", "C"])
def _decide_kernel(
    p_users, p_items, p_rows, p_own, p_fill, p_places, p_words, p_left, p_offsets, p_better, p_ties, V, C, E,
    FACTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (S,): near items (or all items, if the list was too short) and items left out, by their exact scores."""
    i_s = tl.program_id(0).to(tl.int64)
    i_user = tl.load(p_rows + i_s)
    p_u = p_users + i_user * E
    own = tl.load(p_own + i_s)
    fill = tl.load(p_fill + i_s)
    o_n = tl.arange(0, BLOCK_N)
    b_better = tl.zeros((BLOCK_N,), dtype=tl.int32)
    b_equal = tl.zeros((BLOCK_N,), dtype=tl.int32)
    counted = tl.load(p_better + i_s)
    if fill > C:
        counted = counted * 0
        for i_n in range(0, V, BLOCK_N):
            m_n = i_n + o_n < V
            b_score = _exact(
                p_u=p_u, p_items=p_items, o_n=1 + i_n + o_n, m_n=m_n, E=E, FACTOR=FACTOR, BLOCK_N=BLOCK_N,
                BLOCK_E=BLOCK_E, STEPS=STEPS,
            )  # fmt: skip
            b_better += (m_n & (b_score > own)).to(tl.int32)
            b_equal += (m_n & (b_score == own)).to(tl.int32)
    else:
        for i_n in range(0, fill, BLOCK_N):
            m_n = i_n + o_n < fill
            o_slot = i_s * C + i_n + o_n
            b_word = tl.load(p_words + o_slot, mask=m_n, other=0).to(tl.int64) & 0xFFFFFFFF
            b_base = 1 + 32 * tl.load(p_places + o_slot, mask=m_n, other=0)
            while tl.max(b_word, axis=0) > 0:
                m_n = b_word != 0
                b_item = b_base + _lowest_bit(b_word & -b_word)
                b_score = _exact(
                    p_u=p_u, p_items=p_items, o_n=b_item, m_n=m_n, E=E, FACTOR=FACTOR, BLOCK_N=BLOCK_N,
                    BLOCK_E=BLOCK_E, STEPS=STEPS,
                )  # fmt: skip
                b_better += (m_n & (b_score > own)).to(tl.int32)
                b_equal += (m_n & (b_score == own)).to(tl.int32)
                b_word = b_word & (b_word - 1)
    i_end = tl.load(p_offsets + i_user + 1)
    for i_n in range(tl.load(p_offsets + i_user), i_end, BLOCK_N):
        b_item = tl.load(p_left + i_n + o_n, mask=i_n + o_n < i_end, other=0)
        m_n = b_item != 0
        b_score = _exact(
            p_u=p_u, p_items=p_items, o_n=b_item, m_n=m_n, E=E, FACTOR=FACTOR, BLOCK_N=BLOCK_N, BLOCK_E=BLOCK_E,
            STEPS=STEPS,
        )  # fmt: skip
        b_better -= (m_n & (b_score > own)).to(tl.int32)
        b_equal -= (m_n & (b_score == own)).to(tl.int32)
    tl.store(p_better + i_s, counted + tl.sum(b_better, axis=0))
    tl.store(p_ties + i_s, tl.sum(b_equal, axis=0) - 1)  # a positive equals itself


def _tile(x: Tensor) -> dict[str, int]:
    """Block sizes of the counting kernel: on a GPU a full tile of Hopper's tensor cores; small ones to interpret.

    No file holds a comparison with other tiles; results/eval-h200.csv is measured with these.
    """
    if not x.is_cuda:
        return {"BLOCK_S": 16, "BLOCK_V": 64, "BLOCK_E": 16, "WIDEN": True}
    return {"BLOCK_S": 128, "BLOCK_V": 256, "BLOCK_E": 64, "WIDEN": False}


def _exact_tile(width: int) -> dict[str, int | float]:
    """Block sizes of the exact score: 16 items at a time, 128 elements wide, 16 a thread. Not tuned."""
    block_e = min(128, triton.next_power_of_2(width))
    steps = triton.cdiv(width, block_e)
    return {"FACTOR": 2.0 ** shift_of(width), "BLOCK_N": 16, "BLOCK_E": block_e, "STEPS": steps, "num_warps": 4}


def list_words(items: int) -> int:
    """Words of a row's list: a model drawn at random fills about a fifth of it, a trained one less.

    A list that is too short costs time and nothing else.
    """
    return 512 + items // 512


def places(
    users_BE: Tensor, items_VE: Tensor, split_VE: Tensor, norm: Tensor, rows_S: Tensor, positives_S: Tensor,
    left_out_T: Tensor, left_offsets_B: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `places` in ranking/reference.py, in as many launches as bound the memory of the lists."""
    users_BE, items_VE, rows_S, positives_S = (x.contiguous() for x in (users_BE, items_VE, rows_S, positives_S))
    left_out_T, left_offsets_B = left_out_T.contiguous(), left_offsets_B.contiguous()
    better_S, ties_S = (torch.empty(len(rows_S), dtype=torch.int32, device=rows_S.device) for _ in range(2))
    words = list_words(len(split_VE))
    launches = triton.cdiv(len(rows_S), max(1, LISTS // (8 * words)))
    # Whole tiles of rows, so that every part is aligned like the first: another alignment is another kernel.
    tile = _tile(users_BE)["BLOCK_S"]
    step = max(1, triton.cdiv(len(rows_S), max(1, launches) * tile)) * tile
    for first in range(0, len(rows_S), step):
        part = slice(first, first + step)
        _places(
            users_BE, items_VE, split_VE, norm, rows_S[part], positives_S[part], left_out_T, left_offsets_B,
            better_S[part], ties_S[part], words,
        )  # fmt: skip
    return better_S, ties_S


def _places(
    users_BE: Tensor, items_VE: Tensor, split_VE: Tensor, norm: Tensor, rows_S: Tensor, positives_S: Tensor,
    left_out_T: Tensor, left_offsets_B: Tensor, better_S: Tensor, ties_S: Tensor, words: int,
) -> None:  # fmt: skip
    S, V, E = len(rows_S), len(split_VE), users_BE.shape[1]
    exact, tile = _exact_tile(E), _tile(users_BE)
    own_S = torch.empty(S, dtype=torch.float32, device=rows_S.device)
    _own_kernel[(S,)](
        p_users=users_BE,
        p_items=items_VE,
        p_rows=rows_S,
        p_positives=positives_S,
        p_own=own_S,
        E=E,
        **(exact | {"BLOCK_N": 1}),
    )
    mine_SE = users_BE[rows_S]
    split_SE = split(mine_SE)
    reach_S = torch.linalg.vector_norm(mine_SE, dim=1) * norm * margin(split_SE.shape[1] // 2)
    centre_S = own_S * 2.0 ** -shift_of(E)
    low_S, high_S = centre_S - reach_S, centre_S + reach_S
    fill_S = torch.zeros(S, dtype=torch.int32, device=rows_S.device)
    places_SC = torch.empty((S, words), dtype=torch.int32, device=rows_S.device)
    words_SC = torch.empty_like(places_SC)
    s_tiles, v_tiles = triton.cdiv(S, tile["BLOCK_S"]), triton.cdiv(V, tile["BLOCK_V"])
    per_split = triton.cdiv(v_tiles, max(1, min(PROGRAMS // s_tiles, v_tiles)))
    _count_kernel[(s_tiles * triton.cdiv(v_tiles, per_split),)](
        d_u=TensorDescriptor.from_tensor(split_SE, [tile["BLOCK_S"], tile["BLOCK_E"]]),
        d_v=TensorDescriptor.from_tensor(split_VE, [tile["BLOCK_V"], tile["BLOCK_E"]]),
        p_low=low_S,
        p_high=high_S,
        p_better=better_S.zero_(),
        p_fill=fill_S,
        p_places=places_SC,
        p_words=words_SC,
        S=S,
        V=V,
        S_TILES=s_tiles,
        V_TILES=v_tiles,
        PER_SPLIT=per_split,
        C=words,
        E=split_SE.shape[1] // 2,
        **tile,
        num_warps=8,
        num_stages=4,
    )
    _decide_kernel[(S,)](
        p_users=users_BE,
        p_items=items_VE,
        p_rows=rows_S,
        p_own=own_S,
        p_fill=fill_S,
        p_places=places_SC,
        p_words=words_SC,
        p_left=left_out_T,
        p_offsets=left_offsets_B,
        p_better=better_S,
        p_ties=ties_S,
        V=V,
        C=words,
        E=E,
        **exact,
    )
