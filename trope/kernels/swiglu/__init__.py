"""The gate of a SwiGLU feed-forward: silu(gate) * value in one pass over memory. Decides what runs.

Shape letters: T tokens, F inner width; G = 2 F, gate and value side by side.
"""

from __future__ import annotations

from torch import Tensor

from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.swiglu import reference


def swiglu(pre_TG: Tensor, backend: Backend = "auto") -> Tensor:
    """silu(gate) * value, [T, F] in the dtype of `pre_TG`; differentiable.

    pre_TG: the projection, the gate in the first F columns and the value in the others.
    """
    assert pre_TG.shape[1] % 2 == 0, "the projection holds a gate for every value"
    if resolve_backend(backend, pre_TG) == "torch":
        return reference.swiglu(pre_TG)
    from trope.kernels.swiglu import triton as fused  # only now: CPU users need no Triton

    return fused.swiglu(pre_TG)
