"""The command `trope ablate`: trains and compares the paper's ablation rows and our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trope.cli.compare import BootstrapSeed, Device, Jobs, Json, Resamples, TrainMissing
from trope.cli.train import Memory


def _print_rows(value: bool) -> None:
    if value:
        from trope.experiments.ablation import ROWS

        for row in ROWS:
            own = " ".join(row.variant.settings)
            typer.echo(f"{row.table:<7} {row.variant.name:<20} {row.label:<40} {row.variant.model} {own}")
        raise typer.Exit


def ablate(
    data: Annotated[Path, typer.Argument(help="A folder made by `trope prepare`.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder of the runs and the report. The same command continues an interrupted ablation."),
    ],
    seeds: Annotated[int, typer.Option(help="Train each row this often, with seeds 0, 1, …")] = 1,
    jobs: Jobs = 1,
    only: Annotated[
        str | None, typer.Option(help="Only these rows: paper, ours, readout, or names, with commas; see --list.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with sizes, training and evaluation for every row, and nothing else."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value for every row; may be repeated.")
    ] = None,
    device: Device = "auto",
    memory: Memory = None,
    train: TrainMissing = True,
    resamples: Resamples = 10_000,
    seed: BootstrapSeed = 0,
    json: Json = None,
    list_rows: Annotated[
        bool, typer.Option("--list", callback=_print_rows, is_eager=True, help="Print the rows and train nothing.")
    ] = False,
) -> None:
    """Train T-RoPE with one part removed or changed in each row: the paper's ablation, and our own rows.

    Finished runs are not trained again. A run that fails is reported and does not stop the others.
    """
    from trope.experiments.ablation import FULL, select, variants
    from trope.experiments.config_file import common_settings

    rows = select(only)
    common = common_settings(config, settings or [])
    asked = variants(rows, common)

    from trope.evaluate.compare import compare_values
    from trope.experiments.report.ablation import TITLES, ablation_page
    from trope.experiments.report.baselines import count_baselines
    from trope.experiments.report.comparison import write_report
    from trope.experiments.report.record import describe, to_dict
    from trope.experiments.report.screen import show_section, show_warnings
    from trope.experiments.train_many import train_many
    from trope.runs import write_json

    trained = train_many(data, asked, seeds, jobs, out, device, train, memory)
    if next(iter(trained.values), None) != FULL or len(trained.values) < 2:
        raise ValueError(
            f"an ablation needs the full model and another row, but {', '.join(trained.values) or 'none'} could be "
            f"trained; the reasons are in {out}/*/output.txt"
        )
    typer.echo(f"{resamples:,} resamples of the users, and the counting baselines …")
    comparison = compare_values(trained.values, resamples, seed)
    counted = count_baselines(trained.data, trained.runs[0].config, out, device)
    page = ablation_page(trained, comparison, rows, counted, common, resamples)
    paths = write_report(page, out)
    for section in page.sections:
        if section.title in TITLES.values():
            show_section(section, "the change from the full model")
    show_warnings(page.warnings)
    typer.echo(f"\nreport: {', '.join(map(str, paths))}")
    if json is not None:
        labels = {row.variant.name: {"label": row.label, "table": row.table} for row in rows}
        about = {**describe(trained, common, counted.metrics), "rows": labels, "warnings": page.warnings}
        write_json(json, {**about, "resamples": resamples, "seed": seed, **to_dict(comparison)})
        typer.echo(f"wrote {json}")
    if trained.failures:
        raise typer.Exit(1)
