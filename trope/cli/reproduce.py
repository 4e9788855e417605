"""The command `trope reproduce`: runs a recipe from raw events to report."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    target: Annotated[str, typer.Argument(help="Such as ml-1m or globo-news-holdout.", metavar="NAME")],
    source: Annotated[str | None, typer.Option(help="Raw events, where data/NAME is not prepared yet.")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at a time; several fit on one large GPU.")] = 1,
    seeds: Annotated[int | None, typer.Option(help="Train each model this often. Default: the recipe's.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value for every model; may be repeated.")
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(help="Folder of recipes. Default: ./configs, then those that come with trope.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the commands and run nothing.")] = False,
) -> None:
    """Reproduce a published table: prepare the data, train the models, compare them and write the report.

    data/NAME is prepared unless it is there. Runs and report are in runs/NAME. An interrupted command continues when
    it is given again.
    """
    from trope.experiments.recipes import SOURCE, find

    recipe = find(target, configs)
    wanted = source or (SOURCE if dry else None)
    made = [] if Path(f"data/{target}").is_dir() else recipe.commands_for_data(target, wanted)
    commands = [words for words in made if not Path(words[-1]).exists()]  # generated events may be there already
    more = ["--jobs", str(jobs), *(part for setting in settings or [] for part in ("--set", setting))]
    for words in [*commands, recipe.comparison_command(target, more, seeds)]:
        typer.echo(f"$ trope {shlex.join(words)}")
        if not dry and (code := subprocess.run([sys.executable, "-m", "trope", *words], check=False).returncode):
            raise typer.Exit(code)
