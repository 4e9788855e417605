"""The calendar shop's settings: its size, its seed, and one switch per effect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from trope.data.synthetic.categories import CATEGORY_COUNT, HOURS, SEASONS, WEEKDAYS, Rhythm
from trope.times import MONDAY, WEEK, YEAR

TEMPORAL_EFFECTS = ("replenishment", "weekly", "daily", "yearly", "lifetimes", "sessions")
"""The switches that tie items to time; `tastes`, the seventh switch, does not."""


@dataclass(frozen=True)
class CalendarShop:
    """A shop whose every reason to buy is known; docs/calendar-shop.md has the formulas.

    Switching a temporal effect off leaves what is sold, and how often, as it was; it only cuts the tie to time.
    """

    users: int = 20_000
    """Number of users."""
    items: int = 2_000
    """Number of items in the catalogue over the whole span, dead and alive."""
    mean_events: float = 12.0
    """Mean number of events of a user; the surplus over `min_events` is geometric."""
    min_events: int = 5
    """Fewest events of a user."""
    start: int = 1_420_416_000
    """First second of the log, a Monday 00:00 UTC in Unix seconds (5 January 2015)."""
    years: float = 10.0
    """Length of the log, rounded to whole weeks."""
    seed: int = 0
    """Seed of everything; the same settings give the same rows on any number of threads."""

    tastes: bool = True
    """Each user prefers a few categories; off: all users are alike."""
    replenishment: bool = True
    """Staples are bought again after a cycle of days to months; off: again, but at any time."""
    weekly: bool = True
    """Visits follow the weekday, and weekday categories are bought on their days; off: both at any day."""
    daily: bool = True
    """Visits follow the hour, and hour categories are bought at their hours; off: both at any hour."""
    yearly: bool = True
    """Seasonal categories are bought in their weeks of the year; off: all year."""
    lifetimes: bool = True
    """Items are born and die; off: every item is sold all the time."""
    sessions: bool = True
    """A visit holds several events of one category, minutes apart; off: one event each."""

    staple_share: float = 0.1
    """Share of visits that replenish a staple."""
    season_share: float = 0.4
    """Share of visits for a seasonal category."""
    weekday_share: float = 0.1
    """Share of visits for a weekday category."""
    hour_share: float = 0.1
    """Share of visits for an hour category. The rest follows the user's taste."""

    def __post_init__(self) -> None:
        for name in ("users", "items", "min_events"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.items < CATEGORY_COUNT:
            raise ValueError(f"items must be at least {CATEGORY_COUNT}, one per category, got {self.items}")
        if self.mean_events < self.min_events:
            raise ValueError(
                f"mean_events ({self.mean_events}) is below min_events ({self.min_events}): raise it or lower the other"
            )
        if not 2 <= self.years <= 100:
            raise ValueError(f"years must be from 2 to 100, so that a season can repeat, got {self.years}")
        if self.start < 0 or (self.start - MONDAY) % WEEK:
            raise ValueError(f"start must be a Monday 00:00 UTC in Unix seconds, got {self.start}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        shares = [getattr(self, field.name) for field in fields(self) if field.name.endswith("_share")]
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:  # 0.1 + 0.2 + 0.3 + 0.4 need not be 1 in binary
            raise ValueError(f"the four shares must be non-negative and sum to at most 1, got {shares}")

    @classmethod
    def only(cls, *effects: str, **settings: Any) -> Self:
        """Return a shop in which, of the temporal effects, only the named ones are on.

        effects: names from TEMPORAL_EFFECTS; none switches all of them off
        settings: any other field
        """
        if unknown := set(effects) - set(TEMPORAL_EFFECTS):
            raise ValueError(f"unknown effects {sorted(unknown)}: choose from {', '.join(TEMPORAL_EFFECTS)}")
        return cls(**{effect: effect in effects for effect in TEMPORAL_EFFECTS}, **settings)

    @property
    def weeks(self) -> int:
        """Length of the log in weeks."""
        return round(self.years * YEAR / WEEK)

    @property
    def span(self) -> int:
        """Length of the log in seconds."""
        return self.weeks * WEEK

    @property
    def rhythms(self) -> tuple[tuple[Rhythm, bool], ...]:
        """Each rhythm of the calendar, and whether it is on."""
        return (SEASONS, self.yearly), (WEEKDAYS, self.weekly), (HOURS, self.daily)

    @property
    def taste_share(self) -> float:
        """Share of visits that follow the user's taste."""
        return 1.0 - (self.staple_share + self.season_share + self.weekday_share + self.hour_share)
