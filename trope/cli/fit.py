"""The command `trope fit`: train the model to deploy, on every event, as a finished run was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trope.cli.train import Memory, exit_codes, is_first


def fit(
    data: Annotated[
        Path, typer.Argument(help="The dataset of the run, or a later preparation of the same log (`trope prepare`).")
    ],
    like: Annotated[Path, typer.Option(help="A finished run: its config, epochs and learning rates are taken.")],
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or begin it if there is none.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    progress: Annotated[bool, typer.Option(help="Show a bar.")] = True,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Longest time without a checkpoint; there is one after each epoch anyway.")
    ] = 300.0,
    memory: Memory = None,
) -> None:
    """Train on every event, the test's too, as a finished run was trained: the model to deploy.

    Nothing is left to test it on; expect what the run measured. Ctrl-C and SIGTERM save the run, as in training.
    """
    from trope.data.printable import counted
    from trope.data.sequences import Sequences
    from trope.data.stream import Stream, parse_bytes
    from trope.runs import check_out
    from trope.train.fit import fit as run_fit
    from trope.train.fit import match_items, read_recipe
    from trope.train.results import measured_in, say_measured

    recipe = read_recipe(like)
    if is_first():  # before the data are read; a folder that another process makes is no reason
        check_out(out, resume)
    store = Sequences.load(data) if memory is None else Stream.open(data, parse_bytes(memory, "--memory"))
    found, measured = match_items(like, store), measured_in(like)
    if is_first():
        typer.echo(
            f"every event is training: {store.num_events:,}; {counted(len(recipe.factors), 'epoch')}, as the "
            f"validation of {measured} chose"
        )
        if found.new or found.gone:
            typer.echo(f"items: {found.known:,} of {like}, {found.new:,} new, {found.gone:,} gone")
    with exit_codes():
        run_fit(store, like, out, device, resume, progress, checkpoint_seconds)
    if is_first():
        said = say_measured(recipe.config.train.criterion, recipe.valid, recipe.test, recipe.trained_pulse)
        typer.echo(f"{out} is ready to serve. Nothing is left to test it on; expect what {measured} measured: {said}")
