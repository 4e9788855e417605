# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The watch in one launch of one program.

Names of the kernel arguments: p_loss, p_norms [N], and the four tensors of `Watched` [P]; p_norm receives the whole
norm. p_squares and p_places [S] are those of `Parts`; p_first [S1], p_second [S2] and `place` those of `Squares`. What
is absent has length 0; without `Squares` place is -1. LONGEST: the largest of all lengths.

Prefixes: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask. Shape letters: P parameters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.adamw.reference import Parts
from trope.kernels.divergence.reference import Squares, Watched

# Partial sums that the program holds at once: all that pixel1m has. Not tuned.
MOST, WARPS = 8192, 16


@triton.jit
def _watch_kernel(
    p_loss, p_norms, p_squares, p_places, p_first, p_second, p_step, p_bad_step, p_bad_loss, p_bad_norms, p_norm,
    N, S, S1, S2, P, place, LONGEST, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (1,)."""
    b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(0, LONGEST, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_norms = tl.load(p_norms + o, mask=(o < N) & (o != place), other=0.0)
        b_squares = tl.load(p_squares + o, mask=o < S, other=0.0)
        b_first = tl.load(p_first + o, mask=o < S1, other=0.0)
        b_second = tl.load(p_second + o, mask=o < S2, other=0.0)
        b_sum += b_norms * b_norms + b_squares + b_first + b_second
    norm = tl.sqrt(tl.sum(b_sum, axis=0))
    tl.store(p_norm, norm)
    loss = tl.load(p_loss).to(tl.float32)
    step, bad_step = tl.load(p_step) + 1, tl.load(p_bad_step)
    tl.store(p_step, step)
    total = norm + loss
    if (bad_step < 0) & (total - total != 0):  # 0 where it is finite, not a number elsewhere
        tl.store(p_bad_loss, loss)
        tl.store(p_bad_step, step)
        for i_p in range(P):  # once in a training's life
            b_sum = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in range(0, LONGEST, BLOCK):
                o = i + tl.arange(0, BLOCK)
                m_part = tl.load(p_places + o, mask=o < S, other=-1) == i_p
                b_norms = tl.load(p_norms + o, mask=(o < N) & (o == i_p) & (o != place), other=0.0)
                b_squares = tl.load(p_squares + o, mask=m_part, other=0.0)
                b_first = tl.load(p_first + o, mask=(o < S1) & (i_p == place), other=0.0)
                b_second = tl.load(p_second + o, mask=(o < S2) & (i_p == place), other=0.0)
                b_sum += b_norms * b_norms + b_squares + b_first + b_second
            tl.store(p_bad_norms + i_p, tl.sqrt(tl.sum(b_sum, axis=0)))


def watch(loss: Tensor, norms_P: Tensor | None, watched: Watched, parts: Parts | None, table: Squares | None) -> Tensor:
    """See `trope.kernels.divergence.watch`."""
    norm = torch.empty_like(watched.bad_loss)
    place, first, second = table or (-1, None, None)
    squares, places = parts or (None, None)
    given = {"N": norms_P, "S": squares, "S1": first, "S2": second}
    assert all(x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in given.values())
    sizes = {name: 0 if x is None else len(x) for name, x in given.items()}
    longest = max(1, *sizes.values())
    pointers = {"p_norms": norms_P, "p_squares": squares, "p_first": first, "p_second": second}
    _watch_kernel[(1,)](
        p_loss=loss,
        **{name: norm if x is None else x for name, x in pointers.items()},
        p_places=watched.step if places is None else places,
        p_step=watched.step,
        p_bad_step=watched.bad_step,
        p_bad_loss=watched.bad_loss,
        p_bad_norms=watched.bad_norms_P,
        p_norm=norm,
        P=len(watched.bad_norms_P),
        place=place,
        LONGEST=longest,
        **sizes,
        BLOCK=min(MOST, triton.next_power_of_2(max(16, longest))),
        num_warps=WARPS if longest > 1024 else 1,
    )
    return norm
