"""How often do those who look every day see a difference that is not there? 10,000 A/A tests with 30 looks.

python benchmarks/abtest_false_positives.py [--tests 10000] [--result results/abtest-looks.json]

Each test simulates users of two arms for 30 days and looks after each day. Three readers look at the same numbers: a
naive one (Welch's test at 0.05 each day), one with group sequential bounds, one with a confidence sequence. Two shops:
`once`, where users buy on the day they come, and `returning`, where they come back and buy again. The second is the
harder one: the looks are then not independent in the way that the bounds assume. Then the same with a true effect, for
the power of the group sequential test against a single test at the end.

The statistics are computed for all looks at once; --check compares some tests with `trope.online.analysis.looks`.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from trope import environment
from trope.online.analysis import always, spending
from trope.online.analysis.looks import LEAST_TO_LOOK, Plan, read_plan
from trope.online.analysis.metrics import metric
from trope.online.analysis.moments import Moments

ROOT = Path(__file__).parent.parent
DAYS, ALPHA = 30, 0.05
PLAN = Plan(looks=DAYS, horizon=DAYS)


@dataclass(frozen=True)
class Shop:
    """users: of both arms. buys: mean orders of a user on a day it can buy. returning: whether users come back."""

    name: str
    users: int
    buys: float
    returning: bool


SHOPS = (Shop("once", 8_000, 0.5, False), Shop("returning", 8_000, 0.2, True))


def simulate(shop: Shop, effect: float, random: np.random.Generator) -> list[np.ndarray]:
    """For each arm: count, sum and sum of squares of the revenue per user after each day, [3, day]."""
    arm = random.integers(0, 2, shop.users)
    came = random.integers(0, DAYS, shop.users)
    rate = shop.buys * random.gamma(2.0, 0.5, shop.users)
    present = DAYS - came if shop.returning else np.ones(shop.users, int)
    buyer = np.repeat(np.arange(shop.users), random.poisson(rate * present))
    day = came[buyer] + np.floor(random.random(len(buyer)) * present[buyer]).astype(int)
    # An order's value is gamma distributed with mean 1; the effect is on the values.
    paid = random.gamma(2.0, 0.5, len(buyer)) * (1 + effect * arm[buyer])
    table = np.bincount(buyer * DAYS + day, paid, shop.users * DAYS).reshape(shop.users, DAYS)
    total = np.cumsum(table, axis=1)
    found = []
    for side in (0, 1):
        of = arm == side
        count = np.cumsum(np.bincount(came[of], minlength=DAYS))
        found.append(np.stack([count, total[of].sum(0), (total[of] ** 2).sum(0)]))
    return found


def z_and_information(arms: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Welch's statistic, its degrees of freedom, and the information about the log ratio, after each day."""
    means, parts, counts = [], [], []
    for count, total, squares in arms:
        mean = total / count
        parts.append((squares - total * mean) / (count - 1) / count)
        means.append(mean)
        counts.append(count)
    error = parts[0] + parts[1]
    freedom = error**2 / (parts[0] ** 2 / (counts[0] - 1) + parts[1] ** 2 / (counts[1] - 1))
    return (
        (means[1] - means[0]) / np.sqrt(error),
        freedom,
        1 / (parts[0] / means[0] ** 2 + parts[1] / means[1] ** 2),
    )


def readers(arms: list[np.ndarray]) -> dict[str, int | None]:
    """The first look, from 1, at which each reader sees a difference."""
    # What `read_plan` does: no look with few users, and information that rises.
    first = int(np.argmax(np.minimum(arms[0][0], arms[1][0]) >= LEAST_TO_LOOK))
    z, freedom, information = (each[first:] for each in z_and_information(arms))
    for look in range(1, len(z)):
        information[look] = max(information[look], information[look - 1] * 1.001)
    fractions = [(look + 1) / DAYS for look in range(first, DAYS)]
    limits = {
        "naive": stats.t.isf(ALPHA / 2, freedom),
        "group sequential": np.array(spending.bounds(list(information), fractions, ALPHA, PLAN.spending)),
        "confidence sequence": np.array([always.limit(level / information[0], ALPHA) for level in information]),
    }
    found: dict[str, int | None] = {}
    for name, limit in limits.items():
        crossed = np.flatnonzero(np.abs(z) >= limit)
        found[name] = first + int(crossed[0]) + 1 if len(crossed) else None
    found["one test at the end"] = DAYS if abs(z[-1]) >= limits["naive"][-1] else None
    return found


def check(arms: list[np.ndarray]) -> None:
    """The analysis itself must cross at the same looks."""
    moments = [[Moments(int(n), {"revenue": s}, {("revenue", "revenue"): q}) for n, s, q in side.T] for side in arms]
    expected = readers(arms)
    for name, plan in (("group sequential", PLAN), ("confidence sequence", Plan(always=True))):
        crossed = read_plan(plan, metric("revenue"), *moments, ALPHA, cuped=False).crossed
        assert (None if crossed is None else crossed + 1) == expected[name], name


def run(shop: Shop, effect: float, tests: int, seed: int, checked: int) -> dict[str, object]:
    start = time.perf_counter()
    stops: dict[str, list[int]] = {}
    for number in range(tests):
        arms = simulate(shop, effect, np.random.default_rng((seed, number)))
        if number < checked:
            check(arms)
        for name, look in readers(arms).items():
            stops.setdefault(name, []).extend([] if look is None else [look])
    found: dict[str, object] = {"shop": shop.name, "effect": effect, "tests": tests, "looks": DAYS, "checked": checked}
    for name, looks in stops.items():
        share = len(looks) / tests
        found[name] = {
            "share": share,
            "standard_error": (share * (1 - share) / tests) ** 0.5,
            "mean_look": float(np.mean(looks)) if looks else None,
        }
    found["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--check", type=int, default=10, help="tests of each kind to compare with the analysis itself")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--result", type=Path, default=ROOT / "results" / "abtest-looks.json")
    arguments = parser.parse_args()
    effects = {"once": 0.13, "returning": 0.085}  # about 85 % power of the single test
    kinds = [(shop, effect) for shop in SHOPS for effect in (0.0, effects[shop.name])]
    with ProcessPoolExecutor(arguments.processes) as pool:
        waiting = [pool.submit(run, shop, effect, arguments.tests, 18, arguments.check) for shop, effect in kinds]
        runs = [each.result() for each in waiting]
    result = {"alpha": ALPHA, "spending": PLAN.spending, "runs": runs, "environment": environment.describe()}
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
