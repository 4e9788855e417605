"""Metrics by name: a variable per user (`revenue`), or a ratio of two variables (`revenue/orders`)."""

from __future__ import annotations

from dataclasses import dataclass

from trope.online.analysis.outcomes import OUTCOMES, REVENUE

EXPOSURES = "exposures"
_VARIABLES = {"conversion": "converted", "items": "items", "orders": "orders", "revenue": "revenue"}
_DENOMINATORS = ("exposures", "orders", "items")
_LABELS = {"conversion": "CVR", "items": "Items", "orders": "Orders", "revenue": "Revenue"}
_DEFINITIONS = {
    "conversion": "Conversion rate: users with an order",
    "items": "Items bought per user",
    "orders": "Count of orders per user",
    "revenue": "Revenue per user",
}


@dataclass(frozen=True)
class Metric:
    """name: as on the command line. numer, denom: columns of the users' table; no denominator for a mean per user."""

    name: str
    numer: str
    denom: str | None = None

    @property
    def label(self) -> str:
        top, _, bottom = self.name.partition("/")
        return f"{_LABELS[top]} / {bottom.removesuffix('s')}" if bottom else _LABELS[top]

    @property
    def definition(self) -> str:
        top, _, bottom = self.name.partition("/")
        if not bottom:
            return _DEFINITIONS[top]
        what = "Converted users" if top == "conversion" else top.capitalize()
        return f"{what} per {bottom.removesuffix('s')} (ratio of sums)"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.numer,) if self.denom is None else (self.numer, self.denom)

    @property
    def covariates(self) -> tuple[str, ...]:
        """Columns from before the experiment; none where a part has no past."""
        return tuple(f"pre_{name}" for name in self.columns) if set(self.columns) <= set(OUTCOMES) else ()


def parse_metrics(text: str | None, has_revenue: bool) -> list[Metric]:
    """The metrics of a list such as `conversion,revenue/orders`; None means every mean per user."""
    if text is None:
        return [metric(name) for name in ("conversion", "orders", "items", *((REVENUE,) if has_revenue else ()))]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("--metrics names no metric; leave it out for all means per user")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--metrics names {doubled[0]!r} twice; name each metric once")
    found = [metric(name) for name in names]
    if not has_revenue and (missing := [each.name for each in found if REVENUE in each.columns]):
        raise ValueError(f"metric {missing[0]!r} needs a revenue column, and OUTCOMES has none; see --revenue-col")
    return found


def metric(name: str) -> Metric:
    """The metric of a name; refuses unknown ones."""
    top, slash, bottom = name.partition("/")
    if top not in _VARIABLES or (slash and (bottom not in _DENOMINATORS or bottom == top)):
        raise ValueError(
            f"unknown metric {name!r}; choose {', '.join(_VARIABLES)}, or a ratio such as revenue/orders or "
            f"orders/exposures (below the line: {', '.join(_DENOMINATORS)})"
        )
    return Metric(name, _VARIABLES[top], bottom or None)
