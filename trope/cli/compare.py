"""The command `trope compare`: models side by side, with intervals, and a star at each significant difference.

Given a dataset and models, it trains the models first (`trope.experiments.pool`). Given runs, it compares their saved
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trope.cli.train import Memory

if TYPE_CHECKING:
    from trope.evaluate.compare import Comparison
    from trope.experiments.report.baselines import Baselines
    from trope.experiments.report.page import Page
    from trope.experiments.train_many import Trained

# Options that `trope ablate` has too.
Jobs = Annotated[int, typer.Option(help="Trainings at a time.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")]
TrainMissing = Annotated[
    bool, typer.Option(help="Train missing runs; --no-train reports the finished runs in --out only.")
]
Resamples = Annotated[int, typer.Option(help="Draws of the bootstrap.")]
BootstrapSeed = Annotated[int, typer.Option(help="Seed of the bootstrap.")]
Json = Annotated[Path | None, typer.Option(help="Also write everything to this JSON file.")]


def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A dataset, with --models and --out; or two or more evaluated runs.", metavar="DATA | RUN…"
        ),
    ],
    models: Annotated[
        str | None,
        typer.Option(
            help="Train these on the dataset, such as hstu-time,hstu-trope; the first is the reference. "
            "hstu-trope-attention is T-RoPE without the readout, hstu-trope-paper is T-RoPE as printed in the paper."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Train this as well: NAME=MODEL,group.field=value,…; may be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with sizes, training and evaluation for every model. Blocks, biases, the gate's floor "
            "and the rotary encoding are the models' own: a file that states them is refused."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs to train. The same command continues an interrupted comparison."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Train each model this often, with seeds 0, 1, …")] = 1,
    jobs: Jobs = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value for every model; may be repeated.")
    ] = None,
    device: Device = "auto",
    memory: Memory = None,
    train: TrainMissing = True,
    split: Annotated[str, typer.Option(help="Which ranks of runs to compare: test or valid.")] = "test",
    resamples: Resamples = 10_000,
    seed: BootstrapSeed = 0,
    json: Json = None,
) -> None:
    """Compare models by paired bootstrap over users: means, 95 % intervals, and differences from the first.

    With --models, every model is trained on the dataset first; its metrics are the mean over the seeds. Finished runs
    are not trained again. A run that fails is reported and does not stop the others. report.md and report.html in --out
    have the format of the paper's table.

    "MODEL + counting" is a control: the model's scores plus decayed counts of all users' events.

    Warnings stand below the tables, and in the reports: one seed, several commits, counting ahead of a model, a model
    that may be undertrained (validation chose one of the first epochs, or HR@10 is near zero), baselines that are
    equal.
    """
    from trope.evaluate.compare import compare_runs
    from trope.experiments.report.record import describe, to_dict
    from trope.experiments.report.screen import show_comparison, show_section, show_warnings
    from trope.runs import write_json

    failed = False
    if models is None:
        if variant or config or settings or memory:
            raise ValueError(
                "--variant, --config, --set and --memory are for training: give --models, one dataset and --out"
            )
        from trope.experiments.report.controls import run_controls
        from trope.experiments.report.warnings import run_warnings

        comparison = compare_runs(paths, split, resamples, seed)
        controls = run_controls(paths, comparison) if split == "test" else {}
        about: dict[str, Any] = {"split": split, "with_counting": controls}
        warnings = run_warnings(paths, comparison, split)
    else:
        from trope.experiments.config_file import common_settings
        from trope.experiments.train_many import train_many
        from trope.experiments.variants import choose

        if len(paths) != 1:
            raise ValueError(f"--models trains on one dataset, got {len(paths)} paths: {', '.join(map(str, paths))}")
        if out is None:
            raise ValueError("--models needs a folder for its runs; add --out FOLDER")
        if split != "test":
            raise ValueError(f"--models compares on test, got --split {split}; compare the runs by their folders")
        common = common_settings(config, settings or [])
        variants = choose(models.split(","), variant or [], common)
        if len(variants) < 2:
            raise ValueError(f"a comparison needs two models, got --models {models}")
        trained = train_many(paths[0], variants, seeds, jobs, out, device, train, memory)
        comparison, baselines, page = _compare(trained, common, out, device, resamples, seed)
        about, failed = describe(trained, common, baselines), bool(trained.failures)
        controls = about["with_counting"]
        warnings = page.warnings
    title = f"{split}, {comparison.users:,} users, percent with 95 % intervals ({resamples:,} resamples)"
    show_comparison(comparison, title, controls=controls)
    if models is not None and out is not None:
        typer.echo("")
        show_section(page.sections[0], "the gain of the best over the second best")
    show_warnings(warnings)
    if models is not None and out is not None:
        typer.echo(f"\nreport: {out / 'report.md'}, {out / 'report.html'}")
    if json is not None:
        write_json(json, {**about, "warnings": warnings, "resamples": resamples, "seed": seed, **to_dict(comparison)})
        typer.echo(f"\nwrote {json}")
    if failed:
        raise typer.Exit(1)


def _compare(
    trained: Trained, common: tuple[str, ...], out: Path, device: str, resamples: int, seed: int
) -> tuple[Comparison, Baselines, Page]:
    """Write the report; returns the comparison, the baselines, and the report."""
    from trope.evaluate.compare import compare_values
    from trope.experiments.report.baselines import count_baselines
    from trope.experiments.report.comparison import comparison_page, write_report

    if len(trained.values) < 2:
        raise ValueError(
            f"a comparison needs two models, but {len(trained.values)} could be trained; the reasons are in "
            f"{out}/*/output.txt"
        )
    typer.echo(f"{resamples:,} resamples of the users, and the counting baselines …")
    comparison = compare_values(trained.values, resamples, seed)
    counted = count_baselines(trained.data, trained.runs[0].config, out, device)
    page = comparison_page(trained, comparison, counted, common, resamples)
    write_report(page, out)
    return comparison, counted.metrics, page
