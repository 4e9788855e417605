"""silu(gate) * value in plain PyTorch: the ground truth of the kernel.

Shape letters: T tokens, F inner width; G = 2 F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(pre_TG: Tensor) -> Tensor:
    """See `trope.kernels.swiglu.swiglu`; float32 inside, float64 stays float64."""
    gate_TF, value_TF = pre_TG.to(torch.promote_types(pre_TG.dtype, torch.float32)).chunk(2, dim=1)
    return (F.silu(gate_TF) * value_TF).to(pre_TG.dtype)
