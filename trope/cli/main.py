"""The `trope` command. Each command imports what it needs when it runs, so that `trope --help` stays instant.

Errors that a user can act on are raised as ValueError anywhere below; here they become one red line and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trope.cli import ablate as ablate_command
from trope.cli import compare as compare_command
from trope.cli import data as data_commands
from trope.cli import evaluate as evaluate_command
from trope.cli import figures as figures_command
from trope.cli import prepare as prepare_command
from trope.cli import recommend as recommend_command
from trope.cli import reproduce as reproduce_command
from trope.cli import train as train_command
from trope.environment import __version__

app = typer.Typer(
    name="trope",
    help="Time-aware rotary position embedding, and the recommenders built on it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command()(prepare_command.prepare)
app.command()(data_commands.generate)
app.command()(data_commands.inspect)
app.command()(train_command.train)
app.command()(evaluate_command.evaluate)
app.command()(compare_command.compare)
app.command()(ablate_command.ablate)
app.command()(reproduce_command.reproduce)
app.command()(figures_command.figures)
app.command()(recommend_command.recommend)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"trope {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Time-aware rotary position embedding, and the recommenders built on it."""


@bench.command("kernels")
def bench_kernels(
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Only this shape: ml20m, shop, pixel1m or long; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny shape and few repeats: a smoke test.")] = False,
) -> None:
    """Time the rotary kernels: reference, compiled reference and Triton, forward and forward + backward.

    Every version is first compared with the float64 reference; a version that fails gets no number.
    """
    from trope.bench.kernels import kernel_benchmark

    kernel_benchmark(csv=csv, names=shape or (), quick=quick)


@bench.command("train")
def bench_train(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="pixel200k, pixel1m, pixel8m, ml20m, books, shop or shop-long; may be repeated."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this model; may be repeated. Default: hstu, hstu-time, hstu-torope, hstu-trope and "
            "hstu-trope-attention, which has no readout."
        ),
    ] = None,
    version: Annotated[
        list[str] | None, typer.Option(help="fused, plain or eager (the yardstick); may be repeated.")
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(help="full: every history fills the model; own: the dataset's. Default: both.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 100,
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny shape and few steps: a smoke test.")] = False,
) -> None:
    """Time training steps on generated data of a dataset's shape, next to the least this machine could take."""
    from trope.bench.train import MODELS, training_benchmark

    training_benchmark(
        shape or (), csv, model or MODELS, version or ("fused",), lengths or ("full", "own"), steps, quick
    )


@bench.command("eval")
def bench_eval(
    shape: Annotated[str, typer.Option(help="pixel200k, pixel1m, pixel8m, ml20m, books or shop.")] = "pixel1m",
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny shape: a smoke test.")] = False,
) -> None:
    """Time the ranking of the full catalogue for every user of a dataset's shape, next to the plain way."""
    from trope.bench.eval import evaluation_benchmark

    evaluation_benchmark(shape, csv, quick)


def main() -> None:
    """Entry point of the `trope` script and of `python -m trope`."""
    try:
        app()
    except (ValueError, OSError) as error:  # what was asked for cannot be: one line that says so
        typer.secho(f"trope: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
