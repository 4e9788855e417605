"""The fused sampled softmax: gathers each candidate's vector once and has loss, gradient and coefficients from it.

Notable:
- one warp per token: a chunk of candidate rows [CHUNK, E] is scored and, still in registers, added to the gradient with
  the running maximum of flash attention; sums over E are shuffles, sums over candidates stay inside a thread;
- the target starts the softmax and is kept out of the sums, so softmax - 1 has no cancellation and 128 negatives fill
  whole chunks;
- raw scores go to `coefs` and are turned into coefficients by the same program at the end;
- negatives come from Philox, four to a call.

Names of the kernel arguments:

- p_x: raw outputs of the network [T, E], rows s_x elements apart. p_out: normalised, in the dtype of the item vectors
  [T, E].
- p_candidates: [T, C]; s_c elements between rows in the softmax, s_t between rows and s_c between columns in the draw.
- p_unit: item vectors [V + 1, E]. p_weight: float32 [1].
- p_loss [T], p_grad [T, E] (by p_x), p_coefs [T, C] (by each cosine): float32 results.
- CHUNK: candidates in registers at once. BLOCK_C: candidates of a pass over the scores. BLOCK_E: E rounded up.
- p_seed: int64 [1]. N: negatives of a token.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask, s_ stride.
Shape letters: T tokens, E model width, V catalogue, C candidates of a token (the target and N negatives).
"""

# Triton's own language: its functions are compiled, not called, and its constexpr arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.softmax.reference import EPS, SoftmaxResult

# Gathered numbers of a chunk in a warp's registers, while the next chunk is on its way: 64 numbers a thread each. No
# file holds a comparison with other sizes; at this one the kernel takes 0.62 ms on `shop` (results/profile-h200.txt).
_TILE = 2048


@triton.jit
def _load_ids(p_ids, i_c, C: tl.constexpr, CHUNK: tl.constexpr):
    o_c = i_c + tl.arange(0, CHUNK)
    return tl.load(p_ids + o_c, mask=o_c < C, other=0)


@triton.jit
def _load_rows(p_unit, b_id, target, o_e, E: tl.constexpr):
    """The vectors of a chunk of negatives [CHUNK, E]; zeros for those left out."""
    m_c = (b_id != target) & (b_id != 0)
    p_rows = p_unit + b_id.to(tl.int64)[:, None] * E + o_e[None, :]
    return tl.load(p_rows, mask=m_c[:, None] & (o_e < E)[None, :], other=0.0)


