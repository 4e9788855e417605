"""Attention for heads of 32 numbers, in CUDA C++: its launches, and when it takes the place of the Triton kernels.

Shape letters: B sequences, L positions, S = row_stride(L), T tokens, H heads, D head dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trope.kernels import nvrtc
from trope.kernels.attention.arguments import BLOCK, Bias, row_stride
from trope.kernels.limits import shared_memory
from trope.kernels.project.triton import sum_rows
from trope.kernels.sequence_bounds import SequenceBounds

SOURCES = {name: Path(__file__).with_name(f"{name}.cu") for name in ("sheet", "forward", "keys", "queries")}
HEAD_DIM, HEADS, MOST_BUCKETS = 32, (2, 4, 8), 129  # as in narrow.cuh


class Tile(NamedTuple):
    """Rows and threads of a program, and its bytes of shared memory, as the kernels have them."""

    rows: int
    threads: int
    shared: int


SHEET = Tile(rows=BLOCK, threads=128, shared=4 * (MOST_BUCKETS + 128))
FORWARD = Tile(rows=64, threads=128, shared=2 * (24 << 10))
KEYS = Tile(rows=64, threads=256, shared=3 * (24 << 10))
QUERY_ROWS, QUERY_KEYS = 64, 32


def is_made_for(
    heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, bounds: SequenceBounds, last: int
) -> bool:
    """Whether these kernels are for such heads and for times in buckets 0 .. last.

    Only on Hopper: no other GPU has the products of four warps that narrow_keys takes.
    """
    is_right = head_dim == HEAD_DIM and heads in HEADS and dtype == torch.bfloat16 and last < MOST_BUCKETS
    if device.type != "cuda" or not is_right or bounds.max_len <= BLOCK:
        return False
    is_hopper = torch.cuda.get_device_capability(device) == nvrtc.HOPPER
    fits = query_tile(heads, bounds.max_len).shared <= shared_memory(device)
    return is_hopper and fits and nvrtc.is_available(device.index)


def is_narrow(q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, bias: Bias) -> bool:
    """Whether these kernels take such inputs, once the bias has a sheet."""
    last = 0 if bias.gaps is None else bias.gaps.last
    if not is_made_for(q.shape[1], q.shape[2], q.dtype, q.device, bounds, last) or not q.dtype == k.dtype == v.dtype:
        return False
    if bias.time is not None and len(bias.time) != last + 1:
        return False
    if any(w is not None and (w.dtype != torch.float32 or not w.is_contiguous()) for w in bias[:2]):
        return False
    is_cached = bias.gaps is None or bias.gaps.buckets is not None
    return is_cached and all(_is_aligned(x) for x in (q, k, v))


def query_tile(H: int, L: int) -> Tile:
    """The tile of narrow_queries. Its memory: stages, sums, histograms, two each; distances."""
    stage, sums = 2 * H * QUERY_KEYS * (QUERY_ROWS + HEAD_DIM), (QUERY_ROWS + 2 * QUERY_KEYS - 2) * (QUERY_KEYS + 1) * 4
    histogram = QUERY_ROWS * MOST_BUCKETS * 4
    return Tile(QUERY_ROWS, 64 * H, 2 * (stage + sums + histogram) + row_stride(L) * 4)


def write_sheet(bias: Bias, bounds: SequenceBounds, like: Tensor) -> None:
    """Write half of the bias into its sheet: the `write` of attention/triton.py: `with_sheet`."""
    assert bias.sheet is not None
    tiles = bias.sheet.shape[-1] // SHEET.rows
    grid = (tiles, tiles, len(bias.sheet))
    _launch("sheet", like.shape[1], bias, grid, SHEET, _bias_arguments(bias, bounds))


def forward(q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias) -> Tensor:
    """y [T, H, D], contiguous; zero outside of all sequences. The bias's sheet holds half of it."""
    T, H, D = q.shape
    y = (torch.empty if bounds.is_complete else torch.zeros)((T, H, D), dtype=q.dtype, device=q.device)
    arguments = _arguments(q, k, v, bounds, n, bias) | {"y": y}
    _launch("forward", H, bias, _grid(bounds, H, FORWARD), FORWARD, arguments)
    return y


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, views into one [T, 3, H, D], zero outside of all sequences; d position and d time, or None."""
    T, H, D = q.shape
    B, L, S = len(bounds.lengths_B), bounds.max_len, row_stride(bounds.max_len)
    dy = dy if _is_aligned(dy) else dy.clone(memory_format=torch.contiguous_format)  # elsewhere, so aligned
    joint = (torch.empty if bounds.is_complete else torch.zeros)((T, 3, H, D), dtype=q.dtype, device=q.device)
    dq, dk, dv = joint.unbind(1)
    ds = torch.empty((B, H, S, S), dtype=q.dtype, device=q.device)
    tiles = -(-L // QUERY_ROWS)
    # Partial sums, a row for each tile of queries: by distance, then by bucket. Rows begin at multiples of 64 bytes.
    distances, buckets = 0 if bias.position is None else S, 0 if bias.time is None else len(bias.time)
    sums = dy.new_empty((B * tiles, -(-(distances + buckets) // 16) * 16), dtype=torch.float32)
    arguments = _arguments(q, k, v, bounds, n, bias) | {
        "dy": dy, "dy_token": dy.stride(0), "dy_head": dy.stride(1), "ds": ds,
        "dq": dq, "dk": dk, "dv": dv, "grad_token": dq.stride(0), "grad_head": dq.stride(1),
        "sums": sums, "sums_row": sums.stride(0),
    }  # fmt: skip
    _launch("keys", H, bias, _grid(bounds, H, KEYS), KEYS, arguments)
    _launch("queries", H, bias, (tiles, B, 1), query_tile(H, L), arguments)
    total, d_position = sum_rows(sums[:, : distances + buckets]), None
    if bias.position is not None:
        centre = (len(bias.position) - 1) // 2
        d_position = pad(total[S - L : S], (centre - L + 1, centre))  # later keys have no gradient
    return dq, dk, dv, d_position, None if bias.time is None else total[distances:]


# In the order of `Arguments` in narrow.cuh.
_FIELDS = (
    *("q", "k", "v", "dy", "y", "dq", "dk", "dv", "ds", "sheet", "position", "time", "buckets", "starts", "lengths"),
    *("sums", "sums_row"),
    *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "dy_token", "dy_head", "grad_token", "grad_head"),
    *("row", "sheet_stride", "longest", "centre", "last", "scale"),
)


def _launch(name: str, H: int, bias: Bias, grid: nvrtc.Grid, tile: Tile, arguments: dict[str, nvrtc.Argument]) -> None:
    """Launch narrow_`name` of `name`.cu. Fields that it does not read may be left out."""
    has_position, has_time = bias.position is not None, bias.time is not None
    defines = ("HEADS", H), ("HAS_POSITION", int(has_position)), ("HAS_TIME", int(has_time))
    in_order = [arguments.get(field, 0) for field in _FIELDS]
    nvrtc.launch(SOURCES[name], f"narrow_{name}", defines, grid, tile.threads, tile.shared, in_order)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, bounds: SequenceBounds, n: int, bias: Bias
) -> dict[str, nvrtc.Argument]:
    """What forward and backward read."""
    found: dict[str, nvrtc.Argument] = {"q": q, "k": k, "v": v, "scale": 1.0 / n}
    for name, x in (("q", q), ("k", k), ("v", v)):
        found |= {f"{name}_token": x.stride(0), f"{name}_head": x.stride(1)}
    return found | _bias_arguments(bias, bounds)


def _bias_arguments(bias: Bias, bounds: SequenceBounds) -> dict[str, nvrtc.Argument]:
    """The bias, its sheet and the bounds."""
    assert bias.sheet is not None
    found: dict[str, nvrtc.Argument] = {
        "sheet": bias.sheet, "row": bias.sheet.shape[-1], "longest": bounds.max_len,
        "sheet_stride": 0 if len(bias.sheet) == 1 else bias.sheet.stride(0),
        "starts": bounds.starts_B.long(), "lengths": bounds.lengths_B.long(),
    }  # fmt: skip
    if bias.position is not None:
        found |= {"position": bias.position, "centre": bias.sizes(bounds)["centre"]}
    if bias.time is not None and bias.gaps is not None and bias.gaps.buckets is not None:
        found |= {"time": bias.time, "buckets": bias.gaps.buckets, "last": bias.gaps.last}
    return found


def _grid(bounds: SequenceBounds, H: int, tile: Tile) -> nvrtc.Grid:
    return -(-bounds.max_len // tile.rows), H // 2, len(bounds.lengths_B)


def _is_aligned(x: Tensor) -> bool:
    """Whether rows of a head can be copied 16 bytes at a time."""
    eight = (x.stride(0) | x.stride(1)) % 8 == 0
    return eight and x.stride(2) == 1 and x.data_ptr() % 16 == 0
