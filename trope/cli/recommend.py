"""The command `trope recommend`: a run's recommendations for users of its dataset at a moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from trope.data.catalogue import Catalogue
    from trope.data.sequences import Sequences
    from trope.serve.recommender import Histories, Ranking


def recommend(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`.")],
    user: Annotated[list[str], typer.Option(help="A user's id, as in the source; may be repeated.")],
    at: Annotated[str, typer.Option(help="The moment: 2017-12-20T18:00:00Z, 2017-12-20 (0:00 UTC), or Unix seconds.")],
    k: Annotated[int, typer.Option("-k", help="How many.")] = 10,
    filter_seen: Annotated[str, typer.Option(help="Leave out: none, or seen items of window or history.")] = "none",
    data: Annotated[Path | None, typer.Option(help="The dataset, if it is not where it was in training.")] = None,
) -> None:
    """Recommend items to users at a moment, from each user's events up to then.

    The events are those of the dataset that the run was trained on. For a moment inside that dataset, the model has
    also learned from later events. A moment long after it is said to be so.
    """
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from trope.data.printable import printable
    from trope.data.sequences import Sequences
    from trope.serve.recommender import Recommender, long_after
    from trope.times import parse_moment, say_minute

    moment = parse_moment(at, "--at")
    recommender = Recommender.from_pretrained(run)
    users = list(dict.fromkeys(user))
    histories = _histories(Sequences.of_run(run, data), users, moment)
    ranking = recommender.rank(histories, np.full(len(users), moment), k, filter_seen)
    console = Console()
    for row, name in enumerate(users):
        times = histories.times[histories.offsets[row] : histories.offsets[row + 1]]
        title = f"user {name} at {say_minute(moment)}, from {len(times):,} events until {say_minute(int(times[-1]))}"
        if row:
            console.print()
        console.print(Text(printable(title), "italic"), soft_wrap=True)
        console.print(_table(ranking, row, recommender.catalogue))
    note = long_after(recommender.model.time_span, moment)
    if note is not None:
        typer.secho(f"trope: {note}", err=True)


def _table(ranking: Ranking, row: int, catalogue: Catalogue) -> Table:
    """One user's recommendations, best first; ids and names are printed as they are, not read as markup."""
    from rich.table import Table
    from rich.text import Text

    from trope.data.printable import printable

    headings = ("rank", "item", "score") if catalogue.item_names is None else ("rank", "item", "name", "score")
    table = Table(*headings, box=None)
    for column in (table.columns[0], table.columns[-1]):
        column.justify = "right"
    own = ranking.rows == row
    items = ranking.items[own]
    originals = catalogue.originals(items)
    for rank, original, item, score in zip(ranking.ranks[own], originals, items, ranking.scores[own], strict=True):
        names = [] if catalogue.item_names is None else [catalogue.name_of(int(item))]
        table.add_row(str(rank), *(Text(printable(said)) for said in (original, *names)), f"{score:.4f}")
    return table


def _histories(data: Sequences, users: list[str], moment: int) -> Histories:
    """Each user's events up to the moment."""
    import torch

    from trope.serve.recommender import Histories
    from trope.times import say_minute

    ids = data.ids("user_ids")
    rows = [ids.find(user) if ids is not None else None for user in users]
    for user, row in zip(users, rows, strict=True):
        if ids is None or row is None:
            shown = f"; its users go from {ids[0]!r} to {ids[len(ids) - 1]!r}" if ids is not None else ""
            raise ValueError(f"{data.path} has no user {user!r} among its {data.num_users:,}{shown}")
    places = torch.tensor(rows)
    counts = data.count_before(places, moment + 1)  # an event of this very second has happened
    for user, place, count in zip(users, places.tolist(), counts.tolist(), strict=True):
        if not count:
            first = say_minute(int(data.times[data.offsets[place]]))
            raise ValueError(f"user {user} has no event until {say_minute(moment)}, the first is at {first}")
    return Histories.of(data, places, counts)
