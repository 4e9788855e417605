"""What a replay found: each way's means over all ticks, what it cost, a table and a sentence."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from trope.data.printable import printable
from trope.experiments.replay import COUNTS, METRICS, RETRAIN, STALE, UPDATE
from trope.times import say_duration, say_roughly

HEADINGS = ("way", *METRICS, "of retrain", "learned", "steps", "seconds")


def summarise(records: list[dict[str, Any]], ways: list[str]) -> dict[str, dict[str, float]]:
    """Each way's metrics, a mean over everybody who was asked at any tick, and how often it learned, with what effort.

    Returns by way the metrics, "times" that it learned, and all its "steps" and "seconds".
    """
    asked = [record for record in records if record["users"]]
    if not asked:
        raise ValueError("nobody has an event in the test window with one before it; there is nobody to ask")
    users = sum(record["users"] for record in asked)
    return {
        way: {
            **{name: sum(r["users"] * r["ways"][way][name] for r in asked) / users for name in METRICS},
            **{name: sum(r["spent"][way][name] for r in records) for name in ("steps", "seconds")},
            "times": sum(r["spent"][way]["steps"] > 0 for r in records),
        }
        for way in ways
    }


def finding(means: dict[str, dict[str, float]], every: int) -> str:
    """What freshness buys and costs, in a sentence."""
    name, tick = METRICS[0], say_duration(every)
    updated = means[UPDATE][name]
    said = f"{name} is {100 * means[STALE][name]:.2f} % for a stale model"
    # What live counts reach alone is no merit of the update.
    said += f", {100 * means[COUNTS][name]:.2f} % with live counts" if COUNTS in means else ""
    said += f", {100 * updated:.2f} % with an update every {tick}"
    retrained = means.get(RETRAIN)
    if retrained is None or not retrained[name]:
        return said
    said += f": {100 * updated / retrained[name]:.1f} % of what retraining reaches"
    if retrained["times"] and means[UPDATE]["times"]:
        once, anew = (each["steps"] / each["times"] for each in (means[UPDATE], retrained))
        said += f", at {100 * once / anew:.1f} % of the steps of a retraining"
    return said


def rows(means: dict[str, dict[str, float]]) -> list[list[str]]:
    """The table's cells, a row for each way."""
    retrained = means.get(RETRAIN, {}).get(METRICS[0])
    return [
        [
            way,
            *(f"{100 * found[name]:.2f}" for name in METRICS),
            f"{100 * found[METRICS[0]] / retrained:.1f} %" if retrained else "",
            f"{found['times']:,.0f} x" if found["times"] else "",
            f"{found['steps']:,.0f}",
            f"{found['seconds']:,.1f}",
        ]
        for way, found in means.items()
    ]


def to_table(means: dict[str, dict[str, float]], title: str) -> Table:
    """For the screen."""
    table = Table(title=Text(printable(title), "table.title"), title_justify="left", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows(means):
        table.add_row(*row)
    return table


def to_markdown(means: dict[str, dict[str, float]], title: str, said: str, facts: dict[str, Any]) -> str:
    """The page of a replay."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(means)]
    half_life, every = say_roughly(facts["half_life"]), say_duration(facts["every"])
    return (
        f"# {printable(title)}\n\n{said}.\n\n" + "\n".join(lines) + "\n\n"
        f"Percent, means over {facts['users']:,} questions at {facts['ticks']} ticks of {every}. "
        "Steps and seconds are those after the first tick. Counting alone has a half-life of "
        f"{half_life}, chosen on the ticks of the validation window. docs/production.md says what each way is.\n"
    )
