"""The calendar shop: an event log of any size whose ground truth is known (docs/calendar-shop.md)."""

from trope.data.synthetic.catalogue import ground_truth
from trope.data.synthetic.config import TEMPORAL_EFFECTS, CalendarShop
from trope.data.synthetic.write import write_events

__all__ = ["TEMPORAL_EFFECTS", "CalendarShop", "ground_truth", "write_events"]
