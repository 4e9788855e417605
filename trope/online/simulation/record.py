"""A rehearsal as files: exposures as a server leaves them, outcomes as a shop does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trope.online.assignment import Experiment
from trope.online.exposures import PARQUET, arrow, schema, write_experiment, write_parquet
from trope.online.simulation.loop import PAUSE, Outcome
from trope.online.simulation.population import Floats, Ints
from trope.online.simulation.traffic import Traffic

OUTCOMES = "outcomes.parquet"
EXPOSURES = "exposures"


def places_of(experiment: Experiment, users: int) -> Ints:
    """[U] each user's arm, as a place among the arms; users are numbers from 0."""
    places = {arm: place for place, arm in enumerate(experiment.arms)}
    return np.array([places[experiment.arm_of(str(user))] for user in range(users)])


def write_exposures(
    folder: Path, experiment: Experiment, models: Mapping[str, str], traffic: Traffic, outcome: Outcome, arm_of: Ints
) -> None:
    """Write what was shown. models: version of the weights, by arm. arm_of: as `places_of` gives it."""
    pa = arrow()
    folder.mkdir(parents=True, exist_ok=True)
    write_experiment(folder, experiment, models)
    arms, arm = list(experiment.arms), arm_of[traffic.user]
    filled = outcome.slates >= 0
    ends = np.concatenate(([0], np.cumsum(filled.sum(1)))).astype(np.int32)
    columns = {
        "request_id": [f"r{number}" for number in range(len(traffic))],
        "experiment": [experiment.name] * len(traffic),
        "user_id": traffic.user.astype(str),
        "arm": np.array(arms)[arm],
        "moment": traffic.time,
        "answered": traffic.time.astype(np.float64),
        "items": pa.ListArray.from_arrays(ends, pa.array(outcome.slates[filled].astype(str), pa.string())),
        "model": np.array([models[name] for name in arms])[arm],
        "forced": np.zeros(len(traffic), bool),
    }
    write_parquet(folder / PARQUET.format("0"), pa.table(columns, schema=schema()))


def move_answers(folder: Path) -> None:
    """Set `answered` of a server's exposures to the shop's time, in which the experiment was played."""
    pa = arrow()
    import pyarrow.parquet as pq

    for file in sorted(folder.glob(PARQUET.format("*"))):
        table = pq.read_table(file)
        place = table.schema.get_field_index("answered")
        table = table.set_column(place, schema().field("answered"), table["moment"].cast(pa.float64()))
        write_parquet(file, table)


def write_outcomes(path: Path, traffic: Traffic, outcome: Outcome, prices: Floats) -> None:
    """Write what was bought: user_id, item_id, timestamp, revenue."""
    pa = arrow()
    bought = np.flatnonzero(outcome.place >= 0)
    columns = {
        "user_id": pa.array(traffic.user[bought].astype(str), pa.string()),
        "item_id": pa.array(outcome.bought[bought].astype(str), pa.string()),
        "timestamp": traffic.time[bought] + PAUSE,
        "revenue": outcome.revenue(prices)[bought],
    }
    write_parquet(path, pa.table(columns))
