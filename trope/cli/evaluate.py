"""The command `trope evaluate`: one table of a run's best model and the counting baselines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trope.config import Config
    from trope.evaluate.evaluation import EvalResult


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`.")],
    data: Annotated[Path | None, typer.Option(help="The dataset, if it is not where it was in training.")] = None,
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    json: Annotated[Path | None, typer.Option(help="Also write everything to this JSON file.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="eval.filter_seen=history and the like; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(help="Stream the dataset's shards within so much memory, such as 2GB. Default: load all."),
    ] = None,
) -> None:
    """Rank the full catalogue for every user of a split, by the run's best model and by counting.

    The ranks are kept in the run folder, for `trope compare`.
    """
    from trope import devices, environment
    from trope.data.sequences import Sequences
    from trope.data.stream import Stream, parse_bytes
    from trope.evaluate import saved_ranks
    from trope.evaluate.streamed import evaluate as evaluate_model
    from trope.evaluate.streamed_baselines import rank_baselines
    from trope.models.recommender import SequentialRecommender
    from trope.runs import BEST, CONFIG, check_model_config, read_lineage, write_json
    from trope.train.results import measured_in
    from trope.train.streamed import check_streamed

    lineage = read_lineage(run)
    if lineage is not None:
        raise ValueError(
            f"{run} was made by `trope {lineage['kind']}`, which trains on every event, so there is nothing to test; "
            f"evaluate {measured_in(run)}, or measure freshness with `trope replay`"
        )
    store: Sequences | Stream
    store = Sequences.of_run(run, data) if memory is None else Stream.of_run(run, parse_bytes(memory, "--memory"), data)
    if isinstance(store, Stream):
        check_streamed(store)
    model = SequentialRecommender.from_pretrained(run / BEST)
    check_model_config(run, model.config)
    config = _configure(run / CONFIG, settings or [])
    if split == "valid" and config.train.refit:
        typer.secho(f"trope: {run} was refitted on the validation events (train.refit): it has seen them", err=True)
    chosen = devices.choose_device(device)
    model, store = model.to(chosen), store.to(chosen)
    max_len = config.model.max_len
    watched = sys.stderr.isatty()  # a file of bars is of no use
    ours = evaluate_model(model, store, split, config.eval.filter_seen, max_len, progress=watched)
    results = {run.resolve().name: ours}
    counted = rank_baselines(store, split, config, watched)
    results |= counted.results
    about = saved_ranks.About.of(store, split, config)
    saved = saved_ranks.save(run, ours, about)
    title = f"{store.path.name}, {about.protocol}, {split}, filter_seen {about.filter_seen}"
    _show(results, title, counted.equal)
    typer.echo(f"\nranks: {saved}")
    if json is not None:
        write_json(json, {**vars(about), **_summary(results), "environment": environment.describe()})
        typer.echo(f"wrote {json}")


def _configure(path: Path, settings: list[str]) -> Config:
    """The run's config with settings of its evaluation changed; the rest was decided in training."""
    from trope.settings import read_saved_toml, with_settings

    for setting in settings:
        if not setting.strip().startswith("eval."):
            raise ValueError(f"only eval.* can be set when a run is evaluated, got {setting!r}; train another run")
    return with_settings(read_saved_toml(path), settings)


def _summary(results: dict[str, EvalResult]) -> dict[str, Any]:
    """Counts, and every system's metrics as fractions."""
    first = next(iter(results.values()))
    metrics = {name: result.metrics for name, result in results.items()}
    return {"users": len(first.users), "positives": len(first.ranks), "metrics": metrics}


def _show(results: dict[str, EvalResult], title: str, notes: list[str]) -> None:
    """Print the table, and sentences under it."""
    from textwrap import fill

    from rich.text import Text

    from trope.data.printable import counted, printable
    from trope.experiments.report.screen import screen, show_table

    summary = _summary(results)
    counts = f"{counted(summary['users'], 'user')}, {counted(summary['positives'], 'positive')}, percent"
    # Names are those of folders, which may look like markup.
    above = Text(f"{printable(title)}\n{counts}", "table.title")
    console, names = screen(), list(map(printable, results))
    if console.is_terminal:  # names on several lines, so that columns are narrow; a file is to be searched
        names = [fill(name, 9, break_long_words=False, break_on_hyphens=False) for name in names]
    rows = [
        [Text(metric), *(Text(f"{100 * result.metrics[metric]:.2f}") for result in results.values())]
        for metric in next(iter(results.values())).metrics
    ]
    show_table(above, [Text(name) for name in ("", *names)], rows, console)
    for sentence in notes:
        console.print(Text(f"\n{sentence}"))
