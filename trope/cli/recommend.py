"""The command `trope recommend`: a run's recommendations for one user of its dataset at a moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trope.data.sequences import Sequences
    from trope.serve.recommender import Histories


def recommend(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`.")],
    user: Annotated[str, typer.Option(help="The user's id, as in the source.")],
    at: Annotated[str, typer.Option(help="The moment: 2017-12-20T18:00:00Z, 2017-12-20 (0:00 UTC), or Unix seconds.")],
    k: Annotated[int, typer.Option("-k", help="How many.")] = 10,
    filter_seen: Annotated[str, typer.Option(help="Leave out: none, or seen items of window or history.")] = "none",
    data: Annotated[Path | None, typer.Option(help="The dataset, if it is not where it was in training.")] = None,
) -> None:
    """Recommend items to a user at a moment, from the user's events up to then.

    The events are those of the dataset that the run was trained on. For a moment inside that dataset, the model has
    also learned from later events.
    """
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from trope.data.sequences import Sequences
    from trope.serve.recommender import Recommender
    from trope.times import parse_moment, say_minute

    moment = parse_moment(at, "--at")
    recommender = Recommender.from_pretrained(run)
    history = _history(Sequences.of_run(run, data), user, moment)
    ranking = recommender.rank(history, np.array([moment]), k, filter_seen)
    last = say_minute(int(history.times[-1]))
    title = f"user {user} at {say_minute(moment)}, from {len(history.items):,} events until {last}"
    table = Table("rank", "item", "name", "score", title=title, title_justify="left", box=None)
    for column in (table.columns[0], table.columns[3]):
        column.justify = "right"
    originals = recommender.catalogue.originals(ranking.items)
    for rank, original, item, score in zip(ranking.ranks, originals, ranking.items, ranking.scores, strict=True):
        table.add_row(str(rank), str(original), recommender.catalogue.name_of(int(item)), f"{score:.4f}")
    Console().print(table)


def _history(data: Sequences, user: str, moment: int) -> Histories:
    """The user's events up to the moment."""
    import torch

    from trope.serve.recommender import Histories
    from trope.times import say_minute

    ids = data.ids("user_ids")
    row = ids.find(user) if ids is not None else None
    if ids is None or row is None:
        shown = f"; its users go from {ids[0]!r} to {ids[len(ids) - 1]!r}" if ids is not None else ""
        raise ValueError(f"{data.path} has no user {user!r} among its {data.num_users:,}{shown}")
    users = torch.tensor([row])
    counts = data.count_before(users, moment + 1)  # an event of this very second has happened
    if not int(counts):
        first = say_minute(int(data.times[data.offsets[row]]))
        raise ValueError(f"user {user} has no event until {say_minute(moment)}, the first is at {first}")
    return Histories.of(data, users, counts)
