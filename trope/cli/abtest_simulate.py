"""The command `trope abtest simulate`: rehearse an experiment where the true effect is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trope.online.analysis.analyse import Analysis
    from trope.online.simulation.truth import Effect


def simulate(
    arm: Annotated[list[str], typer.Option(help="NAME=RUN, two of them; the first is the control.")],
    shop: Annotated[
        Path, typer.Option(help="The shop whose log the runs were trained on: NAME.truth.json of `trope generate`.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for exposures, outcomes and the truth.")],
    days: Annotated[int, typer.Option(help="Length of the experiment, from the end of the log on.")] = 60,
    users: Annotated[
        int | None, typer.Option(help="So many users take part, the others go on as in the log. Default: all.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=100, help="Places of a slate.")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=999_999, help="Of visits, luck and assignment.")] = 0,
    repetitions: Annotated[int, typer.Option(min=2, help="Of both arms for everybody, for the true effect.")] = 10,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Ask the models here instead of a server: faster.")
    ] = False,
) -> None:
    """Rehearse an A/B test in the calendar shop, with a server, exposures, outcomes, analysis and the true effect.

    Users come at their own times, see a slate of their arm, and choose by the generator's own probabilities. What they
    buy is their history from then on. See docs/online.md.
    """
    import torch
    from tqdm import tqdm

    from trope.data.sources.resolve import Request
    from trope.environment import describe
    from trope.experiments.report.screen import screen
    from trope.online.analysis.analyse import Question, analyse
    from trope.online.analysis.report import show, to_page
    from trope.online.analysis.verdict import judge
    from trope.online.assignment import read_arms
    from trope.online.simulation.answers import open_arms
    from trope.online.simulation.population import Population, read_shop
    from trope.online.simulation.record import EXPOSURES, OUTCOMES
    from trope.online.simulation.rehearsal import make_experiment, rehearse, rehearse_over_http
    from trope.online.simulation.truth import true_effects
    from trope.runs import write_json

    runs = {each.name: each.run for each in read_arms(arm, needs_share=False)}
    if len(runs) != 2:
        raise ValueError(f"give --arm NAME=RUN twice: a control and what is compared with it, got {len(runs)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists; name a new folder with --out")
    torch.set_num_threads(1)  # a tick's batch is small: more threads only wait for each other
    population = Population.of(read_shop(shop), users)
    make_experiment(population, list(runs), seed)  # refuses bad names before models are loaded
    arms = open_arms(runs, population.shop.items, k)
    if in_process:
        played = rehearse(population, days, arms, seed, out)
    else:
        played = rehearse_over_http(population, days, runs, seed, out, k)
    orders = int((played.outcome.place >= 0).sum())
    typer.echo(f"{len(played.traffic):,} visits in {days} days, {orders:,} orders: {out}")
    request = Request(str(out / OUTCOMES))
    # The true effect is that of the second arm against the first, whatever their names.
    analysis = analyse(out / EXPOSURES, request, Question(control=next(iter(runs))), memory="1GB", work=out)
    console = screen()
    show(to_page(analysis, judge(analysis)), console)
    with tqdm(total=repetitions, desc="true effect", unit=" repetitions", leave=False) as bar:
        control, treatment = arms.values()
        effects = true_effects(population, days, control, treatment, repetitions, lambda _: bar.update())
    console.print("", _table(analysis, effects, repetitions))
    write_json(
        out / "truth.json",
        {
            "days": days, "users": population.count, "k": k, "seed": seed, "repetitions": repetitions,
            "effects": {name: effect._asdict() for name, effect in effects.items()}, "environment": describe(),
        },
    )  # fmt: skip
    typer.echo(f"\nfigures and a page: trope abtest analyse {out / EXPOSURES} {out / OUTCOMES} --out {out / 'report'}")


def _table(analysis: Analysis, effects: dict[str, Effect], repetitions: int) -> object:
    """Each estimate beside the truth."""
    from rich.table import Table

    from trope.online.simulation.truth import holds

    title = f"The truth: everybody in one arm, {repetitions} repetitions with the same visitors"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("Metric", "Estimate", "Interval", "True lift", "Standard error", "Holds the truth"):
        table.add_column(heading, justify="left" if heading == "Metric" else "right")
    for name, effect in effects.items():
        reading = analysis.of(name).reading
        table.add_row(
            name, f"{reading.estimate.lift:+.2%}", f"{reading.low:+.2%} .. {reading.high:+.2%}", f"{effect.lift:+.2%}",
            f"{effect.error:.2%}", "yes" if holds(reading.low, reading.high, effect) else "no",
        )  # fmt: skip
    return table
