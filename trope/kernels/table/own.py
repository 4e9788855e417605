"""Launch of own.cu: AdamW of the rows that are no token's input, on multiprocessors of its own.

Shape letters: T tokens, E model width, V catalogue (rows 1 .. V, row 0 is padding), C candidates of a token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trope.kernels import nvrtc
from trope.kernels.backend import Backend, resolve_backend
from trope.kernels.limits import HOPPER, shared_memory
from trope.kernels.softmax.reference import EPS
from trope.kernels.table.reference import InputEntries, ScoreEntries

SOURCE = Path(__file__).with_name("own.cu")
WARPS, STAGES = 16, 2  # as in own.cu
WIDEST = 512  # numbers of a row: more would not fit two stages of a multiprocessor's shared memory


def own_multiprocessors(table_VE: Tensor, share: float, backend: Backend = "auto") -> int:
    """How many multiprocessors of the GPU a share of them is; 0 where own.cu does not take this table.

    own.cu stands in for a Triton kernel, needs Hopper's shared memory, and was measured on an H200 only.
    """
    E, device = table_VE.shape[1], table_VE.device
    if not table_VE.is_cuda or resolve_backend(backend, table_VE) == "torch":
        return 0
    if E % 128 or E > WIDEST or len(table_VE) >= 2**31:
        return 0
    if shared_memory(device) < max(HOPPER, _shared(E, states=3)) or not nvrtc.is_available(device.index):
        return 0
    return round(share * torch.cuda.get_device_properties(device).multi_processor_count)


def update_others(
    table_VE: Tensor, exp_avg_VE: Tensor, exp_avg_sq: Tensor, unit_VE: Tensor,
    scores: ScoreEntries, inputs: InputEntries, factors: Tensor, multiprocessors: int,
) -> Tensor:  # fmt: skip
    """As `update_table` with part="others"; float32, unit vectors and outputs both in bf16 or both in float32."""
    from trope.kernels.table.triton import check_entries, check_state

    check_entries(table_VE, scores, inputs)
    check_state(table_VE, exp_avg_VE, exp_avg_sq, unit_VE, factors)
    rows, E = table_VE.shape
    assert scores.out_TE.dtype == unit_VE.dtype and unit_VE.dtype in (torch.bfloat16, torch.float32)
    assert scores.order.dtype == torch.int64 and scores.coefs_TC.dtype == torch.float32
    is_rowwise = exp_avg_sq.ndim == 1
    partial = torch.empty(multiprocessors * WARPS, dtype=torch.float32, device=table_VE.device)
    defines = (
        ("WIDTH", E), ("CANDIDATES", scores.coefs_TC.shape[1]), ("ROWWISE", int(is_rowwise)),
        ("IS_BF16", int(unit_VE.dtype == torch.bfloat16)),
    )  # fmt: skip
    arguments: list[nvrtc.Argument] = [
        table_VE, exp_avg_VE, exp_avg_sq, unit_VE, scores.out_TE, scores.coefs_TC, scores.order, scores.first_V,
        inputs.first_V, factors, partial, rows, EPS,
    ]  # fmt: skip
    shared = _shared(E, states=2 if is_rowwise else 3)
    nvrtc.launch(SOURCE, "update_others", defines, (multiprocessors, 1, 1), 32 * WARPS, shared, arguments)
    return partial.sum(dim=0, keepdim=True)


def _shared(width: int, states: int) -> int:
    """Bytes of shared memory of a block: what its warps have read ahead."""
    return WARPS * STAGES * states * width * 4
