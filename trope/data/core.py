"""The k-core filter: users with enough events on items with enough events.

Only the sets of surviving users and items are recomputed, never the events: the core is exactly the events whose user
and item both survive. Each round is one count per side over two id columns.
"""

from __future__ import annotations

from collections.abc import Callable

import ibis.expr.types as ir

from trope.data.engines import Engine


def k_core(
    events: ir.Table, min_user: int, min_item: int, once: bool, engine: Engine, report: Callable[[int], None]
) -> ir.Table:
    """The events that are left when no user has fewer than `min_user` and no item fewer than `min_item` of them.

    once: count users and items once, in the whole log, and stop, as some papers do.
    report: called with the number of each round.
    """
    if min_user <= 1 and min_item <= 1:
        return events
    if once:
        users, items = _frequent(events, "user", min_user), _frequent(events, "item", min_item)
        return events.semi_join(engine.keep(users), "user").semi_join(engine.keep(items), "item")
    left, sizes = events, (-1, -1)
    for turn in range(1, _MOST_ROUNDS):
        report(turn)
        users = engine.keep(_frequent(left, "user", min_user))
        # Counting on what the users leave makes the next item set, and the other way round; both only shrink.
        items = engine.keep(_frequent(events.semi_join(users, "user"), "item", min_item))
        left = events.semi_join(items, "item")
        now = (_size(users), _size(items))
        if now == sizes:
            break
        sizes = now
    return left.semi_join(users, "user")


# Each round but the last removes at least one user or item; real logs need fewer than fifty.
_MOST_ROUNDS = 10_000


def _frequent(events: ir.Table, side: str, least: int) -> ir.Table:
    counted = events.group_by(side).agg(events=events.count())
    return counted.filter(counted.events >= least).select(side)


def _size(table: ir.Table) -> int:
    return int(table.count().to_pyarrow().as_py())
