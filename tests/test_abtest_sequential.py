"""Group sequential bounds equal the published tables; confidence sequences equal their formula; both keep alpha."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import optimize, stats

from trope.online.analysis import always
from trope.online.analysis.looks import Plan
from trope.online.analysis.spending import _rule, bounds, inflation, repeated_p, spent, stopping

# Jennison and Turnbull (2000), tables 2.1 and 2.3: constants of two-sided tests with K equally spaced looks.
POCOCK = {
    0.05: {1: 1.960, 2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413, 6: 2.453, 7: 2.485, 8: 2.512, 9: 2.535, 10: 2.555},
    0.01: {1: 2.576, 2: 2.772, 3: 2.873, 4: 2.939, 5: 2.986, 6: 3.023, 7: 3.053, 8: 3.078, 9: 3.099, 10: 3.117},
}
OBRIEN_FLEMING = {
    0.05: {1: 1.960, 2: 1.977, 3: 2.004, 4: 2.024, 5: 2.040, 6: 2.053, 7: 2.063, 8: 2.072, 9: 2.080, 10: 2.087},
    0.01: {1: 2.576, 2: 2.580, 3: 2.595, 4: 2.609, 5: 2.621},
}
# Reboussin, DeMets, Kim and Lan (2000), program ld98: five equally spaced looks, two-sided 0.05.
LAN_DEMETS = {
    "obrien-fleming": [4.877, 3.357, 2.680, 2.290, 2.031],
    "pocock": [2.438, 2.427, 2.410, 2.397, 2.386],
}
# Jennison and Turnbull, tables 2.2 and 2.4: largest sample over that of one test, power 0.8, by number of looks.
INFLATION = {0.0: {2: 1.110, 3: 1.166, 4: 1.202, 5: 1.229, 10: 1.301}, 0.5: {2: 1.008, 3: 1.017, 4: 1.024, 5: 1.028}}


def even(looks: int) -> list[float]:
    return [(look + 1) / looks for look in range(looks)]


def constant(looks: int, alpha: float, shape: float) -> float:
    """C such that the bounds C (K / k)^shape are reached with probability alpha."""
    times = even(looks)

    def excess(value: float) -> float:
        return sum(stopping(times, [value * time**-shape for time in times])) - alpha

    return float(optimize.brentq(excess, 1, 5, xtol=1e-10))


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize(("shape", "table"), [(0.0, POCOCK), (0.5, OBRIEN_FLEMING)])
def test_classic_constants_equal_the_tables(shape: float, table: dict[float, dict[int, float]], alpha: float) -> None:
    for looks, printed in table[alpha].items():
        assert round(constant(looks, alpha, shape), 3) == pytest.approx(printed, abs=1e-9), looks


@pytest.mark.parametrize("kind", list(LAN_DEMETS))
def test_spending_bounds_equal_the_tables(kind: str) -> None:
    found = bounds(even(5), even(5), 0.05, kind)
    assert [round(bound, 3) for bound in found] == pytest.approx(LAN_DEMETS[kind], abs=1e-9)


def test_spending_bounds_equal_another_program() -> None:
    """The README of SeqBounds.jl: one-sided 0.05 at four looks, which is one side of a two-sided 0.1."""
    looks = [0.25, 0.5, 0.75, 1.0]
    assert [spent("obrien-fleming", look, 0.1) / 2 for look in looks] == pytest.approx(
        [8.85754e-5, 0.0055746, 0.0236251, 0.05], rel=1e-5
    )
    assert bounds(looks, looks, 0.1, "obrien-fleming") == pytest.approx([3.74955, 2.53993, 2.01604, 1.72014], abs=1e-4)


def test_sample_size_inflation_equals_the_tables() -> None:
    fixed = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    for shape, table in INFLATION.items():
        for looks, printed in table.items():
            times = even(looks)
            limits = [constant(looks, 0.05, shape) * time**-shape for time in times]
            drift = optimize.brentq(lambda drift, t=times, c=limits: sum(stopping(t, c, drift)) - 0.8, 1, 6)
            # The tables leave out stops on the wrong side, which makes them up to 0.001 larger.
            assert (drift / fixed) ** 2 == pytest.approx(printed, abs=1e-3)
    assert 1 < inflation(even(5), 0.05, 0.8, "obrien-fleming") < inflation(even(5), 0.05, 0.8, "pocock") < 1.25
    assert inflation([1.0], 0.05, 0.8, "pocock") == pytest.approx(1)


@pytest.mark.parametrize("kind", list(LAN_DEMETS))
def test_alpha_is_spent_exactly_at_uneven_looks(kind: str) -> None:
    information, fractions = [0.2, 1.1, 1.3, 4.0], [0.1, 0.25, 0.7, 1.0]
    found = np.cumsum(stopping(information, bounds(information, fractions, 0.05, kind)))
    assert found == pytest.approx([spent(kind, fraction, 0.05) for fraction in fractions], abs=1e-12)


def test_integration_equals_the_multivariate_normal() -> None:
    """P(|Z_1| < a, |Z_2| < b) from SciPy, by inclusion and exclusion."""
    a, b, times = 2.3, 2.1, [0.4, 1.0]
    normal = stats.multivariate_normal([0, 0], [[1, math.sqrt(0.4)], [math.sqrt(0.4), 1]])
    inside = normal.cdf([a, b], lower_limit=[-a, -b])
    assert 1 - sum(stopping(times, [a, b])) == pytest.approx(inside, abs=1e-8)


def test_one_look_is_one_test() -> None:
    assert bounds([7.0], [1.0], 0.05, "pocock") == pytest.approx([stats.norm.ppf(0.975)], abs=1e-12)
    assert repeated_p([2.5], [7.0], [1.0], "pocock") == pytest.approx(2 * stats.norm.sf(2.5), rel=2e-4)


def test_repeated_p_is_the_level_of_the_bound() -> None:
    times = even(6)
    for alpha in (0.2, 0.01):
        limits = bounds(times[:4], times[:4], alpha, "obrien-fleming")
        z = [0.0, 0.0, limits[2] + 1e-9, 0.0]
        assert repeated_p(z, times[:4], times[:4], "obrien-fleming") == pytest.approx(alpha, rel=2e-4)
    assert repeated_p([0.0], [0.5], [0.5], "pocock") == 1.0


def test_looks_without_new_information_are_quick() -> None:
    """Information that stands still makes short steps and many nodes; whole rules of them took two minutes."""
    levels = [*range(1, 7), *(6 * 1.001**step for step in range(1, 25))]
    began = time.process_time()
    assert repeated_p([0.5] * 30, levels, even(30), "obrien-fleming") == pytest.approx(0.62244, abs=1e-4)
    assert time.process_time() - began < 30
    nodes, weights = _rule(100)
    assert (np.diff(nodes) > 0).all() and weights @ nodes**10 == pytest.approx(2 / 11, rel=1e-13)


def test_confidence_sequence_is_the_normal_mixture() -> None:
    """The bound makes the mixture of likelihood ratios over N(0, rho²) equal to 1 / alpha."""
    rho2 = always._rho2(0.05)
    for information in (1.0, 14.0, 300.0):
        z = always.limit(information, 0.05)
        score = z * math.sqrt(information)
        mixture = stats.norm.pdf(score, 0, math.sqrt(information + rho2 * information**2)) / stats.norm.pdf(
            score, 0, math.sqrt(information)
        )
        assert mixture == pytest.approx(20, rel=1e-9)
        assert always.p_value(z, information, 0.05) == pytest.approx(0.05, rel=1e-9)
    widths = [always.limit(level, 0.05) / math.sqrt(level) for level in (1, 14, 100)]
    assert widths == sorted(widths, reverse=True)


def test_looks_keep_alpha_and_naive_looks_do_not() -> None:
    """1,000 walks under the null with 20 looks; benchmarks/abtest_false_positives.py has 10,000 whole experiments."""
    random = np.random.default_rng(3)
    times = np.array(even(20))
    z = np.cumsum(random.normal(size=(1_000, 20)), axis=1) / np.sqrt(np.arange(1, 21))
    group = np.array(bounds(times, times, 0.05, "obrien-fleming"))
    sequence = np.array([always.limit(level, 0.05) for level in range(1, 21)])
    rates = [(np.abs(z) >= limits).any(axis=1).mean() for limits in (group, sequence, np.full(20, 1.96))]
    assert rates[0] < 0.07 and rates[1] < 0.05 and rates[2] > 0.2


def test_looks_are_spread_over_the_horizon() -> None:
    assert Plan(looks=3, horizon=10).days(99) == [3, 6, 9]
    assert Plan(looks=3, horizon=10).days(5) == [3]
    assert Plan(always=True).days(2) == [0, 1, 2] and Plan().days(2) == [2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"looks": 3}, "--looks K and --horizon DAYS go together"),
        ({"looks": 3, "horizon": 2}, "--looks 3 must be from 1 to --horizon 2"),
        ({"always": True, "looks": 3, "horizon": 9}, "--always needs no --looks"),
        ({"looks": 3, "horizon": 9, "spending": "haybittle"}, "unknown --spending 'haybittle'"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**settings)
