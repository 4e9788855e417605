"""CUPED on a year of the calendar shop: half a year of A/A test, with the half-year before as covariate.

python benchmarks/abtest_cuped.py [--users 20000] [--result results/cuped.json]

The variance must fall by the squared correlation of both half-years, which is computed here from the log itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import duckdb
import numpy as np

from trope import environment
from trope.data.sources.resolve import Request
from trope.data.synthetic import CalendarShop, write_events
from trope.online.analysis.analyse import Question, analyse
from trope.times import YEAR

ROOT = Path(__file__).parent.parent
METRICS = {"conversion": "converted", "orders": "orders", "items": "items"}


def write_experiment(log: str, folder: Path, start: int) -> None:
    """Everybody of the log is exposed once, at the start, to one of two arms that are the same."""
    arms = {name: {"share": 0.5, "model": "same"} for name in ("control", "again")}
    record = {"format": 1, "name": "cuped", "salt": "s", "started": start, "arms": arms}
    (folder / "experiment.json").write_text(json.dumps(record))
    duckdb.sql(
        f"""COPY (
            SELECT u::VARCHAR AS request_id, 'cuped' AS experiment, u::VARCHAR AS user_id,
                if(hash(u, 1) % 2 = 0, 'control', 'again') AS arm, ({start} + hash(u, 2) % 86400)::BIGINT AS moment,
                {start}::DOUBLE AS answered, []::VARCHAR[] AS items, 'same' AS model, false AS forced
            FROM (SELECT DISTINCT "user" AS u FROM '{log}')
        ) TO '{folder}/exposures-0.parquet'"""
    )


def per_user(log: str, start: int) -> dict[str, np.ndarray]:
    """What each user bought in the half-year before and in the one after, straight from the log."""
    half = YEAR // 2
    rows = duckdb.sql(
        f"""SELECT count_if(before) AS pre_items, count(DISTINCT basket) FILTER (before) AS pre_orders,
            count_if(after) AS items, count(DISTINCT basket) FILTER (after) AS orders
        FROM (
            SELECT "user", basket, timestamp < {start} AND timestamp >= {start - half} AS before,
                timestamp >= {start} + hash("user", 2) % 86400 AND timestamp < {start + half} AS after
            FROM '{log}'
        ) GROUP BY "user" """
    ).fetchnumpy()
    found = {name: np.asarray(values, float) for name, values in rows.items()}
    return {**found, "converted": 1.0 * (found["items"] > 0), "pre_converted": 1.0 * (found["pre_items"] > 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--mean-events", type=float, default=40.0)
    parser.add_argument("--result", type=Path, default=ROOT / "results" / "cuped.json")
    arguments = parser.parse_args()
    shop = CalendarShop(users=arguments.users, mean_events=arguments.mean_events, years=2)
    with tempfile.TemporaryDirectory() as folder:
        log = write_events(Path(folder) / "log.parquet", shop)
        half = YEAR // 2
        start = shop.start + YEAR + half  # of the second year: half a year before it, half a year after
        year = Path(folder) / "year.parquet"
        duckdb.sql(f"COPY (FROM '{log}' WHERE timestamp >= {start - half} AND timestamp < {start + half}) TO '{year}'")
        exposures = Path(folder) / "exposures"
        exposures.mkdir()
        write_experiment(str(log), exposures, start)
        request = Request(str(year), basket_col="basket")
        found = analyse(exposures, request, Question(metrics=",".join(METRICS), control="control"))
        users = per_user(str(log), start)
    rows = []
    for name, column in METRICS.items():
        rho2 = float(np.corrcoef(users[column], users[f"pre_{column}"])[0, 1] ** 2)
        reduction = found.of(name).reading.estimate.reduction
        assert reduction is not None
        rows.append({"metric": name, "rho2": rho2, "reduction": reduction, "points_apart": 100 * (reduction - rho2)})
        print(rows[-1])
    result = {
        "users": sum(found.users.values()),
        "outcomes": found.outcomes.used,
        "rows": rows,
        "shop": asdict(shop),
        "environment": environment.describe(),
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
