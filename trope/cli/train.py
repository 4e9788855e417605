"""The command `trope train`: train a model on a prepared dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trope.config import Config
    from trope.data.sequences import Sequences

DEFAULT_MODEL = "trope"
Memory = Annotated[
    str | None,
    typer.Option(
        help="Stream the dataset's shards (`trope prepare --shard-users`): each training keeps at most so much of them "
        "in memory, such as 2GB. Model and optimiser come on top. Default: load all."
    ),
]


def train(
    data: Annotated[Path, typer.Argument(help="A folder made by `trope prepare`.")],
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="trope (recommended), hstu-trope (the paper's backbone with T-RoPE and readout), hstu-trope-attention "
            "(without the readout), hstu-trope-paper (as printed), hstu-torope, hstu-time, hstu, sasrec, sasrec-trope, "
            "tisasrec, transformer or transformer-trope. Default: trope with sizes that fit the data and the machine, "
            "or the run's own with --resume."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with settings for --model, such as sizes; a file with all settings, instead of --model; "
            "or a recipe of configs/. A run's config.toml has numbers where presets have auto: they do not follow "
            "another model.width."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value, such as train.epochs=20; may be repeated.")
    ] = None,
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
    """Train a model on a prepared dataset, and test the best one.

    Ctrl-C and SIGTERM save the run and end with exit code 130 and 143; a loss that is not finite ends with 1.
    """
    from trope.data.printable import printable
    from trope.data.sequences import Sequences
    from trope.data.stream import Stream, parse_bytes
    from trope.runs import CONFIG, check_out
    from trope.settings import without_effect
    from trope.train.loop import train as run_training
    from trope.train.process import die_with_parent
    from trope.train.results import say_result

    die_with_parent()
    if is_first():  # the first process also makes the folder, maybe before another one looks
        check_out(out, resume)
    store: Sequences | Stream
    if memory is None:
        store = whole = Sequences.load(data)
    else:
        store, whole = Stream.open(data, parse_bytes(memory, "--memory")), None
        has_config = resume and (out / CONFIG).is_file()  # --resume also begins a run where there is none
        if model is None and config is None and not has_config:
            raise ValueError(
                "--memory needs --model or --config, such as --model trope: to find sizes that fit the data, the whole "
                "dataset would have to be in memory"
            )
    resolved = resolve_config(model, config, settings or [], out if resume else None, whole, device)
    for note in without_effect(resolved, settings or []) if is_first() else []:
        typer.secho(f"trope: {note}", err=True)
    with exit_codes():
        summary = run_training(store, resolved, out, device, resume, progress, checkpoint_seconds)
        if not progress and is_first():  # with a bar, training has said so
            typer.echo(say_result(summary, resolved.train.criterion, out))
    if is_first():
        said = printable(out)
        # Without it `trope evaluate` would load the whole dataset.
        asked = said if memory is None else f"{said} --memory {memory}"
        typer.echo(f"next: `trope evaluate {asked}` sets it beside counting, `trope serve {said}` answers with it")


@contextmanager
def exit_codes() -> Iterator[None]:
    """A training that a signal stopped, or that diverged, ends the command with a line and a code of its own."""
    from trope.train.divergence import Diverged
    from trope.train.loop import Interrupted

    try:
        yield
    except Interrupted as interrupted:
        typer.secho(f"trope: {interrupted}", err=True)
        raise typer.Exit(128 + interrupted.signum) from None
    except Diverged as diverged:
        typer.secho(f"trope: {diverged}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def resolve_config(
    model: str | None,
    file: Path | None,
    settings: list[str],
    run: Path | None,
    data: Sequences | None = None,
    device: str = "auto",
) -> Config:
    """The config that a command line asks for. Where it names no model, its sizes fit `data` and `device`.

    run: a run to resume; its config is the base where neither a model nor a file is given.
    """
    from trope import runs as run_folder
    from trope.devices import choose_device
    from trope.experiments.config_file import config_of_file, unnamed_model
    from trope.experiments.sizes import choose_sizes, without
    from trope.experiments.variants import configure
    from trope.settings import read_saved_toml, with_settings

    if file is not None:
        config = config_of_file(file, model, settings, DEFAULT_MODEL)
        said = unnamed_model(file, settings, config) if model is None else None
        if said is not None and is_first():
            typer.secho(f"trope: {said}", err=True)
        return config
    if model is None and run is not None and (run / run_folder.CONFIG).is_file():
        return with_settings(read_saved_toml(run / run_folder.CONFIG, training=True), settings)
    if model is not None or data is None:
        return configure(model or DEFAULT_MODEL, settings)
    chosen = without(choose_sizes(data, choose_device(device).type), settings)
    config = configure(DEFAULT_MODEL, [*(setting for each in chosen for setting in each.settings), *settings])
    if is_first():
        fits = ", with what fits these data and this machine (--set changes it):" if chosen else ""
        typer.echo(f"{DEFAULT_MODEL}{fits}")
        for each in chosen:
            typer.echo(f"  {' '.join(each.settings)}: {each.why}")
    return config


def is_first() -> bool:
    """Whether this is the process that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
