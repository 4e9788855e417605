"""The command `trope generate`: the calendar shop, an event log whose ground truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trope.data.synthetic.config import CalendarShop
from trope.times import parse_moment, say_moment

_SHOP = CalendarShop()
_SIZE = "Size"
_EFFECTS = "Effects, each on unless switched off"
_SHARES = "Reasons for a visit (the rest is taste)"


def generate(
    out: Annotated[Path, typer.Option(help="A .parquet file, or a folder for several; with the ground truth.")],
    users: Annotated[int, typer.Option(rich_help_panel=_SIZE)] = _SHOP.users,
    items: Annotated[int, typer.Option(rich_help_panel=_SIZE)] = _SHOP.items,
    mean_events: Annotated[float, typer.Option(help="Mean events of a user.", rich_help_panel=_SIZE)] = (
        _SHOP.mean_events
    ),
    min_events: Annotated[int, typer.Option(help="Fewest events of a user.", rich_help_panel=_SIZE)] = (
        _SHOP.min_events
    ),
    start: Annotated[
        str, typer.Option(help="First day of the log, a Monday such as 2015-01-05.", rich_help_panel=_SIZE)
    ] = say_moment(_SHOP.start)[: len("2015-01-05")],
    years: Annotated[float, typer.Option(help="Length of the log.", rich_help_panel=_SIZE)] = _SHOP.years,
    tastes: Annotated[bool, typer.Option(help="Users prefer a few categories.", rich_help_panel=_EFFECTS)] = True,
    replenishment: Annotated[
        bool, typer.Option(help="Staples are bought again after days to months.", rich_help_panel=_EFFECTS)
    ] = True,
    weekly: Annotated[bool, typer.Option(help="Visits and goods by weekday.", rich_help_panel=_EFFECTS)] = True,
    daily: Annotated[bool, typer.Option(help="Visits and goods by hour.", rich_help_panel=_EFFECTS)] = True,
    yearly: Annotated[bool, typer.Option(help="Goods by time of the year.", rich_help_panel=_EFFECTS)] = True,
    lifetimes: Annotated[bool, typer.Option(help="Items are born and die.", rich_help_panel=_EFFECTS)] = True,
    sessions: Annotated[bool, typer.Option(help="Several events a visit.", rich_help_panel=_EFFECTS)] = True,
    staple_share: Annotated[float, typer.Option(rich_help_panel=_SHARES)] = _SHOP.staple_share,
    season_share: Annotated[float, typer.Option(rich_help_panel=_SHARES)] = _SHOP.season_share,
    weekday_share: Annotated[float, typer.Option(rich_help_panel=_SHARES)] = _SHOP.weekday_share,
    hour_share: Annotated[float, typer.Option(rich_help_panel=_SHARES)] = _SHOP.hour_share,
    seed: Annotated[int, typer.Option(help="The same seed and settings give the same rows.")] = _SHOP.seed,
    workers: Annotated[int, typer.Option(help="Threads; no influence on the rows.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a log that exists.")] = False,
) -> None:
    """Generate the calendar shop: an event log of any size whose ground truth is known."""
    from trope.data.synthetic.write import truth_path, write_events

    shop = CalendarShop(
        users=users,
        items=items,
        mean_events=mean_events,
        min_events=min_events,
        start=parse_moment(start, "--start"),
        years=years,
        seed=seed,
        tastes=tastes,
        replenishment=replenishment,
        weekly=weekly,
        daily=daily,
        yearly=yearly,
        lifetimes=lifetimes,
        sessions=sessions,
        staple_share=staple_share,
        season_share=season_share,
        weekday_share=weekday_share,
        hour_share=hour_share,
    )
    write_events(out, shop, workers=workers, overwrite=overwrite)
    typer.echo(f"wrote {out}, and the ground truth: {truth_path(out)}")
