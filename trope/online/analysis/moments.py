"""Sufficient statistics: counts, sums and sums of products of users, by group. Nothing else leaves the engine.

Engines sum within (arm, day); the days are added here, exactly rounded, so that engines agree to the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ibis
import ibis.expr.types as ir
from tea_tasting.aggr import Aggregates

from trope.data.engines.base import Engine

Pair = tuple[str, str]


@dataclass(frozen=True)
class Moments:
    """Of some users: how many, the sum of each variable, and the sum of the product of each pair (a <= b)."""

    count: int
    sums: dict[str, float]
    products: dict[Pair, float]

    def aggregates(self) -> Aggregates:
        """Means, variances and covariances, as tea-tasting takes them."""
        n = self.count
        mean = {name: total / n for name, total in self.sums.items()}
        scale = 1 / (n - 1) if n > 1 else math.nan
        spread = {(a, b): (value - self.sums[a] * mean[b]) * scale for (a, b), value in self.products.items()}
        # Rounding may leave -1e-20 of a variable that never changes.
        var = {a: max(value, 0.0) for (a, b), value in spread.items() if a == b}
        return Aggregates(n, mean, var, {pair: value for pair, value in spread.items() if pair[0] != pair[1]})


def added(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together."""
    parts = list(parts)
    if not parts:
        return Moments(0, {}, {})
    return Moments(
        sum(part.count for part in parts),
        {name: math.fsum(part.sums[name] for part in parts) for name in parts[0].sums},
        {pair: math.fsum(part.products[pair] for part in parts) for pair in parts[0].products},
    )


def pairs(names: Sequence[str]) -> list[Pair]:
    ordered = sorted(names)
    return [(a, b) for place, a in enumerate(ordered) for b in ordered[place:]]


def read_moments(users: ir.Table, names: Sequence[str], keys: Sequence[str]) -> dict[tuple[Any, ...], Moments]:
    """Moments of the users of each group. users: one row per user; names: its variables; keys: its group columns."""
    numbers = {name: users[name].cast("float64") for name in names}
    wanted = {f"s_{name}": value.sum() for name, value in numbers.items()}
    wanted |= {f"p_{a}_{b}": (numbers[a] * numbers[b]).sum() for a, b in pairs(names)}
    rows = users.group_by(list(keys)).aggregate(n=users.count(), **wanted).to_pyarrow().to_pylist()
    return {tuple(row[key] for key in keys): _moments(row, names) for row in rows}


def read_days(
    users: ir.Table, steps: ir.Table, names: Sequence[str], fixed: Sequence[str], engine: Engine
) -> dict[tuple[int, int], Moments]:
    """What each day adds to the moments of each arm: (arm, day) -> differences, which sum up to any day's moments.

    users: one row per user with `user`, `arm`, `entered` (the day of the first exposure) and the variables `fixed`.
    steps: rows (user, day, one column for each of `names`): by how much a user's variables grow on a day.

    A user's square grows from c² to (c + step)², so the running sums c give the day's part of every product.
    """
    entering = read_moments(users, fixed, ("arm", "entered"))
    running = {}
    for name in names:
        total = steps[name].cast("float64").sum()
        running[f"to_{name}"] = total.over(ibis.window(group_by="user", order_by="day", preceding=None, following=0))
    grown = steps.mutate(**running)
    grown = grown.mutate(**{f"from_{name}": grown[f"to_{name}"] - grown[name].cast("float64") for name in names})
    grown = grown.join(users.select("user", "arm", *fixed), "user", how="inner")
    wanted = {f"s_{name}": grown[name].cast("float64").sum() for name in names}
    for a, b in pairs([*names, *fixed]):
        if a in names and b in names:
            wanted[f"p_{a}_{b}"] = (grown[f"to_{a}"] * grown[f"to_{b}"] - grown[f"from_{a}"] * grown[f"from_{b}"]).sum()
        elif a in names or b in names:
            wanted[f"p_{a}_{b}"] = (grown[a].cast("float64") * grown[b].cast("float64")).sum()
    rows = grown.group_by(["arm", "day"]).aggregate(**wanted).to_pyarrow().to_pylist()
    found = {(row["arm"], row["day"]): row for row in rows}
    every = [*names, *fixed]
    return {
        key: added(
            [
                _padded(entering.get(key, Moments(0, {}, {})), every),
                _moments({"n": 0, **found.get(key, {})}, every),
            ]
        )
        for key in sorted(set(found) | set(entering))
    }


def _moments(row: dict[str, Any], names: Sequence[str]) -> Moments:
    return Moments(
        int(row["n"]),
        {name: float(row.get(f"s_{name}") or 0.0) for name in names},
        {(a, b): float(row.get(f"p_{a}_{b}") or 0.0) for a, b in pairs(names)},
    )


def _padded(moments: Moments, names: Sequence[str]) -> Moments:
    """Moments of more variables, which are zero."""
    return Moments(
        moments.count,
        {name: moments.sums.get(name, 0.0) for name in names},
        {pair: moments.products.get(pair, 0.0) for pair in pairs(names)},
    )
