"""Seconds in the units of the calendar."""

MINUTE = 60
HOUR = 3_600
DAY = 86_400
WEEK = 7 * DAY
YEAR = 31_556_952
"""The mean Gregorian year, 365.2425 days."""
MONTH = YEAR // 12
MONDAY = 4 * DAY
"""The first Monday 00:00 UTC after the Unix epoch: weeks count from here."""
