"""The pulse: what everybody does now and what this user did before, as facts beside the network (docs/method.md)."""

from trope.models.pulse.counts import (
    HALF_LIVES,
    CountStream,
    DecayedCounts,
    EventsInTime,
    SortedEvents,
)  # fmt: skip
from trope.models.pulse.head import Pulse
from trope.models.pulse.live import LiveCounts
from trope.models.pulse.own import OwnItems, own_counts, own_items
from trope.models.pulse.seasons import PERIODS, SeasonCounts

__all__ = [
    "HALF_LIVES", "PERIODS", "CountStream", "DecayedCounts", "EventsInTime", "LiveCounts", "OwnItems", "Pulse",
    "SeasonCounts", "SortedEvents", "own_counts", "own_items",
]  # fmt: skip
