"""Checks of what comes from outside: each failure is a ValueError that says what is wrong, what was found, what to do.

Shapes and dtypes are always checked. Values are checked where reading them is possible and cheap: in eager mode (a few
host synchronisations on a GPU), not while torch compiles, exports or captures a CUDA graph.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import SupportsIndex

import torch
from torch import Tensor

# The last second of 2100. Later "seconds" are another unit or a broken clock; phases are exact up to here.
LATEST_TIME = 4133980799
ANY_ORDER = ", or say check_values=False where another order is meant"
_INTEGERS = (torch.int32, torch.int64)
_UNITS = ((1e17, "nanoseconds", 1e9), (1e14, "microseconds", 1e6), (1e11, "milliseconds", 1e3))


def check_time_dtype(times: Tensor, name: str = "times") -> None:
    """Refuse every dtype that cannot hold a Unix second exactly."""
    if not isinstance(times, Tensor):
        raise ValueError(f"{name} must be a tensor of Unix seconds, got {type(times).__name__}; use torch.as_tensor")
    if times.dtype not in (torch.int64, torch.int32, torch.float64):
        raise ValueError(
            f"{name} must be int64 Unix seconds (or float64 for sub-second data), got {times.dtype}; keep times as "
            "integers from the source on: float32 is off by up to 64 s today, and converting back cannot repair that"
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of the named choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_whole(name: str, value: SupportsIndex) -> int:
    """A whole number, of Python or of NumPy."""
    if not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return operator.index(value)


def check_span(span: Iterable[float]) -> tuple[int, int]:
    """The first and last time of the data, as whole seconds, last after first."""
    ends = list(span) if isinstance(span, Iterable) else []
    is_numbers = len(ends) == 2 and all(hasattr(end, "__float__") for end in ends)  # not text, not None
    if not is_numbers or not all(math.isfinite(end) for end in ends):
        raise ValueError(f"time_span must be two whole Unix seconds, got {span!r}; drop events without a time")
    first, last = int(ends[0]), int(ends[1])
    if first >= last:
        raise ValueError(f"time_span must be (first, last) with first < last, Unix seconds, got ({first}, {last})")
    if last > LATEST_TIME:
        raise ValueError(f"time_span must be Unix seconds before 2101, got ({first}, {last}); is it in milliseconds?")
    return first, last


def check_float(x: Tensor, name: str) -> None:
    """Refuse what cannot hold a rotation: integers would be cut, complex numbers are no planes."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}; cast it first")


def check_qk(q: Tensor, k: Tensor, times: Tensor | None, head_dim: int, jagged: bool) -> None:
    """q and k are [B, L, H, D], or [T, H, D] with offsets, and agree in all but the number of heads."""
    expected = "[T, H, D] with offsets" if jagged else "[B, L, H, D] (or [T, H, D] with offsets)"
    for name, x in (("q", q), ("k", k)):
        if x.dim() != (3 if jagged else 4):
            raise ValueError(f"{name} must be {expected}, got shape {tuple(x.shape)}")
        if x.shape[-1] != head_dim:
            raise ValueError(f"{name} has head dim {x.shape[-1]}, but this module was made with head_dim={head_dim}")
        check_float(x, name)
    if isinstance(times, Tensor):
        _check_layout(q, k, times)
    if q.shape[:-2] != k.shape[:-2] or q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            "q and k must agree in batch, positions, dtype and device (heads may differ), "
            f"got {tuple(q.shape)} {q.dtype} on {q.device} and {tuple(k.shape)} {k.dtype} on {k.device}"
        )


def _check_layout(q: Tensor, k: Tensor, times: Tensor) -> None:
    """Refuse heads before positions, [B, H, L, D], where the times or the key's heads tell.

    With as many heads as positions the shapes fit either way. Strides are then a hint, not a proof: a warning.
    """
    wanted, found = ("[T, H, D]", "[H, T, D]") if q.dim() == 3 else ("[B, L, H, D]", "[B, H, L, D]")
    advice = f"look like {found}; pass q.transpose({q.dim() - 3}, {q.dim() - 2}), and k likewise"
    fits = q.shape[:-2] == k.shape[:-2] == times.shape
    swapped = [(*x.shape[:-3], x.shape[-2]) for x in (q, k)]
    if not fits and swapped == [tuple(times.shape)] * 2:
        raise ValueError(
            f"q and k must be {wanted} with one time per event, got {tuple(q.shape)} and {tuple(k.shape)} with times "
            f"{tuple(times.shape)}, which {advice}"
        )
    if torch.compiler.is_compiling():  # a comparison of heads with positions would fix a dynamic length
        return
    heads = q.shape[-2]
    if fits and heads == q.shape[-3] > 1 and k.shape == q.shape and q.stride(-3) < q.stride(-2):
        warnings.warn(
            f"q and k must be {wanted}; with {heads} positions and {heads} heads shapes cannot tell, but by their "
            f"strides they {advice}. Where the layout is right, q.contiguous() ends this warning",
            stacklevel=5,  # whoever called the module
        )


