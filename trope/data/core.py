"""The k-core filter: users with enough events on items with enough events.

Only the sets of surviving users and items are recomputed, never the events: the core is exactly the events whose user
and item both survive. A round counts one side among the survivors of the other, over two id columns.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import ibis.expr.types as ir

from trope.data.engines.base import Engine
from trope.data.progress import Stages

_OTHER = {"user": "item", "item": "user"}


class Sizes(NamedTuple):
    """The size of a log."""

    users: int
    items: int
    events: int


def k_core(
    events: ir.Table, min_user: int, min_item: int, once: bool, engine: Engine, stages: Stages
) -> tuple[ir.Table, Sizes | None]:
    """The largest part of `events` where every user has at least `min_user` events and every item `min_item`.

    Returned with the sizes before; None where the thresholds let everything pass, so that nothing was counted.

    once: count users and items once, in the whole log, and stop; some papers do.
    stages: hears of each round.
    """
    if min_user <= 1 and min_item <= 1:
        return events, None
    least = {"user": min_user, "item": min_item}
    alive: dict[str, ir.Table] = {}  # a side that has lost nothing yet is not in here, and needs no join
    sizes: dict[str, int] = {}
    users = items = total = 0
    for turn, side in enumerate(cycle(_OTHER), start=1):
        stages.begin(f"filter, round {turn}")
        other = _OTHER[side]
        pool = events.semi_join(alive[other], other) if other in alive and not once else events
        counted = engine.keep(pool.group_by(side).agg(events=pool.count()))
        enough = counted.events >= least[side]
        wanted = {"before": counted.count(), "after": enough.sum(), "events": counted.events.sum()}
        found = counted.aggregate(**wanted).to_pyarrow().to_pylist()[0]
        if turn == 1:
            users, total = found["before"], found["events"] or 0
        elif turn == 2:
            # Items of users who are gone already are not in this count.
            items = found["before"] if pool is events else events.item.nunique().to_pyarrow().as_py()
        before, after = sizes.get(side, found["before"]), found["after"] or 0
        if after < before:
            alive[side] = counted.filter(enough).select(side)
        # A side that kept all it had leaves the other side's last count as it was: nothing more will change.
        if turn >= 2 and (once or after == before):
            break
        sizes[side] = after
    for side, survivors in alive.items():
        events = events.semi_join(survivors, side)
    return events, Sizes(users, items, int(total))
