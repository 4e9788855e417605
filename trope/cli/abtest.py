"""The commands `trope abtest plan` and `trope abtest analyse`: an online experiment before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trope.cli.abtest_simulate import simulate

if TYPE_CHECKING:
    from trope.online.analysis.analyse import Analysis
    from trope.online.analysis.verdict import Verdict

abtest = typer.Typer(help="Plan, analyse and rehearse an online experiment.", no_args_is_help=True)
_COLUMNS = "Columns of the outcomes"
_LOG = "Columns of the log"
_LOOKS = "Looking more than once"
_ENGINE = "Engine"


def analyse(
    exposures: Annotated[Path, typer.Argument(help="The folder that `trope serve --exposures` wrote.")],
    outcomes: Annotated[
        str, typer.Argument(help="A file, folder or glob of Parquet, CSV or JSON lines: user_id, item_id, timestamp.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the report: report.md, report.html, analysis.json, figures.")],
    control: Annotated[
        str | None, typer.Option(help="The arm to compare with. Default: the server's first arm.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Such as conversion,orders,items,revenue,revenue/orders,orders/exposures. Default: all means per user."
        ),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(help="Outcomes from before the experiment, for CUPED. Default: those of OUTCOMES before it."),
    ] = None,
    cuped: Annotated[bool, typer.Option(help="Use outcomes from before the experiment.")] = True,
    segments: Annotated[
        Path | None, typer.Option(help="CSV or Parquet with user_id and one column for each kind of segment.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Chance of any false difference.")] = 0.05,
    looks: Annotated[
        int | None, typer.Option(help="Group sequential: number of planned looks.", rich_help_panel=_LOOKS, min=1)
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Group sequential: length in days.", rich_help_panel=_LOOKS, min=1)
    ] = None,
    always: Annotated[
        bool, typer.Option("--always", help="No planned end: valid at every look.", rich_help_panel=_LOOKS)
    ] = False,
    spending: Annotated[
        str, typer.Option(help="Group sequential: obrien-fleming or pocock.", rich_help_panel=_LOOKS)
    ] = "obrien-fleming",
    user_col: Annotated[str | None, typer.Option(help="Default: user_id.", rich_help_panel=_COLUMNS)] = None,
    item_col: Annotated[str | None, typer.Option(help="Default: item_id.", rich_help_panel=_COLUMNS)] = None,
    time_col: Annotated[str | None, typer.Option(help="Default: timestamp.", rich_help_panel=_COLUMNS)] = None,
    basket_col: Annotated[
        str | None, typer.Option(help="Order id. Default: one second of a user.", rich_help_panel=_COLUMNS)
    ] = None,
    revenue_col: Annotated[
        str | None, typer.Option(help="Default: revenue, where there is one.", rich_help_panel=_COLUMNS)
    ] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="s, ms, us, ns or iso. Default: s.", rich_help_panel=_COLUMNS)
    ] = None,
    time_format: Annotated[
        str | None, typer.Option(help="Dates as text, other than ISO: %d/%m/%Y %H:%M, ...", rich_help_panel=_COLUMNS)
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Character between CSV fields. Default: a comma.", rich_help_panel=_COLUMNS)
    ] = None,
    on_bad: Annotated[str, typer.Option(help="At a bad row: fail, or skip it.", rich_help_panel=_COLUMNS)] = "fail",
    engine: Annotated[str, typer.Option(help="duckdb or spark.", rich_help_panel=_ENGINE)] = "duckdb",
    threads: Annotated[int | None, typer.Option(help="DuckDB: cores. Default: all.", rich_help_panel=_ENGINE)] = None,
    memory: Annotated[
        str | None, typer.Option(help="DuckDB: memory for tables. Default: 3GB.", rich_help_panel=_ENGINE)
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="Spark: master URL. Default: this machine.", rich_help_panel=_ENGINE)
    ] = None,
) -> None:
    """Compare the arms of an experiment: lift, interval and p-value of each metric, and whether there is a winner.

    No winner is called where the sample ratio is off, exposures precede the assignment, or arms saw other traffic.
    """
    from trope.data.sources.resolve import Request
    from trope.online.analysis.analyse import Question
    from trope.online.analysis.analyse import analyse as run
    from trope.online.analysis.looks import Plan
    from trope.online.analysis.verdict import judge

    plan = Plan(looks, horizon, always, spending)
    question = Question(control, metrics, pre, segments, plan, alpha, cuped, revenue_col, on_bad)
    request = Request(
        outcomes,
        user_col=user_col,
        item_col=item_col,
        time_col=time_col,
        basket_col=basket_col,
        time_unit=time_unit,
        time_format=time_format,
        delimiter=delimiter,
    )
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file; name a folder")
    if engine == "duckdb":
        memory = memory or "3GB"
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        analysis = run(
            exposures, request, question, engine=engine, threads=threads, memory=memory, master=master, work=out
        )
    except (ValueError, OSError):
        if is_new and not any(out.iterdir()):
            out.rmdir()  # made for what is computed on disk; a refused input leaves nothing behind
        raise
    except KeyboardInterrupt:
        typer.secho("trope: interrupted; nothing was written", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None
    _report(analysis, judge(analysis), out)


def _report(analysis: Analysis, verdict: Verdict, out: Path) -> None:
    """Print the result and write the report."""
    from trope.data.printable import printable
    from trope.experiments.report.screen import screen
    from trope.figures.style import FORMATS, content, require_matplotlib, save, style
    from trope.online.analysis.figures import draw
    from trope.online.analysis.report import show, to_html, to_json, to_markdown, to_page
    from trope.runs import write_json, write_text

    page = to_page(analysis, verdict)
    pictures: list[tuple[bytes, str]] = []
    names: list[str] = []
    try:
        require_matplotlib()
    except ValueError as error:
        typer.secho(f"trope: no figures: {error}", err=True)
    else:
        with style():
            drawn = draw(analysis, verdict.said)
        for each in drawn:
            contents = {ending: content(each.figure, ending) for ending in FORMATS}
            names += [save(contents[ending], out / f"{each.name}.{ending}").name for ending in FORMATS]
            pictures.append((contents["svg"], each.title))
    write_text(out / "report.md", to_markdown(page, [name for name in names if name.endswith(".png")]))
    write_text(out / "report.html", to_html(page, pictures))
    write_json(out / "analysis.json", to_json(analysis, verdict))
    show(page, screen())
    typer.echo(
        f"\nreport: {', '.join(printable(out / name) for name in ('report.html', 'report.md', 'analysis.json'))}"
    )


def plan(
    log: Annotated[
        str, typer.Argument(help="A file, folder or glob of Parquet, CSV or JSON lines: visits and purchases.")
    ],
    metric: Annotated[
        str, typer.Option(help="conversion, orders, items, revenue, or a ratio such as revenue/orders.")
    ] = "orders",
    mde: Annotated[float, typer.Option(help="Smallest relative lift to detect: 0.02 is 2 %.")] = 0.02,
    power: Annotated[float, typer.Option(help="Chance to detect it.")] = 0.8,
    alpha: Annotated[float, typer.Option(help="Chance of a false difference.")] = 0.05,
    share: Annotated[float, typer.Option(help="Share of the users in the treatment.")] = 0.5,
    looks: Annotated[int, typer.Option(help="Planned looks of a group sequential test.", min=1, max=200)] = 1,
    spending: Annotated[str, typer.Option(help="obrien-fleming or pocock.")] = "obrien-fleming",
    days: Annotated[
        int | None, typer.Option(help="Say which lift this many days can show; at most half of the log.", min=1)
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every day's numbers here.")] = None,
    user_col: Annotated[str | None, typer.Option(help="Default: user_id or user.", rich_help_panel=_LOG)] = None,
    item_col: Annotated[str | None, typer.Option(help="Default: item_id or item.", rich_help_panel=_LOG)] = None,
    time_col: Annotated[str | None, typer.Option(help="Default: timestamp.", rich_help_panel=_LOG)] = None,
    basket_col: Annotated[
        str | None, typer.Option(help="Order id. Default: one second of a user.", rich_help_panel=_LOG)
    ] = None,
    revenue_col: Annotated[
        str | None, typer.Option(help="Default: revenue, where there is one.", rich_help_panel=_LOG)
    ] = None,
    event_col: Annotated[str | None, typer.Option(help="Event type, for --event.", rich_help_panel=_LOG)] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(help="Only this type is an outcome, all are visits; may be repeated.", rich_help_panel=_LOG),
    ] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="s, ms, us, ns or iso. Default: s.", rich_help_panel=_LOG)
    ] = None,
    time_format: Annotated[
        str | None, typer.Option(help="Dates as text, other than ISO: %d/%m/%Y %H:%M, ...", rich_help_panel=_LOG)
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Character between CSV fields. Default: a comma.", rich_help_panel=_LOG)
    ] = None,
    on_bad: Annotated[str, typer.Option(help="At a bad row: fail, or skip it.", rich_help_panel=_LOG)] = "fail",
) -> None:
    """Say how many users and days an experiment needs, from a log's own traffic, spread and history.

    The second half of the log plays the experiment, the first half gives the covariates of CUPED.
    """
    from dataclasses import asdict

    from trope import environment
    from trope.data.printable import printable
    from trope.data.sources.resolve import Request
    from trope.experiments.report.screen import screen
    from trope.online.analysis.plan import Design, forecast
    from trope.online.analysis.plan_report import conditions, finding, to_table
    from trope.online.analysis.verdict import percent
    from trope.runs import write_json

    design = Design(metric, mde, power, alpha, share, looks, spending, tuple(event or ()), on_bad)
    request = Request(
        log, user_col=user_col, item_col=item_col, time_col=time_col, basket_col=basket_col, event_col=event_col,
        time_unit=time_unit, time_format=time_format, delimiter=delimiter,
    )  # fmt: skip
    found = forecast(request, design, revenue_col)
    typer.echo(printable(finding(found)))
    if days is not None:
        typer.echo(f"In {days} days a lift of {percent(found.after(days).detectable)} can be detected.")
    typer.echo(f"{printable(conditions(found))}\n")
    screen().print(to_table(found, days))
    if json_file is not None:
        rows = [{name: None if value != value else value for name, value in asdict(row).items()} for row in found.rows]
        content = {**asdict(found), "rows": rows, "environment": environment.describe()}
        write_json(json_file, content)


for command in (plan, analyse, simulate):  # the order in which they are used, and in which --help lists them
    abtest.command()(command)