def check_events(times: Tensor, lengths: Tensor | None, offsets: Tensor | None, t_now: Tensor | None) -> None:
    """Shapes and dtypes of times and of what marks where sequences end."""
    check_time_dtype(times)
    for name, ends in (("lengths", lengths), ("offsets", offsets)):
        if ends is not None and not isinstance(ends, Tensor):
            raise ValueError(f"{name} must be a tensor of integers, got {type(ends).__name__}; use torch.as_tensor")
    if lengths is not None and offsets is not None:
        raise ValueError("give lengths (padded batches) or offsets (jagged ones), got both")
    if offsets is None and times.dim() != 2:
        raise ValueError(f"times must be [B, L], or [T] together with offsets, got shape {tuple(times.shape)}")
    if offsets is not None and times.dim() != 1:
        raise ValueError(f"with offsets, times must be [T], got shape {tuple(times.shape)}")
    if offsets is not None and (offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in _INTEGERS):
        raise ValueError(f"offsets must be integers [B + 1], got shape {tuple(offsets.shape)} {offsets.dtype}")
    batch = times.shape[0] if offsets is None else offsets.numel() - 1
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype not in _INTEGERS):
        raise ValueError(f"lengths must be integers [{batch}], got shape {tuple(lengths.shape)} {lengths.dtype}")
    if t_now is not None:
        check_time_dtype(t_now, "t_now")
        if t_now.shape != (batch,):
            raise ValueError(f"t_now must have one moment per sequence, shape ({batch},), got {tuple(t_now.shape)}")


def can_read_values(x: Tensor) -> bool:
    """Whether a value check is possible here at all."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_event_values(
    times: Tensor, lengths: Tensor | None, offsets: Tensor | None, t_now: Tensor | None, allow_past: bool
) -> None:
    """Lengths and offsets that fit, real times wherever there is an event, no `t_now` before the last one."""
    _check_extent(times.shape[-1], lengths, offsets)
    if times.numel() == 0:
        return
    if offsets is None:
        if lengths is None:
            lengths = torch.full((times.shape[0],), times.shape[1], device=times.device)
        is_event = torch.arange(times.shape[1], device=times.device) < lengths[:, None]
        last_times = times.gather(1, (lengths[:, None] - 1).clamp(min=0).long())[:, 0]
    else:
        lengths, is_event = offsets.diff(), None
        last_times = times[(offsets[1:] - 1).clamp(min=0)]
    check_time_values(times, is_event)
    if t_now is not None:
        check_time_values(t_now, lengths > 0, "t_now")
        if not allow_past:
            _check_not_past(t_now, last_times, lengths > 0)


def _check_extent(length: int, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Lengths lie in 0..L; offsets start at 0, never fall and end at T."""
    if lengths is not None and bool(((lengths < 0) | (lengths > length)).any()):
        raise ValueError(
            f"lengths must lie between 0 and L = {length}, got {lengths.min().item()} to {lengths.max().item()}; "
            "cut the histories to L events first"
        )
    if offsets is not None:
        ends = offsets[[0, -1]].tolist()
        if ends != [0, length] or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets must start at 0, never fall and end at T = {length}, got {offsets[:8].tolist()} ... {ends[1]}"
            )


def check_time_values(times: Tensor, valid: Tensor | None = None, name: str = "times") -> None:
    """Real Unix seconds between 1970 and 2100 wherever `valid` (everywhere if None)."""
    times = times.long() if times.dtype == torch.int32 else times  # whose comparison with the bounds would wrap
    bad = (times < 1) | (times > LATEST_TIME) | ~torch.isfinite(times)
    if valid is not None:
        bad = bad & valid
    if not bool(bad.any()):
        return
    worst = times[bad]
    if not bool(torch.isfinite(worst).all()):
        raise ValueError(f"{name} must be finite, got {worst[~torch.isfinite(worst)][0].item()}; drop such events")
    high, low = worst.max().item(), worst.min().item()
    for bound, unit, scale in _UNITS:
        if bound < high <= LATEST_TIME * scale:
            raise ValueError(
                f"{name} must be Unix seconds, got {high}, which looks like {unit} "
                f"({datetime.fromtimestamp(high / scale, UTC):%Y-%m-%d}); integer-divide by {scale:,.0f} (//)"
            )
    if high > LATEST_TIME:
        raise ValueError(f"{name} must lie before 2101, got {high}; check the unit and the source's clock")
    raise ValueError(
        f"{name} must be positive Unix seconds, got {low}; zero or negative usually means a missing timestamp: drop "
        "such events, or pass lengths if these are padding"
    )


def check_order(times: Tensor, lengths: Tensor | None, offsets: Tensor | None, otherwise: str = "") -> None:
    """Times never fall within a sequence: a query looks from the next event, and a mask by place hides later ones.

    Times, lengths and offsets have passed `check_event_values`. otherwise: what to do where the order is meant.
    """
    if times.shape[-1] < 2:
        return
    falls = times.diff(dim=-1) < 0  # from place i to i + 1
    if offsets is not None:
        starts = offsets[1:-1]
        starts = starts[(starts > 0) & (starts < times.numel())]
        falls[starts - 1] = False  # the next sequence may begin earlier
    elif lengths is not None:
        falls &= torch.arange(1, times.shape[1], device=times.device) < lengths[:, None]
    if not bool(falls.any()):
        return
    where = falls.nonzero()[0]
    before, after = times[tuple(where)].item(), times[(*where[:-1], where[-1] + 1)].item()
    row, place = int(where[0]), int(where[-1]) + 1
    if offsets is not None:
        row = int(torch.searchsorted(offsets[1:], place, right=True))
        place -= int(offsets[row])
    raise ValueError(
        f"times must not fall within a sequence, got {after} after {before} at place {place} of row {row}; sort each "
        f"sequence's events by time{otherwise}"
    )


def _check_not_past(t_now: Tensor, last_times: Tensor, has_events: Tensor) -> None:
    """A recommendation is made for a moment after the history, unless the caller says otherwise."""
    early = has_events & (t_now < last_times)
    if bool(early.any()):
        row = int(early.nonzero()[0])
        raise ValueError(
            f"t_now must not lie before the last event, got {t_now[row].item()} < {last_times[row].item()} in sequence "
            f"{row}; cut the history at t_now, or pass allow_past=True if looking back is meant"
        )
