# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The watch in one launch of one program.

Names of the kernel arguments: p_loss, p_norms [P], and the four tensors of `Watched`; p_norm receives the whole norm.
p_first [S], p_second [S2] and `place` are those of `Squares`; without them place is P, and S and S2 are 0.

Prefixes: o_ offset, p_ pointer, b_ block in registers, m_ mask. Shape letters: P parameters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.divergence.reference import Squares, Watched


@triton.jit
def _watch_kernel(
    p_loss, p_norms, p_first, p_second, p_step, p_bad_step, p_bad_loss, p_bad_norms, p_norm, P, S, S2, place,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (1,)."""
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < P
    b_norms = tl.load(p_norms + o_p, mask=m_p, other=0.0)
    o_s = tl.arange(0, BLOCK_S)
    b_squares = tl.load(p_first + o_s, mask=o_s < S, other=0.0) + tl.load(p_second + o_s, mask=o_s < S2, other=0.0)
    b_norms = tl.where(o_p == place, tl.sqrt(tl.sum(b_squares, axis=0)), b_norms)
    norm = tl.sqrt(tl.sum(b_norms * b_norms))
    tl.store(p_norm, norm)
    loss = tl.load(p_loss).to(tl.float32)
    step, bad_step = tl.load(p_step) + 1, tl.load(p_bad_step)
    tl.store(p_step, step)
    total = norm + loss
    if (bad_step < 0) & (total - total != 0):  # 0 where it is finite, not a number elsewhere
        tl.store(p_bad_norms + o_p, b_norms, mask=m_p)
        tl.store(p_bad_loss, loss)
        tl.store(p_bad_step, step)


def watch(loss: Tensor, norms_P: Tensor, watched: Watched, squares: Squares | None) -> Tensor:
    """See `trope.kernels.divergence.watch`."""
    assert norms_P.dtype == torch.float32 and norms_P.is_contiguous()
    norm = torch.empty((), device=norms_P.device)
    P = len(norms_P)
    place, first, second = squares or (P, norms_P, None)
    sizes = (0 if squares is None else len(first), 0 if second is None else len(second))
    _watch_kernel[(1,)](
        p_loss=loss,
        p_norms=norms_P,
        p_first=first,
        p_second=first if second is None else second,
        p_step=watched.step,
        p_bad_step=watched.bad_step,
        p_bad_loss=watched.bad_loss,
        p_bad_norms=watched.bad_norms_P,
        p_norm=norm,
        P=P,
        S=sizes[0],
        S2=sizes[1],
        place=place,
        BLOCK=triton.next_power_of_2(P),
        BLOCK_S=triton.next_power_of_2(max(16, *sizes)),
        num_warps=1,
    )
    return norm
