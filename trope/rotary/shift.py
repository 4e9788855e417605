"""The time each query looks from: the next event's, and for the last one `t_now` (section 3.4 of the paper).

Shape letters: B batch, L positions, T jagged tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.rotary import checks
from trope.rotary.base import sequence_of


def query_times(
    times: Tensor,
    lengths: Tensor | None = None,
    t_now: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    allow_past: bool = False,
    check_values: bool = True,
    later: bool = False,
) -> Tensor:
    """The time each query looks from: the next event's; for a sequence's last event `t_now`, or its own without one.

    Section 3.4 (eq. shifted) and Algorithm 1 lines 3-4, except that the shift stops at each sequence's own end: rolling
    a padded batch would read the padding there.

    Args:
        times: Unix seconds, int64 (or float64), [B, L], or [T] with `offsets`; they never fall within a sequence.
        lengths: [B] valid events per row; None means all.
        t_now: [B] the moment each recommendation is made for.
        offsets: [B + 1] where each jagged sequence begins.
        allow_past: accept a `t_now` before the last event.
        check_values: read the times to refuse bad and unsorted ones.
        later: the next *later* time instead, for events that share one, such as the lines of a basket.
    """
    checks.check_events(times, lengths, offsets, t_now)
    if check_values and checks.can_read_values(times):
        checks.check_event_values(times, lengths, offsets, t_now, allow_past)
        checks.check_order(times, lengths, offsets, checks.ANY_ORDER)
    shifted = shifted_times(times, lengths, t_now, offsets)
    if not later:
        return shifted
    # From each event on, the first one that looks at another time than its own, or is its sequence's last.
    index = torch.arange(times.shape[-1], device=times.device)
    if offsets is not None:
        ends_here = index + 1 == offsets[sequence_of(index, offsets) + 1]
    else:
        ends_here = index >= (times.shape[1] - 1 if lengths is None else lengths[:, None] - 1)
    place = torch.where((shifted > times) | ends_here, index, times.shape[-1] - 1)
    return shifted.gather(-1, place.flip(-1).cummin(-1).values.flip(-1))


def shifted_times(times: Tensor, lengths: Tensor | None, t_now: Tensor | None, offsets: Tensor | None) -> Tensor:
    following = times.roll(-1, dims=-1)
    index = torch.arange(times.shape[-1], device=times.device)
    if offsets is not None:
        row_T = sequence_of(index, offsets)
        return torch.where(index + 1 == offsets[row_T + 1], times if t_now is None else t_now[row_T], following)
    last = times.shape[1] - 1 if lengths is None else lengths[:, None] - 1
    shifted = torch.where(index == last, times if t_now is None else t_now[:, None], following)
    return shifted if lengths is None else torch.where(index <= last, shifted, times)  # padding keeps its own value
