"""The command `trope compare`: runs side by side, with intervals, and a mark where a difference is more than chance.

Given a dataset and models it trains them first (`trope.experiments.pool`); given runs it compares what they left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trope.evaluate.compare import Comparison
    from trope.evaluate.metrics import Interval
    from trope.experiments.report.comparison import Baselines
    from trope.experiments.report.page import Section
    from trope.experiments.train_many import Trained

FEW_SYSTEMS = 3  # of more, only the main metrics are printed
MAIN_METRICS = ("HR@10", "NDCG@10", "Recall@50", "MRR")


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
            "hstu-trope-attention is T-RoPE without the readout by time, hstu-trope-paper as printed."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="And this: NAME=MODEL,group.field=value,… of its own; may be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with sizes, training and evaluation for every model; blocks, biases, the gate's floor "
            "and rotary encodings stay the models' own."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs to train; run again, it continues.")] = None,
    seeds: Annotated[int, typer.Option(help="Train each model this often, with seeds 0, 1, …")] = 1,
    jobs: Annotated[int, typer.Option(help="Trainings at a time.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="group.field=value for every model; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    train: Annotated[
        bool, typer.Option(help="Train what is missing; or only report runs in --out, such as copies from elsewhere.")
    ] = True,
    split: Annotated[str, typer.Option(help="Of runs: test or valid.")] = "test",
    resamples: Annotated[int, typer.Option(help="Draws of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this JSON file.")] = None,
) -> None:
    """Compare models by paired bootstrap over users: means, 95 % intervals, and what differs from the first.

    With --models, every model is trained on the dataset first, and its metrics are the mean over the seeds; what was
    trained before is not trained again, and a run that fails is reported and does not stop the others. The folder then
    has report.md and report.html, in the format of the paper's table.
    """
    from trope.evaluate.compare import compare_runs
    from trope.runs import write_json

    failed = False
    if models is None:
        if variant or config or settings:
            raise ValueError("--variant, --config and --set are for training: give --models, one dataset and --out")
        comparison = compare_runs(paths, split, resamples, seed)
        about: dict[str, Any] = {"split": split}
    else:
        from trope.experiments.variants import choose, common_settings

        if len(paths) != 1 or out is None:
            raise ValueError(f"--models needs one dataset and --out, got {len(paths)} paths and --out {out}")
        if split != "test":
            raise ValueError(f"--models compares on test, got --split {split}; compare the runs by their folders")
        common = common_settings(config, settings or [])
        variants = choose(models.split(","), variant or [], common)
        if len(variants) < 2:
            raise ValueError(f"a comparison needs two models, got --models {models}")
        from trope.experiments.train_many import train_many

        trained = train_many(paths[0], variants, seeds, jobs, out, device, train)
        comparison, baselines, results = _compare(trained, common, out, device, resamples, seed)
        about, failed = describe(trained, common, baselines), bool(trained.failures)
    show(comparison, f"{split}, {comparison.users:,} users, percent with 95 % intervals ({resamples:,} resamples)")
    if models is not None and out is not None:
        from trope.experiments.report.screen import show_section

        typer.echo("")
        show_section(results, "how much the best is above the second best")
        typer.echo(f"\nreport: {out / 'report.md'}, {out / 'report.html'}")
    if json is not None:
        write_json(json, {**about, "resamples": resamples, "seed": seed, **to_dict(comparison)})
        typer.echo(f"\nwrote {json}")
    if failed:
        raise typer.Exit(1)


def _compare(
    trained: Trained, common: tuple[str, ...], out: Path, device: str, resamples: int, seed: int
) -> tuple[Comparison, Baselines, Section]:
    """The comparison of what was trained, the baselines, and the table of both; the report is written."""
    from trope.evaluate.compare import compare_values
    from trope.experiments.report.baselines import baseline_metrics
    from trope.experiments.report.comparison import comparison_page, write_report

    if len(trained.values) < 2:
        raise ValueError(
            f"a comparison needs two models, and {len(trained.values)} could be trained; see output.txt in {out}/*"
        )
    typer.echo(f"{resamples:,} resamples of the users, and the popularity baselines …")
    comparison = compare_values(trained.values, resamples, seed)
    baselines = baseline_metrics(trained.data, trained.runs[0].config, out, device)
    page = comparison_page(trained, comparison, baselines, common, resamples)
    write_report(page, out)
    return comparison, baselines, page.sections[0]


def describe(trained: Trained, common: tuple[str, ...], baselines: Baselines) -> dict[str, Any]:
    """What was compared, for JSON: settings, data, baselines, and the deviation over seeds where there are several."""
    from trope.experiments.report.comparison import over_seeds

    seeds = len({run.seed for run in trained.runs})
    finished = {name: sum(line["name"] == name for line in trained.lines) for name in trained.values}
    deviation = {}
    for name, values in trained.values.items():
        found = {metric: over_seeds(trained.lines, name, metric) for metric in values}
        deviation[name] = {metric: float(each.std(ddof=1)) for metric, each in found.items() if len(each) > 1}
    return {
        "split": "test", "seeds": seeds, "finished": finished, "settings": list(common),
        "data": trained.lines[0]["data"], "environments": environments(trained.lines),
        "baselines": baselines, "deviation_over_seeds": deviation,
    }  # fmt: skip


def environments(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The machines, versions and commits that the runs had, each once."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line["environment"] not in found:
            found.append(line["environment"])
    return found


def show(comparison: Comparison, title: str) -> None:
    """Print a comparison: under each metric a line for each system; of many systems only the main metrics."""
    from rich.table import Table

    from trope.experiments.report.screen import screen

    reference = comparison.systems[0].name
    shown = MAIN_METRICS if len(comparison.systems) > FEW_SYSTEMS else comparison.metrics
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("metric", "run", "mean", "interval", "difference", "interval"):
        # On a narrow terminal long names are folded and numbers stay whole.
        table.add_column(heading, justify="right" if heading in ("mean", "difference") else "left")
        table.columns[-1].overflow, table.columns[-1].no_wrap = "fold", heading != "run"
    for row, metric in enumerate(comparison.metrics):
        for system in comparison.systems if metric in shown else []:
            cells = [metric if system.difference is None else "", system.name, *_cells(system.values, row)]
            if system.difference is not None:
                mean, bounds = _cells(system.difference, row, sign="+")
                cells += [mean, f"{bounds} *" if system.difference.significant[row] else bounds]
            table.add_row(*cells)
    console = screen()
    console.print(table)
    console.print(f"\ndifference: from {reference}; * where its interval leaves out 0")
    if len(shown) < len(comparison.metrics):
        console.print(f"of {len(comparison.metrics)} metrics {len(shown)} are shown; --json writes all")


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything as fractions, for JSON."""
    systems = {}
    for system in comparison.systems:
        systems[system.name] = _intervals(comparison.metrics, system.values)
        if system.difference is not None:
            systems[system.name]["minus_first"] = _intervals(comparison.metrics, system.difference)
    return {"users": comparison.users, "reference": comparison.systems[0].name, "systems": systems}


def _intervals(metrics: list[str], interval: Interval) -> dict[str, Any]:
    rows = zip(metrics, interval.mean, interval.low, interval.high, strict=True)
    return {metric: {"mean": float(mean), "low": float(low), "high": float(high)} for metric, mean, low, high in rows}


def _cells(interval: Interval, row: int, sign: str = "") -> list[str]:
    """A mean and its interval in percent."""
    mean, low, high = (f"{100 * bound[row]:{sign}.2f}" for bound in interval)
    return [mean, f"{low} .. {high}"]
