"""The numbers of docs/findings.md on hourly updates: a day of Globo, replayed by `trope replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from table_parts import read

WAYS = {"stale": "stale", "counts": "counts only", "update": "update", "retrain": "retrain"}
FILE, BEFORE = "replay-globo-quarter.json", "replay-globo-quarter-before.json"


def percent(way: str, records: list[dict[str, Any]]) -> str:
    """Recall@10 over all questions of some ticks."""
    users = [record["users"] for record in records]
    found = sum(record["ways"][way]["Recall@10"] * count for record, count in zip(records, users, strict=True))
    return f"{100 * found / sum(users):.2f}"


def retrained() -> list[dict[str, Any]]:
    """The ticks right after a retraining."""
    return [record for record in read(FILE)["records"] if record["spent"]["retrain"]["steps"]]


def share() -> str:
    """Steps of an update, in percent of a retraining's."""
    spent = [record["spent"] for record in read(FILE)["records"]]
    steps = {way: [each[way]["steps"] for each in spent if each[way]["steps"]] for way in ("update", "retrain")}
    update, retrain = (sum(found) / len(found) for found in steps.values())
    return f"{100 * update / retrain:.1f}"


def lost() -> str:
    """The most that an update lost against live counts in one tick, before it was mended."""
    ways = [record["ways"] for record in read(BEFORE)["records"]]
    return f"{100 * max(each['counts only']['Recall@10'] - each['update']['Recall@10'] for each in ways):.0f}"


REPLAY_VALUES: dict[str, Callable[[], str]] = {
    **{f"replay-{name}": lambda way=way: percent(way, read(FILE)["records"]) for name, way in WAYS.items()},
    **{f"replay-fresh-{name}": lambda way=way: percent(way, retrained()) for name, way in WAYS.items()},
    "replay-share": share,
    "replay-lost": lost,
}
