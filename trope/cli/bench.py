"""The commands `trope bench kernels`, `train`, `eval`, `serve` and `cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench.command()
def kernels(
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


@bench.command()
def train(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="pixel200k, pixel1m, pixel8m, ml20m, books, shop, shop-long or shop-100m; may be repeated."),
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
def evaluate(
    shape: Annotated[str, typer.Option(help="pixel200k, pixel1m, pixel8m, ml20m, books or shop.")] = "pixel1m",
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny shape: a smoke test.")] = False,
) -> None:
    """Time the ranking of the full catalogue for every user of a dataset's shape, next to the plain way."""
    from trope.bench.eval import evaluation_benchmark

    evaluation_benchmark(shape, csv, quick)


@bench.command()
def serve(
    run: Annotated[Path, typer.Argument(help="A run; its dataset has the users that are asked for.")],
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients at a time; may be repeated. Default: 1, 8 and 64.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each load.")] = 5.0,
    k: Annotated[int, typer.Option("-k", min=1, help="Items of an answer.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
) -> None:
    """Time `trope serve` over HTTP with a run's model: requests a second, latencies, CPU time."""
    from trope.bench.serve import serving_benchmark

    serving_benchmark(run, tuple(clients or (1, 8, 64)), seconds, k, device, csv)


@bench.command()
def cost(
    model: Annotated[
        list[str] | None, typer.Option(help="A model, as in `trope train`; may be repeated. Default: trope.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with settings for --model or with all settings, or a recipe of configs/; as in "
            "`trope train`."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value, such as model.width=64; may be repeated.")
    ] = None,
    items: Annotated[int | None, typer.Option(help="Items of the catalogue. Default: Pixel1M's 100,541.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Histories of a forward. Default: the config's train.batch.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Events of each history. Default: the config's model.max_len.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file.")] = None,
) -> None:
    """Count the parameters and FLOPs of each part of a model. Nothing runs."""
    from trope.bench.cost import cost_table
    from trope.cli.train import resolve_config

    names: list[str | None] = [*model] if model else [None if config is not None else "trope"]
    chosen = {name or str(config): resolve_config(name, config, settings or [], None) for name in names}
    cost_table(chosen, items, batch, length, csv)
