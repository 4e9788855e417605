"""The command `trope figures`: the paper's figures and a report page from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def figures(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures and report.html.")],
    format: Annotated[str, typer.Option(help="png, svg or both, by commas.")] = "png,svg",
    data: Annotated[Path | None, typer.Option(help="The dataset, if it is not where it was in training.")] = None,
) -> None:
    """Draw the paper's figures from a run's best model, and one page with its tables and figures.

    Rotation geometry, coefficients and attention by block, the frequency bank, shifted queries and t_now, the four
    design stages; and how far frequencies moved in training.
    """
    from trope.figures.draw import write_figures

    formats = [ending.strip() for ending in format.split(",") if ending.strip()]
    for path in write_figures(run, out, formats, data):
        typer.echo(f"wrote {path}")
