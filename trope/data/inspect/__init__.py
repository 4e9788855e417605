"""The temporal structure of a prepared dataset: measured, then shown in the terminal or as one HTML page."""

from trope.data.inspect.calendar import CalendarSignal
from trope.data.inspect.measure import Report, inspect

__all__ = ["CalendarSignal", "Report", "inspect"]
