"""How histories and training windows are cut from event arrays. Every history in the package comes from `last_events`.

The functions take ranges of events, `begins` up to but not including `ends`, as places in the arrays. A batch is a few
gathers on the arrays' device, without a Python loop over users. `trope.data.sequences` knows which ranges a user has.

Shapes: B ranges, L positions, T events of all ranges, W windows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FILTERS = ("none", "window", "history")


class History(NamedTuple):
    """The last events of several users, right-padded: padded items are 0, padded times repeat the row's last time.

    A padded time of 0 would be a gap of decades; repeated times stay sorted.
    """

    items_BL: Tensor  # int64
    times_BL: Tensor  # int64 Unix seconds
    lengths_B: Tensor  # int64


class Windows(NamedTuple):
    """Training windows as ranges of events; a window's last event is a target only."""

    starts: Tensor  # [W]
    ends: Tensor  # [W]

    def take(self, index: Tensor) -> Windows:
        """The windows at `index`."""
        return Windows(self.starts[index], self.ends[index])


class FlatRanges(NamedTuple):
    """Every event of several ranges, one range after the other."""

    places_T: Tensor  # the event's place in the store
    rows_T: Tensor  # the range it belongs to
    offsets_B: Tensor  # [B+1], range b owns offsets[b] .. offsets[b+1]


def last_events(items: Tensor, times: Tensor, begins_B: Tensor, ends_B: Tensor, max_len: int) -> History:
    """The last `max_len` events of each range, padded to `max_len`. A range must hold at least one event."""
    check_max_len(max_len)
    oldest_B = torch.maximum(begins_B, ends_B - max_len)
    places_BL, lengths_B = padded_places(oldest_B, ends_B, max_len), ends_B - oldest_B
    return History(masked_items(items, places_BL, lengths_B), times[places_BL], lengths_B)


def padded_places(begins_B: Tensor, ends_B: Tensor, width: int) -> Tensor:
    """Places of each range's first `width` events, [B, width]; past the end, the place of its last event."""
    return torch.minimum(begins_B[:, None] + torch.arange(width, device=begins_B.device), ends_B[:, None] - 1)


def masked_items(items: Tensor, places_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """Items at these places as int64, 0 from each row's length on."""
    padding_BL = torch.arange(places_BL.shape[1], device=places_BL.device) >= lengths_B[:, None]
    return items[places_BL].long().masked_fill(padding_BL, 0)


def flatten_ranges(begins_B: Tensor, ends_B: Tensor, total: int | None = None) -> FlatRanges:
    """List every event of the ranges.

    total: the number of events, if the caller knows it; without it a GPU is asked and waited for.
    """
    counts_B = ends_B - begins_B
    offsets_B = torch.zeros(len(counts_B) + 1, dtype=torch.int64, device=counts_B.device)
    torch.cumsum(counts_B, 0, out=offsets_B[1:])
    rows_T = torch.repeat_interleave(counts_B, output_size=total)
    places_T = torch.arange(len(rows_T), device=counts_B.device) + (begins_B - offsets_B[:-1])[rows_T]
    return FlatRanges(places_T, rows_T, offsets_B)


def seen_counts(lengths_B: Tensor, max_len: int, filter_seen: str) -> Tensor:
    """How many of each history's last events are left out of its ranking, [B].

    lengths_B: events of each history. filter_seen: `none`; `window` for the last `max_len` events; `history` for all.
    """
    if filter_seen not in FILTERS:
        raise ValueError(f"filter_seen must be one of {', '.join(FILTERS)}, got {filter_seen!r}")
    if filter_seen == "none":
        return torch.zeros_like(lengths_B)
    return lengths_B.clamp(max=max_len) if filter_seen == "window" else lengths_B


def check_max_len(max_len: int) -> None:
    """Refuse a history without events."""
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
