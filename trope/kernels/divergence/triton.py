# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The watch in one launch of one program.

Names of the kernel arguments: p_loss, p_norms [P], and the four tensors of `Watched`; p_norm receives the whole norm.

Prefixes: o_ offset, p_ pointer, b_ block in registers, m_ mask. Shape letters: P parameters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trope.kernels.divergence.reference import Watched


@triton.jit
def _watch_kernel(p_loss, p_norms, p_step, p_bad_step, p_bad_loss, p_bad_norms, p_norm, P, BLOCK: tl.constexpr):
    """Grid (1,)."""
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < P
    b_norms = tl.load(p_norms + o_p, mask=m_p, other=0.0)
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


def watch(loss: Tensor, norms_P: Tensor, watched: Watched) -> Tensor:
    """See `trope.kernels.divergence.watch`."""
    assert norms_P.dtype == torch.float32 and norms_P.is_contiguous()
    norm = torch.empty((), device=norms_P.device)
    _watch_kernel[(1,)](
        p_loss=loss,
        p_norms=norms_P,
        p_step=watched.step,
        p_bad_step=watched.bad_step,
        p_bad_loss=watched.bad_loss,
        p_bad_norms=watched.bad_norms_P,
        p_norm=norm,
        P=len(norms_P),
        BLOCK=triton.next_power_of_2(len(norms_P)),
        num_warps=1,
    )
    return norm
