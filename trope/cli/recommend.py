"""The command `trope recommend`: a run's recommendations for users of its dataset at a moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from trope.data.catalogue import Catalogue
    from trope.data.sequences import Sequences
    from trope.data.stream import Stream
    from trope.serve.recommender import Histories, Ranking, Recommender


def recommend(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`, `trope fit` or `trope update`.")],
    at: Annotated[
        list[str],
        typer.Option(help="The moment: 2017-12-20T18:00:00Z, 2017-12-20 (0:00 UTC), or Unix seconds; may be repeated."),
    ],
    user: Annotated[list[str] | None, typer.Option(help="A user's id, as in the source; may be repeated.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every user of the dataset, into the file --out.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --all: the .parquet or .csv file to write.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many.")] = 10,
    filter_seen: Annotated[str, typer.Option(help="Leave out: none, or seen items of window or history.")] = "none",
    index: Annotated[
        str | None, typer.Option(help="With --all: faiss, an approximate index for more than a million items.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The dataset, if it is not where it was in training.")] = None,
) -> None:
    """Recommend items to users at a moment, from each user's events up to then.

    The events are those of the dataset that the run was trained on. For a moment inside that dataset, the model has
    also learned from later events. The command warns about a moment long after the dataset's end.

    With --all, every user with an event before the moment gets rows in a file: user_id, moment, rank, item_id, score,
    and name where items have names. The file appears when it is whole.
    """
    from trope.data.stream import data_of_run
    from trope.runs import read_lineage
    from trope.serve.long_after import long_after
    from trope.serve.recommender import Recommender
    from trope.times import parse_moment

    _check_form(user, everyone, out, index)
    moments = list(dict.fromkeys(parse_moment(text, "--at") for text in at))
    if out is not None:
        from trope.data.answers import check_suffix

        check_suffix(out)
    recommender = Recommender.from_pretrained(run, index=index)
    dataset = data_of_run(run, data)
    if out is not None:
        _write_all(recommender, dataset, moments, k, filter_seen, out)
    else:
        users = list(dict.fromkeys(user or ()))
        found = _find(dataset, users)
        asked = [(moment, _histories(*found, users, moment)) for moment in moments]
        for number, (moment, histories) in enumerate(asked):
            _print(recommender, histories, users, moment, k, filter_seen, first=number == 0)
    first, last = recommender.model.time_span
    if read_lineage(run) is not None:  # it has learned every event of its dataset, also those after the first training
        last = max(last, dataset.meta["time_span"]["all"][1])
    note = long_after((first, last), max(moments))
    if note is not None:
        typer.secho(f"trope: {note}", err=True)


def _check_form(user: list[str] | None, everyone: bool, out: Path | None, index: str | None) -> None:
    """Refuse a mixture of the two forms of the command."""
    if everyone and user:
        raise ValueError("--all recommends to every user; leave --user out")
    if everyone and out is None:
        raise ValueError("--all needs a file to write: name it with --out recs.parquet, or recs.csv")
    if not everyone and not user:
        raise ValueError("say to whom: --user ID, or --all with --out FILE")
    for flag, value in (("--out", out), ("--index", index)):
        if value is not None and not everyone:
            raise ValueError(f"{flag} belongs to --all; with --user the answers are printed")


def _write_all(
    recommender: Recommender, data: Sequences | Stream, moments: list[int], k: int, filter_seen: str, out: Path
) -> None:
    """Stream every user into a file, and say how it went."""
    from tqdm import tqdm

    from trope.data.answers import answer_file
    from trope.data.printable import counted
    from trope.serve.batch import measure_index, recommend_all
    from trope.serve.index import WORTH_IT

    ids = data.ids("user_ids")
    if ids is None:
        raise ValueError(f"{data.path} has no original ids of users; prepare the data again")
    if recommender.index is not None:
        found, users = measure_index(recommender, data, moments[0], k, filter_seen)
        lists = f"{recommender.index.searched:,} of {recommender.index.lists:,} lists searched"
        typer.secho(f"trope: index of {data.num_items:,} items, {lists}: recall@{k} {found:.4f} against exact "
                    f"ranking, over {users:,} users", err=True)  # fmt: skip
        if data.num_items < WORTH_IT or recommender.index.searched > recommender.index.lists // 8:
            typer.secho("trope: exact ranking, the default, may be as quick here; leave --index out", err=True)
    skipped = 0
    total = data.num_users * len(moments)
    with answer_file(out, ids, recommender.catalogue) as file, tqdm(total=total, unit=" users", disable=None) as bar:
        for answers in recommend_all(recommender, data, moments, k, filter_seen):
            file.append(answers.moment, answers.users_N, answers.items_N, answers.scores_N, answers.ranks_N)
            skipped += answers.without_events
            bar.update(answers.asked)
        if not file.rows:
            raise ValueError(
                "no user has an event before the moment, so there is nothing to write; ask for a later --at"
            )
    typer.echo(f"wrote {out}: {counted(file.rows, 'row')}, {counted(total - skipped, 'answer')} to "
               f"{counted(data.num_users, 'user')}")  # fmt: skip
    if skipped:
        times = counted(skipped, "time")
        typer.secho(f"trope: {times} a user had no event before the moment, and got no rows", err=True)


def _print(
    recommender: Recommender,
    histories: Histories,
    users: list[str],
    moment: int,
    k: int,
    filter_seen: str,
    first: bool,
) -> None:
    """A table for each user at one moment; first: whether nothing was printed before."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from trope.data.printable import counted, printable
    from trope.times import say_minute

    ranking = recommender.rank(histories, np.full(len(users), moment), k, filter_seen)
    console = Console()
    for row, name in enumerate(users):
        times = histories.times[histories.offsets[row] : histories.offsets[row + 1]]
        known = f"{counted(len(times), 'event')} until {say_minute(int(times[-1]))}"
        title = f"user {name} at {say_minute(moment)}, from {known}"
        if row or not first:
            console.print()
        console.print(Text(printable(title), "italic"), soft_wrap=True)
        console.print(_table(ranking, row, recommender.catalogue))


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


def _find(data: Sequences | Stream, users: list[str]) -> tuple[Sequences, Tensor]:
    """Where some users are: a store that has them, and their places in it."""
    import torch

    from trope.data.pick import pick
    from trope.data.sequences import Sequences

    ids = data.ids("user_ids")
    rows = [ids.find(user) if ids is not None else None for user in users]
    for user, row in zip(users, rows, strict=True):
        if ids is None or row is None:
            shown = f"; its users go from {ids[0]!r} to {ids[len(ids) - 1]!r}" if ids is not None else ""
            raise ValueError(f"{data.path} has no user {user!r} among its {data.num_users:,}{shown}")
    if isinstance(data, Sequences):
        return data, torch.tensor(rows)
    numbers = sorted({row for row in rows if row is not None})
    return pick(data, numbers), torch.searchsorted(torch.tensor(numbers), torch.tensor(rows))


def _histories(data: Sequences, places: Tensor, users: list[str], moment: int) -> Histories:
    """Each user's events up to the moment. places: of the users in the store."""
    from trope.serve.recommender import Histories
    from trope.times import say_minute

    counts = data.count_before(places, moment + 1)  # an event of this very second has happened
    for user, place, count in zip(users, places.tolist(), counts.tolist(), strict=True):
        if not count:
            first = say_minute(int(data.times[data.offsets[place]]))
            raise ValueError(f"user {user} has no event until {say_minute(moment)}, the first is at {first}")
    return Histories.of(data, places, counts)
