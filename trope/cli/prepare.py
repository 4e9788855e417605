"""The command `trope prepare`: an event log becomes a dataset to train on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trope.data.progress import StageReport
    from trope.data.sources.resolve import Request

_COLUMNS = "Columns of a file or table"
_FILTERS = "What to keep"
_SPLIT = "How to split"
_ENGINE = "Engine"


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A file, folder or glob of CSV, TSV, JSON lines or Parquet; a dataset by name (complete-journey, "
            "ml-1m, ml-20m, amazon-2023:Books, amazon-2014:Books, pixel200k, pixel1m, pixel8m, recbole:NAME, "
            "calendar-shop); or an Ibis connection URL with --table."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; it appears only when it is whole.")],
    raw: Annotated[Path | None, typer.Option(help="Where a named dataset's published files are.")] = None,
    level: Annotated[str, typer.Option(help="Items of complete-journey: product or (product) type.")] = "product",
    items: Annotated[
        Path | None,
        typer.Option(help="Item names: a CSV or Parquet file with columns item (or as --item-col) and name."),
    ] = None,
    name_col: Annotated[
        str | None, typer.Option(help="Column of the names in --items. Default: name, item_name or title.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset that exists, at the end.")] = False,
    user_col: Annotated[str | None, typer.Option(help="Default: user, else user_id.", rich_help_panel=_COLUMNS)] = None,
    item_col: Annotated[str | None, typer.Option(help="Default: item, else item_id.", rich_help_panel=_COLUMNS)] = None,
    time_col: Annotated[str | None, typer.Option(help="Default: timestamp.", rich_help_panel=_COLUMNS)] = None,
    basket_col: Annotated[str | None, typer.Option(help="Basket or order id.", rich_help_panel=_COLUMNS)] = None,
    event_col: Annotated[str | None, typer.Option(help="Event type, for --event.", rich_help_panel=_COLUMNS)] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(help="s, ms, us, ns, or iso for dates as text. Default: s.", rich_help_panel=_COLUMNS),
    ] = None,
    time_format: Annotated[
        str | None,
        typer.Option(help="Dates as text, other than ISO: %d/%m/%Y %H:%M, ...", rich_help_panel=_COLUMNS),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(help="Character between CSV fields. Default: a comma; a tab in .tsv.", rich_help_panel=_COLUMNS),
    ] = None,
    table: Annotated[str | None, typer.Option(help="The table behind a URL.", rich_help_panel=_COLUMNS)] = None,
    min_user: Annotated[
        int | None,
        typer.Option(help="Fewest events of a user. Default: 5, or the dataset's own.", rich_help_panel=_FILTERS),
    ] = None,
    min_item: Annotated[
        int | None,
        typer.Option(help="Fewest events of an item. Default: 5, or the dataset's own.", rich_help_panel=_FILTERS),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Filter in one pass, not to a fixed point.", rich_help_panel=_FILTERS)
    ] = False,
    event: Annotated[
        list[str] | None, typer.Option(help="Keep this event type; may be repeated.", rich_help_panel=_FILTERS)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Keep events from this moment on: 2017-12-20 (0:00 UTC), ...", rich_help_panel=_FILTERS),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Keep events before this moment: 2017-12-20T18:00:00Z, ...", rich_help_panel=_FILTERS),
    ] = None,
    on_bad: Annotated[
        str, typer.Option(help="At a bad row: fail, or skip and count it.", rich_help_panel=_FILTERS)
    ] = "fail",
    protocol: Annotated[
        str, typer.Option(help="loo-strict, loo-paper, holdout or next-basket.", rich_help_panel=_SPLIT)
    ] = "loo-strict",
    cutoff: Annotated[
        str | None,
        typer.Option(help="Holdout: start of the test. Default: one window before the end.", rich_help_panel=_SPLIT),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(help="Holdout: length of the test, such as 12h or 7d. Default: 1d.", rich_help_panel=_SPLIT),
    ] = None,
    shard_users: Annotated[
        int | None,
        typer.Option(help="Write shards of so many users, to train on data larger than memory. Default: none."),
    ] = None,
    engine: Annotated[str, typer.Option(help="duckdb or spark.", rich_help_panel=_ENGINE)] = "duckdb",
    threads: Annotated[int | None, typer.Option(help="DuckDB: cores. Default: all.", rich_help_panel=_ENGINE)] = None,
    memory: Annotated[
        str | None, typer.Option(help="DuckDB: memory for tables. Default: 5GB.", rich_help_panel=_ENGINE)
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="Spark: master URL. Default: this machine.", rich_help_panel=_ENGINE)
    ] = None,
) -> None:
    """Turn an event log into a dataset to train on.

    The same log gives the same bytes, on every engine and any number of cores. docs/data.md has the formats.
    """
    try:
        from trope.data import prepare as pipeline
        from trope.data.sources.resolve import Request, resolve
    except ModuleNotFoundError as error:
        raise ValueError(f"trope prepare needs {error.name}, which is not installed; install trope[data]") from None
    from trope.data.printable import printable
    from trope.data.protocols import Protocol
    from trope.data.summary import summarise
    from trope.times import parse_duration, parse_moment

    moments = {"--since": since, "--until": until, "--cutoff": cutoff}
    seconds = {flag: None if text is None else parse_moment(text, flag) for flag, text in moments.items()}
    length = None if window is None else parse_duration(window, "--window")

    options = pipeline.Options(
        protocol=Protocol(protocol, cutoff=seconds["--cutoff"], window=length),
        min_user=min_user,
        min_item=min_item,
        once=once,
        event_types=tuple(event or ()),
        since=seconds["--since"],
        until=seconds["--until"],
        on_bad=on_bad,
        shard_users=shard_users,
    )
    request = Request(
        source,
        raw,
        level,
        table,
        user_col,
        item_col,
        time_col,
        basket_col,
        event_col,
        time_unit,
        delimiter,
        time_format,
        items,
        name_col,
    )
    with _interruptible(), _generated(request, out) as request:
        found = resolve(request)
        with _bar() as progress:
            meta = pipeline.prepare(
                found,
                out,
                options,
                engine=engine,
                threads=threads,
                memory=memory,
                master=master,
                overwrite=overwrite,
                progress=progress,
            )
    summarise(meta, out)
    said = printable(out)
    if shard_users is None:
        typer.echo(f"\nnext: `trope inspect {said}`, or `trope train {said} --out runs/NAME`")
    else:
        typer.echo(f"\nnext: `trope train {said} --model trope --memory 2GB --out runs/NAME` streams the shards")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with a line and the exit code of a shell."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("trope: interrupted; nothing was written", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None


@contextmanager
def _generated(request: Request, out: Path) -> Iterator[Request]:
    """The request; the calendar shop without files is generated into a temporary folder."""
    from trope.data.sources.resolve import SHOP

    if request.text != SHOP or request.raw is not None:
        yield request
        return
    from trope.data.synthetic import CalendarShop, write_events

    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        yield replace(request, raw=write_events(Path(folder) / SHOP, CalendarShop()))


@contextmanager
def _bar() -> Iterator[StageReport]:
    """A progress line on the terminal: the stage's name, and a bar where the share done is known."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description:<16}"), BarColumn(), TaskProgressColumn()]
    console = Console(stderr=True)
    # Where nobody watches, rich would leave an empty line in the file.
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=None)

        def report(stage: str, share: float | None) -> None:
            bar.update(task, description=stage, total=None if share is None else 1.0, completed=share or 0.0)

        yield report
