"""A replay: each way's metric from tick to tick."""

from __future__ import annotations

from typing import Any

from trope.figures.style import BLUE, GREEN, GREY, PURPLE, VERMILION, Drawn, finish, page, unavailable
from trope.times import say_label

NAME, SUBJECT = "replay", "Replay"
_COLOURS = {"stale": GREY, "counts only": BLUE, "update": VERMILION, "retrain": GREEN, "counting alone": PURPLE}
_DASHED = ("counting alone",)
_LABELS = 8


def draw(records: list[dict[str, Any]], metric: str, title: str) -> Drawn:
    """One line a way over the ticks at which somebody was asked, legend beside it; below, how many were asked."""
    asked = [record for record in records if record["users"]]
    if not asked:
        return unavailable(NAME, SUBJECT, "Nobody was asked at any tick.")
    figure = page(5.0)
    quality, users = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    numbers = [record["tick"] for record in asked]
    for way in asked[0]["ways"]:
        values = [100 * record["ways"][way][metric] for record in asked]
        line = "--" if way in _DASHED else "-"
        quality.plot(numbers, values, line, color=_COLOURS.get(way, GREY), lw=2, marker=".", label=way)
    quality.set_ylabel(f"{metric} (%)")
    quality.set_ylim(bottom=0)
    quality.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    users.bar(numbers, [record["users"] for record in asked], color=GREY)
    users.set_ylabel("asked")
    shown = asked[:: max(1, -(-len(asked) // _LABELS))]
    users.set_xticks([record["tick"] for record in shown], [say_label(record["start"]) for record in shown])
    users.set_xlabel("start of the tick (UTC)")
    return finish(
        NAME,
        figure,
        title,
        "Everybody with an event in a tick is asked at its start; then each way may learn the tick.",
    )
