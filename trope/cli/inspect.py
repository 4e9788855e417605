"""The command `trope inspect`: the temporal structure of a prepared dataset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    data: Annotated[Path, typer.Argument(help="A folder made by `trope prepare`.")],
    html: Annotated[Path | None, typer.Option(help="Also write one self-contained page with plots.")] = None,
) -> None:
    """Show the temporal structure of a prepared dataset: lengths, gaps, activity, lifetimes, calendar signal."""
    from trope.data.inspect import inspect as measure
    from trope.figures.inspect.terminal import show_report

    if html is not None and html.is_dir():  # before minutes of counting
        raise IsADirectoryError(f"--html {html} is a folder; name a file")
    report = measure(data, progress=sys.stderr.isatty())
    show_report(report)
    if html is not None:
        from trope.figures.inspect.page import write_page

        typer.echo(f"\nwrote {write_page(report, html)}")
