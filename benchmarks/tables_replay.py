"""The numbers of docs/findings.md on hourly updates: a day of Globo, replayed by `trope replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from table_parts import ROOT, read

WAYS = {
    "stale": "stale",
    "counting": "counting alone",
    "counts": "counts only",
    "update": "update",
    "retrain": "retrain",
}
WHOLE = "replay-globo-h200.json"
FROZEN = "replay-globo-h200-frozen.json"  # an update at the last rate, with a readout that stands still
YOUNG = "replay-globo-quarter-before.json"  # an update that was taken for a young network


def percent(way: str, records: list[dict[str, Any]]) -> float:
    """Recall@10 over all questions of some ticks."""
    users = [record["users"] for record in records]
    found = sum(record["ways"][way]["Recall@10"] * count for record, count in zip(records, users, strict=True))
    return 100 * found / sum(users)


def kept(records: list[dict[str, Any]]) -> str:
    """What an update has of a retraining's recall, in percent."""
    return f"{100 * percent('update', records) / percent('retrain', records):.1f}"


def share(name: str) -> str:
    """Steps of an update, in percent of a retraining's."""

    def mean(way: str) -> float:
        steps = [record["spent"][way]["steps"] for record in read(name)["records"]]
        return sum(steps) / sum(step > 0 for step in steps)

    return f"{100 * mean('update') / mean('retrain'):.1f}"


def lost(record: dict[str, Any]) -> float:
    """What an update lost against live counts in a tick, in points."""
    return 100 * (record["ways"]["counts only"]["Recall@10"] - record["ways"]["update"]["Recall@10"])


def against(name: str) -> str:
    """What today's update has of another replay's retraining, in percent."""
    return f"{100 * percent('update', read(WHOLE)['records']) / percent('retrain', read(name)['records']):.1f}"


def tried(how: str) -> str:
    """Recall@10 of a line of results/update-tried-quarter.txt."""
    lines = (ROOT / "results" / "update-tried-quarter.txt").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.endswith(how))


REPLAY_VALUES: dict[str, Callable[[], str]] = {
    **{
        f"replay-whole-{name}": lambda way=way: f"{percent(way, read(WHOLE)['records']):.2f}"
        for name, way in WAYS.items()
    },
    "replay-whole-kept": lambda: kept(read(WHOLE)["records"]),
    "replay-whole-share": lambda: share(WHOLE),
    "replay-whole-lost": lambda: f"{max(map(lost, read(WHOLE)['records'])):.0f}",
    "replay-frozen-kept": lambda: kept(read(FROZEN)["records"]),
    "replay-frozen-retrain": lambda: f"{percent('retrain', read(FROZEN)['records']):.2f}",
    "replay-against-frozen": lambda: against(FROZEN),
    "update-rule": lambda: tried("the readout follows, the age goes on (chosen)"),
    "update-rule-before": lambda: tried("last rate, the readout stays at the end of the training, the age goes on"),
    "replay-lost": lambda: f"{max(map(lost, read(YOUNG)['records'])):.0f}",
}
