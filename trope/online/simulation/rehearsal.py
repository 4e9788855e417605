"""One rehearsed experiment from traffic to files, in this process or over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trope.online.assignment import Experiment
from trope.online.simulation.answers import ByArm, InProcess
from trope.online.simulation.loop import Outcome, simulate
from trope.online.simulation.over_http import serving
from trope.online.simulation.population import Population
from trope.online.simulation.record import EXPOSURES, OUTCOMES, move_answers, places_of, write_exposures, write_outcomes
from trope.online.simulation.traffic import Traffic

NAME = "rehearsal"


class Rehearsed(NamedTuple):
    """An experiment that was played."""

    experiment: Experiment
    traffic: Traffic
    outcome: Outcome


def make_experiment(population: Population, arms: list[str], seed: int) -> Experiment:
    """Equal shares, from the end of the shop's log on; each seed assigns anew."""
    return Experiment(NAME, dict.fromkeys(arms, 1.0), population.end, f"{NAME} {seed}")


def rehearse(population: Population, days: int, arms: Mapping[str, InProcess], seed: int, out: Path) -> Rehearsed:
    """Play one experiment with models of this process, and write `out`/exposures and `out`/outcomes.parquet."""
    experiment, traffic = make_experiment(population, list(arms), seed), Traffic.of(population, days, seed)
    for arm in arms.values():
        arm.reset()
    arm_of = places_of(experiment, population.count)
    k = next(iter(arms.values())).k
    outcome = simulate(population, traffic, ByArm(list(arms.values()), arm_of), k)
    write_exposures(out / EXPOSURES, experiment, dict.fromkeys(arms, "in process"), traffic, outcome, arm_of)
    write_outcomes(out / OUTCOMES, traffic, outcome, population.prices)
    return Rehearsed(experiment, traffic, outcome)


def rehearse_over_http(
    population: Population, days: int, runs: Mapping[str, str], seed: int, out: Path, k: int
) -> Rehearsed:
    """The same with one real server, which assigns the users and writes the exposures."""
    experiment, traffic = make_experiment(population, list(runs), seed), Traffic.of(population, days, seed)
    with serving(experiment, runs, out / EXPOSURES, k) as server:
        outcome = simulate(population, traffic, server, k)
    moved = [user for user, arm in server.arms.items() if arm != experiment.arm_of(str(user))]
    assert not moved, f"the server put users {moved[:3]} into other arms than the experiment"
    move_answers(out / EXPOSURES)
    write_outcomes(out / OUTCOMES, traffic, outcome, population.prices)
    return Rehearsed(experiment, traffic, outcome)
