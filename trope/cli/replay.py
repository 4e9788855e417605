"""The command `trope replay`: predict, then learn, tick by tick: what does freshness buy, what does it cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def replay(
    data: Annotated[Path, typer.Argument(help="A folder made by `trope prepare --protocol holdout`.")],
    out: Annotated[Path, typer.Option(help="Folder of the report. The same command continues an interrupted replay.")],
    every: Annotated[
        str,
        typer.Option(
            help="Length of a tick: 1h, 1d, 1w, …; at most half of the test window, such as 1h for a window of 1d."
        ),
    ] = "1d",
    like: Annotated[
        Path | None,
        typer.Option(help="A finished run on DATA, or on its log with another window. Default: train one into --out."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Without --like: the model to train, as in `trope train`.")] = None,
    config: Annotated[Path | None, typer.Option(help="Without --like: a TOML file, as in `trope train`.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Without --like: group.field=value; may be repeated.")
    ] = None,
    retrain_every: Annotated[
        int, typer.Option(help="Retrain from the start before each so many ticks; 0 never does.", min=0)
    ] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of each update. Default: as `trope update`.", min=1)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    progress: Annotated[bool, typer.Option(help="Show a line for each tick.")] = True,
) -> None:
    """Replay the test window of a holdout: ask everybody at each tick, then learn it.

    Compares a stale model, live counts, updates, retraining, and counting alone: a table, Markdown, JSON and a figure.
    """
    from trope.data.sequences import Sequences
    from trope.times import parse_duration

    seconds = parse_duration(every, "--every")
    if like is not None and (model or config or settings):
        raise ValueError("--like names a run that is trained already; leave out --model, --config and --set")
    try:
        _replay(Sequences.load(data), out, seconds, like, (model, config, settings or []), retrain_every, steps, device,
                progress)  # fmt: skip
    except KeyboardInterrupt:
        typer.secho(f"trope: interrupted; finished ticks are kept, go on with the same command: {out}", err=True)
        raise typer.Exit(130) from None


def _replay(
    data: Any,
    out: Path,
    every: int,
    like: Path | None,
    asked: tuple[str | None, Path | None, list[str]],
    retrain_every: int,
    steps: int | None,
    device: str,
    progress: bool,
) -> None:
    from rich.console import Console

    from trope import devices, environment
    from trope.data.printable import printable
    from trope.experiments.replay import METRICS, RETRAIN, UPDATE, Replay, recipe_name
    from trope.experiments.replay_report import finding, summarise, to_markdown, to_table
    from trope.runs import RunLock, write_json, write_text
    from trope.times import say_minute
    from trope.train.divergence import Diverged

    chosen = devices.choose_device(device)
    with RunLock() as lock:
        try:
            run = like or _train(data, out, every, asked, device, progress)
            playing = Replay(data, run, out, every, retrain_every, steps, chosen, lock)

            def tell(record: dict[str, Any], total: int) -> None:
                if progress:
                    said = ", ".join(f"{way} {100 * found[METRICS[0]]:.2f}" for way, found in record["ways"].items())
                    when = say_minute(record["start"])
                    typer.echo(f"tick {record['tick'] + 1} of {total}, {when}, {record['users']:,} asked: {said}")

            records = playing.play(tell)
        except Diverged as diverged:
            typer.secho(f"trope: {diverged}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from None
    means = summarise(records, playing.ways)
    said = finding(means, every)
    title = f"Replay of {data.path.name}: {recipe_name(playing.recipe)}"
    facts = {
        "every": every, "ticks": len(records), "users": sum(record["users"] for record in records),
        "half_life": playing.half_life, "retrain_every": retrain_every, "steps": steps,
    }  # fmt: skip
    Console(highlight=False).print(to_table(means, title))
    typer.echo(f"\n{said}.")
    if RETRAIN in means and UPDATE in means and retrain_every > 1:
        typer.echo(f"retrain is trained before each {retrain_every} ticks, and grows stale between them")
    write_text(out / "replay.md", to_markdown(means, title, said, facts))
    content = {**facts, "data": data.describe(), "ways": means, "records": records}
    write_json(out / "replay.json", {**content, "environment": environment.describe()})
    paths = [out / "replay.md", out / "replay.json", *_draw(records, said, out)]
    typer.echo(f"\nreport: {', '.join(printable(path) for path in paths)}")


def _train(
    data: Any, out: Path, every: int, asked: tuple[str | None, Path | None, list[str]], device: str, progress: bool
) -> Path:
    """Train until the first tick: validation chooses the epochs, and a refit learns its events too."""
    from trope.cli.train import resolve_config
    from trope.experiments.replay import TRAINING, check_training, ticks_to_replay
    from trope.settings import with_settings
    from trope.train.loop import Interrupted, train

    ticks_to_replay(data, every)  # refused before the training
    run = out / TRAINING
    model, file, settings = asked
    config = with_settings(resolve_config(model, file, settings, run, data, device), ["train.refit=true"])
    check_training(out, config)
    try:
        train(data, config, run, device, resume=True, progress=progress)
    except Interrupted:
        raise KeyboardInterrupt from None
    return run


def _draw(records: list[dict[str, Any]], title: str, out: Path) -> list[Path]:
    """The figure, where matplotlib is installed."""
    from trope.experiments.replay import METRICS
    from trope.figures.replay import draw
    from trope.figures.style import FORMATS, content, require_matplotlib, save, style

    try:
        require_matplotlib()
    except ValueError as error:
        typer.secho(f"trope: no figure: {error}; the same command draws it then", err=True)
        return []
    with style():
        drawn = draw(records, METRICS[0], title)
    return [save(content(drawn.figure, ending), out / f"{drawn.name}.{ending}") for ending in FORMATS]
