"""The numbers of docs/findings.md on hourly updates: a day of Globo, replayed by `trope replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from table_parts import read

WAYS = {"stale": "stale", "counts": "counts only", "update": "update", "retrain": "retrain"}
FILE, BEFORE = "replay-globo-quarter.json", "replay-globo-quarter-before.json"
UNFITTED, WHOLE = "replay-globo-quarter-unfitted.json", "replay-globo-h200.json"


def percent(way: str, records: list[dict[str, Any]]) -> str:
    """Recall@10 over all questions of some ticks."""
    users = [record["users"] for record in records]
    found = sum(record["ways"][way]["Recall@10"] * count for record, count in zip(records, users, strict=True))
    return f"{100 * found / sum(users):.2f}"


def retrained(name: str) -> list[dict[str, Any]]:
    """The ticks right after a retraining, in a replay of the same day with or without one."""
    ticks = {record["tick"] for record in read(UNFITTED)["records"] if record["spent"]["retrain"]["steps"]}
    return [record for record in read(name)["records"] if record["tick"] in ticks]


def share(updated: str, retrained: str) -> str:
    """Steps of an update in one file, in percent of a retraining's in another."""

    def mean(name: str, way: str) -> float:
        steps = [record["spent"][way]["steps"] for record in read(name)["records"]]
        return sum(steps) / sum(step > 0 for step in steps)

    return f"{100 * mean(updated, 'update') / mean(retrained, 'retrain'):.1f}"


def kept(records: list[dict[str, Any]]) -> str:
    """What an update has of a retraining's recall, in percent."""
    return f"{100 * float(percent('update', records)) / float(percent('retrain', records)):.1f}"


def lost() -> str:
    """The most that an update lost against live counts in one tick, before it was mended."""
    ways = [record["ways"] for record in read(BEFORE)["records"]]
    return f"{100 * max(each['counts only']['Recall@10'] - each['update']['Recall@10'] for each in ways):.0f}"


REPLAY_VALUES: dict[str, Callable[[], str]] = {
    **{
        f"replay-{name}": lambda way=way: percent(way, read(UNFITTED if way == "retrain" else FILE)["records"])
        for name, way in WAYS.items()
    },
    **{
        f"replay-fresh-{name}": lambda way=way: percent(way, retrained(UNFITTED if way == "retrain" else FILE))
        for name, way in WAYS.items()
    },
    "replay-unfitted": lambda: percent("update", read(UNFITTED)["records"]),
    **{f"replay-whole-{name}": lambda way=way: percent(way, read(WHOLE)["records"]) for name, way in WAYS.items()},
    "replay-share": lambda: share(FILE, UNFITTED),
    "replay-whole-kept": lambda: kept(read(WHOLE)["records"]),
    "replay-whole-share": lambda: share(WHOLE, WHOLE),
    "replay-lost": lost,
}
