"""What a GPU gives a program. Torch only, until a GPU is asked."""

from __future__ import annotations

import torch

# Shared memory of a program on Hopper, and on an A100. The attention kernels were compiled for both and for GPUs with
# 99 KiB (RTX 30 and 40, L4, L40S), by Triton 3.7, and `attention.widest_head` says which of them fit.
HOPPER, AMPERE = 232_448, 166_912


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; in Triton's interpreter as on Hopper."""
    if device.type != "cuda":
        return HOPPER
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
