"""Small experiments for the tests of `trope abtest`, and a plain Python version of what the engines count."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START = 1_700_000_000
DAY = 86_400
SHARES = {"control": 0.5, "trope": 0.5}


@dataclass
class Logs:
    """An experiment as rows. exposures: (user, arm, moment, forced). outcomes: (user, item, time, revenue).

    behind: seconds from the answer to the moment that was asked for.
    """

    exposures: list[tuple[str, str, int, bool]] = field(default_factory=list)
    outcomes: list[tuple[str, str, int, float]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    started: int = START
    behind: int = 0

    def write(self, folder: Path, files: int = 2) -> tuple[Path, Path]:
        """The folder of exposures and the file of outcomes."""
        exposures, outcomes = folder / "exposures", folder / "outcomes.parquet"
        exposures.mkdir(parents=True, exist_ok=True)
        write_record(exposures, self.shares, self.started)
        for number in range(files):
            rows = self.exposures[number::files]
            answered = pa.array([float(row[2] - self.behind) for row in rows], pa.float64())
            write_exposures(exposures / f"exposures-{number}.parquet", rows, answered=answered)
        write_outcomes(outcomes, self.outcomes)
        return exposures, outcomes

    def per_user(self, until: int | None = None) -> dict[str, dict[str, Any]]:
        """One dict per exposed user: arm, first, and the variables, counting only what came before `until`."""
        end = 2**62 if until is None else until
        users: dict[str, dict[str, Any]] = {}
        for user, arm, moment, forced in sorted(self.exposures, key=lambda row: row[2]):
            if not forced and moment < end:
                found = users.setdefault(user, {"arm": arm, "first": moment, "exposures": 0})
                found["exposures"] += 1
        rows = defaultdict(list)
        for user, _, time, revenue in self.outcomes:
            rows[user].append((time, revenue))
        for user, found in users.items():
            after = [row for row in rows[user] if found["first"] <= row[0] < end]
            before = [row for row in rows[user] if row[0] < self.started]
            for prefix, bought in (("", after), ("pre_", before)):
                found[f"{prefix}items"] = len(bought)
                found[f"{prefix}orders"] = len({time for time, _ in bought})
                found[f"{prefix}converted"] = int(bool(bought))
                found[f"{prefix}revenue"] = sum(revenue for _, revenue in bought)
        return users

    def column(self, name: str, arm: str, until: int | None = None) -> np.ndarray:
        return np.array([found[name] for found in self.per_user(until).values() if found["arm"] == arm], float)


def experiment(users: int = 300, days: int = 4, seed: int = 0, lift: float = 0.3, arms: tuple[str, ...] = ()) -> Logs:
    """Users of different appetite: they bought before the experiment, are exposed at random and buy after."""
    random = np.random.default_rng(seed)
    logs = Logs(shares={arm: 1 / len(arms) for arm in arms} if arms else dict(SHARES))
    names = list(logs.shares)
    for number in range(users):
        user, arm = f"u{number}", int(random.integers(len(names)))
        rate = random.gamma(2, 0.5)
        for moment in random.integers(START, START + days * DAY, 1 + random.poisson(2 * rate)):
            logs.exposures.append((user, names[arm], int(moment), False))
        for moment in random.integers(START - 30 * DAY, START, random.poisson(2 * rate)):
            logs.outcomes.append((user, f"i{random.integers(9)}", int(moment), float(random.gamma(2, 5))))
        for moment in random.integers(START, START + days * DAY, random.poisson(rate * (1 + lift * arm))):
            for _ in range(random.integers(1, 3)):  # an order of one or two items
                logs.outcomes.append((user, f"i{random.integers(9)}", int(moment), float(random.gamma(2, 5))))
    return logs


def write_record(folder: Path, shares: dict[str, float], started: float = START, **extra: Any) -> None:
    arms = {name: {"share": share, "model": f"{name}-1"} for name, share in shares.items()}
    record = {"format": 1, "name": "test", "salt": "s", "started": started, "arms": arms, **extra}
    (folder / "experiment.json").write_text(json.dumps(record))


def write_exposures(path: Path, rows: list[tuple[str, str, int, bool]], **change: Any) -> None:
    """change: columns to replace; None removes one."""
    columns: dict[str, Any] = {
        "request_id": pa.array([str(number) for number in range(len(rows))], pa.string()),
        "experiment": pa.array(["test"] * len(rows), pa.string()),
        "user_id": pa.array([row[0] for row in rows], pa.string()),
        "arm": pa.array([row[1] for row in rows], pa.string()),
        "moment": pa.array([row[2] for row in rows], pa.int64()),
        "answered": pa.array([float(row[2]) for row in rows], pa.float64()),
        "items": pa.array([["a", "b"]] * len(rows), pa.list_(pa.string())),
        "model": pa.array([f"{row[1]}-1" for row in rows], pa.string()),
        "forced": pa.array([row[3] for row in rows], pa.bool_()),
    }
    columns |= change
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)


def write_outcomes(path: Path, rows: list[tuple[str, str, int, float]]) -> None:
    users, items, times, revenue = zip(*rows, strict=True) if rows else ((), (), (), ())
    pq.write_table(
        pa.table(
            {
                "user_id": pa.array(users, pa.string()),
                "item_id": pa.array(items, pa.string()),
                "timestamp": pa.array(times, pa.int64()),
                "revenue": pa.array(revenue, pa.float64()),
            }
        ),
        path,
    )
