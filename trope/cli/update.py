"""The command `trope update`: a run learns new events without a new training."""

from __future__ import annotations

import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trope.data.extend import Log
    from trope.data.new_events import Columns
    from trope.data.sequences import Sequences

_COLUMNS = "Columns of NEW, where they are not those of the run's own log"


def update(
    run: Annotated[Path, typer.Argument(help="A finished run of `trope train`, `trope fit` or `trope update`.")],
    events: Annotated[
        str,
        typer.Option(
            help="The new events: files as the run's log (same columns and units), a table with --table, a prepared "
            "dataset of the longer log, or the store of `trope serve`. Events that the run's dataset has already are "
            "left out."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run folder to write; it appears only when it is whole.")],
    data: Annotated[Path | None, typer.Option(help="The run's dataset, if it is not where it was.")] = None,
    data_out: Annotated[
        Path | None, typer.Option(help="Where to write the dataset with the new events. Default: data in --out.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimiser steps. Default: up to five passes over the new events.", min=1)
    ] = None,
    on_bad: Annotated[str, typer.Option(help="At a bad row: fail, or skip and count it.")] = "fail",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    progress: Annotated[bool, typer.Option(help="Show a bar.")] = True,
    user_col: Annotated[str | None, typer.Option(rich_help_panel=_COLUMNS)] = None,
    item_col: Annotated[str | None, typer.Option(rich_help_panel=_COLUMNS)] = None,
    time_col: Annotated[str | None, typer.Option(rich_help_panel=_COLUMNS)] = None,
    basket_col: Annotated[str | None, typer.Option(rich_help_panel=_COLUMNS)] = None,
    event_col: Annotated[str | None, typer.Option(rich_help_panel=_COLUMNS)] = None,
    time_unit: Annotated[str | None, typer.Option(help="s, ms, us, ns or iso.", rich_help_panel=_COLUMNS)] = None,
    time_format: Annotated[str | None, typer.Option(help="Dates as text.", rich_help_panel=_COLUMNS)] = None,
    delimiter: Annotated[str | None, typer.Option(help="Between CSV fields.", rich_help_panel=_COLUMNS)] = None,
    table: Annotated[str | None, typer.Option(help="The table behind a URL.", rich_help_panel=_COLUMNS)] = None,
) -> None:
    """Learn new events: new users, new items, more of the old ones, in a fraction of a training.

    The new run starts from the old one's model and has its own dataset with all events. Nothing is left to test it on.
    """
    from trope.train.process import sigterm_raises

    _refuse_filled(out)
    with sigterm_raises() as stop:
        try:
            _update(
                run, events, out, data, data_out, steps, on_bad, device, progress,
                {"user_col": user_col, "item_col": item_col, "time_col": time_col, "basket_col": basket_col,
                 "event_col": event_col, "time_unit": time_unit, "time_format": time_format, "delimiter": delimiter,
                 "table": table},
            )  # fmt: skip
        except KeyboardInterrupt:
            done = f"{out} is whole" if _is_filled(out) else "no run was written"
            typer.secho(f"trope: interrupted; {done}", fg=typer.colors.RED, err=True)
            raise typer.Exit(128 + (stop.signum or signal.SIGINT)) from None


def _update(
    run: Path,
    events: str,
    out: Path,
    data: Path | None,
    data_out: Path | None,
    steps: int | None,
    on_bad: str,
    device: str,
    progress: bool,
    columns: Columns,
) -> None:
    import numpy as np
    import torch

    from trope.atomic import atomic_folder
    from trope.data.extend import extend, read_folder, write_extended
    from trope.data.printable import counted
    from trope.data.sequences import Sequences
    from trope.data.sources.urls import shown
    from trope.runs import OWN_DATA
    from trope.server.open_store import is_store
    from trope.times import say_moment
    from trope.train.divergence import Diverged
    from trope.train.fit import read_recipe
    from trope.train.step import NothingToLearn
    from trope.train.update_run import learned_events, update_run

    if data_out is not None:
        _refuse_filled(data_out)
    recipe, old = read_recipe(run), Sequences.of_run(run, data)
    name, new = shown(events), read_new(events, old, run, on_bad, columns)
    # Who asks a server may be anybody, also users that no log has: a number, a session.
    extended = extend(read_folder(old.path, old.meta), new, name, users_may_become_text=is_store(events))
    if not extended.added:
        raise ValueError(f"{name} has no event that {old.path} has not; there is nothing to learn")
    place_N = torch.from_numpy(np.ascontiguousarray(extended.place_N))
    # The parent's own test events are new to its model as well.
    fresh_N = (place_N < 0) | ~learned_events(run, old, recipe)[place_N.clamp(min=0)]
    typer.echo(
        f"{counted(extended.added, 'new event')} ({extended.repeated:,} more known already), "
        f"{counted(extended.new_users, 'new user')}, {counted(extended.new_items, 'new item')}"
    )
    last = int(old.times.max())
    early = int((extended.log.times_N[extended.place_N < 0] < last).sum())
    if early:
        which = f"{early:,} of them" if early < extended.added else "it" if early == 1 else "all of them"
        typer.secho(
            f"trope: {which} {'is' if early == 1 else 'are'} earlier than the last event of {old.path}, "
            f"{say_moment(last)}; each is learned and counted with its own time",
            err=True,
        )
    late = int(fresh_N.sum()) - extended.added
    if late:
        typer.echo(f"learned too: {counted(late, 'event')} of the validation and test of {run}")
    with ExitStack() as undo, atomic_folder(out.absolute(), _refuse_filled) as folder:
        where = data_out or folder / OWN_DATA
        write_extended(extended, old.meta, name if "://" in name else Path(name).name, where)
        if data_out is not None:
            undo.callback(_remove_unless_filled, data_out, out)
        whole = Sequences.load(where)
        final = (data_out or out / OWN_DATA).absolute()
        inside = folder / "run"  # an empty folder, which `open_run` wants
        try:
            lineage = update_run(run, recipe, whole, fresh_N, extended.added, inside, final, device, steps, progress)
        except Diverged as diverged:
            typer.secho(f"trope: {diverged}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from None
        except NothingToLearn:  # it names the dataset, which is gone with the folder
            raise ValueError(
                f"{name} has no new event that follows another one of its user; there is nothing to learn"
            ) from None
        for file in inside.iterdir():
            file.rename(folder / file.name)
        inside.rmdir()
    if lineage["pulse_requests"]:
        typer.echo(
            f"the pulse was fitted to {counted(lineage['pulse_requests'], 'request')} of the new events before they "
            "were learned"
        )
    typer.echo(
        f"{out} is ready to serve: {counted(lineage['steps'], 'step')} from {run}. "
        f"Its dataset: {data_out or out / OWN_DATA}"
    )


def read_new(events: str, old: Sequences, run: Path, on_bad: str, columns: Columns) -> Log:
    """The events of a dataset of the longer log, of a server's store, or of files as the log of the dataset `old`."""
    from trope.data.extend import read_folder
    from trope.data.folder import META
    from trope.data.sequences import Sequences
    from trope.data.sources.urls import shown
    from trope.server.open_store import is_store
    from trope.server.store_log import read_store
    from trope.train.fit import match_items

    if "://" not in events and (Path(events) / META).is_file():
        longer = Sequences.load(events)
        match_items(run, longer)
        return read_folder(longer.path, longer.meta)
    if groups := old.meta.get("source", {}).get("items_by"):
        raise ValueError(
            f"the items of {old.path} are groups ({groups}) of those in its log; prepare the longer log and give that "
            "dataset"
        )
    if is_store(events):
        if given := [option for option, value in columns.items() if value is not None]:
            raise ValueError(
                f"{shown(events)} is a store of `trope serve`, whose columns are known; leave out "
                f"--{given[0].replace('_', '-')}"
            )
        return read_store(events, old.baskets is not None, on_bad)
    try:
        from trope.data.new_events import read_like

        return read_like(events, old.meta, on_bad, columns)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading a log needs {error.name}, which is not installed; install trope[data], or give a prepared dataset"
        ) from None


def _remove_unless_filled(data: Path, run: Path) -> None:
    """Remove a dataset whose run was not written: it would only be in the way of the next try."""
    if not _is_filled(run):
        shutil.rmtree(data, ignore_errors=True)


def _is_filled(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _refuse_filled(path: Path) -> None:
    if _is_filled(path):
        raise FileExistsError(f"{path} exists already and is not empty; choose another folder")