@triton.jit
def _softmax_kernel(
    p_x, p_candidates, p_unit, p_weight, p_loss, p_grad, p_out, p_coefs, s_x, s_c, inv_temperature,
    C: tl.constexpr, E: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (T,): loss, gradient and coefficients of one token."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    p_ids, p_scores = p_candidates + i_t * s_c, p_coefs + i_t * C
    target = tl.load(p_ids)
    b_x = tl.load(p_x + i_t * s_x + o_e, mask=m_e, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(b_x * b_x))
    inv_length = 1.0 / tl.maximum(length, EPS)
    b_rounded = (b_x * inv_length).to(p_out.dtype.element_ty)
    tl.store(p_out + i_t * E + o_e, b_rounded, mask=m_e)

    if target == 0:
        tl.store(p_loss + i_t, 0.0)
        tl.store(p_grad + i_t * E + o_e, tl.zeros((BLOCK_E,), tl.float32), mask=m_e)
        for i_c in range(0, C, BLOCK_C):
            o_c = i_c + tl.arange(0, BLOCK_C)
            tl.store(p_scores + o_c, tl.zeros((BLOCK_C,), tl.float32), mask=o_c < C)
    else:
        b_out = b_rounded.to(tl.float32)
        p_target = p_unit + target.to(tl.int64) * E + o_e
        b_target = tl.load(p_target, mask=m_e, other=0.0).to(tl.float32)
        target_score = tl.sum(b_out * b_target) * inv_temperature
        largest, total = target_score, 0.0  # total and b_sum: the negatives', relative to exp(largest)
        b_sum = tl.zeros((BLOCK_E,), tl.float32)
        b_next_id = _load_ids(p_ids, 1, C, CHUNK)
        b_next_rows = _load_rows(p_unit, b_next_id, target, o_e, E)
        b_after_id = _load_ids(p_ids, 1 + CHUNK, C, CHUNK)
        for i_c in range(1, C, CHUNK):
            o_c = i_c + tl.arange(0, CHUNK)
            b_id, b_rows = b_next_id, b_next_rows.to(tl.float32)
            b_next_id = b_after_id
            b_next_rows = _load_rows(p_unit, b_next_id, target, o_e, E)
            b_after_id = _load_ids(p_ids, i_c + 2 * CHUNK, C, CHUNK)
            m_c = (b_id != target) & (b_id != 0)
            b_score = tl.sum(b_rows * b_out[None, :], axis=1) * inv_temperature
            b_score = tl.where(m_c, b_score, float("-inf"))
            tl.store(p_scores + o_c, b_score, mask=o_c < C)
            new_largest = tl.maximum(largest, tl.max(b_score))
            rescale = tl.exp(largest - new_largest)
            b_share = tl.exp(b_score - new_largest)
            total = total * rescale + tl.sum(b_share)
            b_sum = b_sum * rescale + tl.sum(b_rows * b_share[:, None], axis=0)
            largest = new_largest

        all_total = total + tl.exp(target_score - largest)
        log_total = tl.log(all_total) + largest
        tl.store(p_loss + i_t, log_total - target_score)
        scale = tl.load(p_weight) * inv_temperature
        # Loaded again: in the loop their registers are worth more.
        b_target = tl.load(p_target, mask=m_e, other=0.0).to(tl.float32)
        b_direction = tl.load(p_x + i_t * s_x + o_e, mask=m_e, other=0.0).to(tl.float32) * inv_length
        b_grad = (b_sum - b_target * total) * (scale / all_total)
        radial = tl.where(length > EPS, tl.sum(b_grad * b_direction), 0.0)
        tl.store(p_grad + i_t * E + o_e, (b_grad - b_direction * radial) * inv_length, mask=m_e)

        tl.store(p_scores, -scale * (total / all_total))
        tl.debug_barrier()  # the scores were written by other threads than those that read them now
        for i_c in range(1, C, BLOCK_C):
            o_c = i_c + tl.arange(0, BLOCK_C)
            b_score = tl.load(p_scores + o_c, mask=o_c < C, other=0.0)
            tl.store(p_scores + o_c, scale * tl.exp(b_score - log_total), mask=o_c < C)


@triton.jit
def _uniform_kernel(p_candidates, p_seed, T, num_items, s_t, s_c, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of calls,): one Philox call gives negatives k, Q + k, 2 Q + k and 3 Q + k of a token, Q = N / 4."""
    Q: tl.constexpr = (N + 3) // 4
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_t, o_k = o_i // Q, o_i % Q
    m_t = o_t < T
    p_row = p_candidates + o_t.to(tl.int64) * s_t
    m_target = tl.load(p_row, mask=m_t, other=0) != 0
    b_0, b_1, b_2, b_3 = tl.randint4x(tl.load(p_seed), o_i)
    _store_items(p_row, s_c, b_0, o_k, m_t, m_target, num_items, N)
    _store_items(p_row, s_c, b_1, o_k + Q, m_t, m_target, num_items, N)
    _store_items(p_row, s_c, b_2, o_k + 2 * Q, m_t, m_target, num_items, N)
    _store_items(p_row, s_c, b_3, o_k + 3 * Q, m_t, m_target, num_items, N)


@triton.jit
def _store_items(p_row, s_c, b_random, o_n, m_t, m_target, num_items, N: tl.constexpr):
    """Items from 32 random bits each, into column o_n + 1 of the candidates; 0 where the token has no target."""
    # The high word of random * num_items: uniform over 0 .. num_items - 1 up to num_items / 2^32.
    b_high = (b_random.to(tl.uint32, bitcast=True).to(tl.uint64) * num_items) >> 32
    b_item = tl.where(m_target, b_high.to(tl.int32) + 1, 0)
    tl.store(p_row + (o_n + 1) * s_c, b_item.to(p_row.dtype.element_ty), mask=m_t & (o_n < N))


def _tile(width: int, negatives: int) -> dict[str, int]:
    """Block sizes: a warp as long as a thread's share of the vectors fits its registers."""
    block_e = max(16, triton.next_power_of_2(width))
    warps = max(1, block_e // 512)
    chunk = max(1, min(_TILE * warps // block_e, 64, triton.next_power_of_2(negatives)))
    return {"CHUNK": chunk, "BLOCK_C": 128, "BLOCK_E": block_e, "num_warps": warps}


def sampled_softmax(
    x_TE: Tensor, candidates_TC: Tensor, unit_VE: Tensor, weight: Tensor, temperature: float
) -> SoftmaxResult:  # fmt: skip
    """See `trope.kernels.softmax.sampled_softmax`; float32 results."""
    (T, E), C = x_TE.shape, candidates_TC.shape[1]
    assert len(candidates_TC) == T and unit_VE.shape[1] == E and unit_VE.is_contiguous() and weight.numel() == 1
    assert C >= 2, "a softmax needs at least one negative"
    x_TE = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
    candidates_TC = candidates_TC if candidates_TC.stride(1) == 1 else candidates_TC.contiguous()
    result = SoftmaxResult(
        loss_T=torch.empty(T, dtype=torch.float32, device=x_TE.device),
        grad_x_TE=torch.empty((T, E), dtype=torch.float32, device=x_TE.device),
        out_TE=torch.empty((T, E), dtype=unit_VE.dtype, device=x_TE.device),
        coefs_TC=torch.empty((T, C), dtype=torch.float32, device=x_TE.device),
    )
    if T:
        _softmax_kernel[(T,)](
            p_x=x_TE,
            p_candidates=candidates_TC,
            p_unit=unit_VE,
            p_weight=weight,
            p_loss=result.loss_T,
            p_grad=result.grad_x_TE,
            p_out=result.out_TE,
            p_coefs=result.coefs_TC,
            s_x=x_TE.stride(0),
            s_c=candidates_TC.stride(0),
            inv_temperature=1.0 / temperature,
            C=C,
            E=E,
            EPS=EPS,
            **_tile(E, C - 1),
        )
    return result


def draw_uniform(num_items: int, seed: Tensor, candidates_TC: Tensor) -> None:
    """See `trope.kernels.softmax.draw_uniform`; in place."""
    T, C = candidates_TC.shape
    assert 0 < num_items < 2**31 and seed.dtype == torch.int64 and seed.numel() == 1
    block = 256  # Philox calls of a program; not tuned
    calls = T * triton.cdiv(C - 1, 4)
    assert calls < 2**31 - block, "Philox's counter is a 32-bit one here"
    if calls:
        _uniform_kernel[(triton.cdiv(calls, block),)](
            p_candidates=candidates_TC,
            p_seed=seed,
            T=T,
            num_items=num_items,
            s_t=candidates_TC.stride(0),
            s_c=candidates_TC.stride(1),
            N=C - 1,
            BLOCK=block,
            num_warps=4,
        )
