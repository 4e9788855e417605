"""Measures the temporal structure of a prepared dataset; `trope.figures.inspect` shows it."""

from trope.data.inspect.calendar import CalendarSignal
from trope.data.inspect.measure import Report, inspect

__all__ = ["CalendarSignal", "Report", "inspect"]
