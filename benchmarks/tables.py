"""Writes every table of numbers in the README and docs/ from a file under results/ or configs/.

    python benchmarks/tables.py           # rewrite the tables in place
    python benchmarks/tables.py --check   # exit 1 if a table does not say what its file says (tests do this)

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a single number between `<!-- value: NAME -->` and
`<!-- end -->`. The headline table stands on HEADLINE_PAGES only; other pages link to it.

No table mixes commits in silence: where the runs of a headline, a comparison or an ablation were trained at several
commits, a line below the table names them. The line is part of the table, so a page without it fails the check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from table_parts import ROOT, markdown, read, rows
from tables_accuracy import ACCURACY, ACCURACY_VALUES
from tables_export import EXPORT, EXPORT_VALUES
from tables_h200 import H200_VALUES
from tables_online import ONLINE
from tables_replay import REPLAY_VALUES
from tables_scale import SCALE, SCALE_VALUES
from tables_serving import SERVING
from tables_speed import SPEED

from trope.experiments.recipes import Recipe, recipe_files
from trope.settings import preset

# docs/tried.md has conclusions; its numbers are in results/tried.csv.
PAGES = (
    "README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "tried.md"),
)
HEADLINE_PAGES = {"README.md", "docs/results.md"}
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (?P<name>[\w-]+) -->).*?(<!-- end -->)")


def phases() -> str:
    """Phase errors and step sizes by time constant."""
    header = ["beta, s", "FP32 error, mean", "FP32 error, max", "exact error, max", "step, paper", "step, span"]
    keys = ("beta", "fp32_mean_error", "fp32_max_error", "exact_max_error", "paper_step", "span_step")
    return markdown(header, [[r[k] for k in keys] for r in rows("phases.csv")])


def globo_windows() -> str:
    """Windows for Globo's holdout: whom they test, and what of it could be known."""
    keys = ("hours", "test_users", "test_events")
    lines = [
        [
            r["cutoff"],
            *(f"{int(r[key]):,}" for key in keys),
            *(f"{float(r[key]):.0%}" for key in ("known", "known_refit")),
        ]
        for r in rows("globo-windows.csv")
    ]
    return markdown(["from", "hours", "test users", "events", "known a window before", "known at the cutoff"], lines)


def recipes() -> str:
    """What configs/ says: sizes, training, protocols."""
    lines = []
    for file in recipe_files(ROOT / "configs"):
        recipe = Recipe.read(file)
        models = f"{len(recipe.compare.models) + len(recipe.compare.variants)} x {recipe.compare.seeds}"
        for dataset in recipe.prepare:
            config = preset("hstu-trope", recipe.settings(dataset.name))
            model = config.model
            shape = f"{model.blocks} x {model.width}, {model.heads} x {model.head_dim}"
            sizes = [shape, str(model.max_len), str(config.train.epochs), config.eval.filter_seen]
            lines.append([dataset.name, dataset.protocol, *sizes, models])
    header = ["DATA", "protocol", "blocks x width, heads", "L", "epochs", "filter_seen", "models x seeds"]
    return markdown(header, lines)


def prepared(key: str) -> float:
    return float(read("prepare-158m.json")[key])


TABLES: dict[str, Callable[[], str]] = {
    **ACCURACY,
    **SPEED,
    **ONLINE,
    **SCALE,
    **EXPORT,
    **SERVING,
    "phases": phases,
    "recipes": recipes,
    "globo-windows": globo_windows,
}


def baskets_served(server: str) -> float:
    """Requests a second with the demo's own baskets: of `trope serve`, or of LitServe, each with its best setting."""
    found = read("serve_http_demo.json")["rows"]
    return float(max(row["rate"] for row in found if row["server"].startswith(server)))


def streamed(name: str = "streaming") -> dict[str, Any]:
    """What `benchmarks/streaming.py` measured, or `benchmarks/streaming_pulse.py`."""
    return read(f"{name}.json")


def spread() -> float:
    """How much longer the slower run took than the faster one, in per cent, streamed or in memory."""
    seconds = [[run["seconds"] for run in runs] for runs in streamed()["runs"].values()]
    return max(100 * (max(each) / min(each) - 1) for each in seconds)


def pulse_streamed(part: str) -> str:
    """Seconds of a part of what `benchmarks/streaming_pulse.py` did."""
    return f"{streamed('streaming-pulse')['seconds'][part]:.0f}"


VALUES: dict[str, Callable[[], str]] = {
    **ACCURACY_VALUES,
    **EXPORT_VALUES,
    **H200_VALUES,
    **REPLAY_VALUES,
    **SCALE_VALUES,
    "baskets-trope": lambda: f"{baskets_served('trope serve'):,.0f}",
    "baskets-litserve": lambda: f"{baskets_served('LitServe'):,.0f}",
    "baskets-times": lambda: f"{baskets_served('trope serve') / baskets_served('LitServe'):.1f}",
    "prepare-minutes": lambda: f"{prepared('wall_s') / 60:.1f}",
    "prepare-memory": lambda: f"{prepared('peak_memory_gib'):.1f}",
    "stream-events": lambda: f"{streamed()['events'] / 1e6:,.0f}",
    "stream-over": lambda: f"{streamed()['events_over_limit']:.1f}",
    "stream-limit": lambda: f"{streamed()['limit_bytes'] / 2**30:.2f}",
    "stream-memory": lambda: f"{streamed()['stream_memory_bytes'] / 2**20:.0f}",
    "stream-spread": lambda: f"{spread():.0f}",
    "stream-peak": lambda: f"{streamed()['peak_anonymous_gib']:.2f}",
    "stream-steps": lambda: f"{streamed()['steps']:,}",
    "stream-losses": lambda: "equal" if streamed()["equal_losses"] else "NOT equal",
    "stream-speed": lambda: f"{100 * streamed()['stream_over_memory']:.0f}",
    "stream-cpu": lambda: f"{100 * streamed()['cpu_stream_over_memory']:.0f}",
    "stream-load": lambda: f"{streamed()['load_before']:.1f}",
    "pulse-stream-events": lambda: f"{streamed('streaming-pulse')['events'] / 1e6:,.0f}",
    "pulse-stream-over": lambda: f"{streamed('streaming-pulse')['events_over_limit']:.1f}",
    "pulse-stream-limit": lambda: f"{streamed('streaming-pulse')['limit_bytes'] / 2**30:.2f}",
    "pulse-stream-peak": lambda: f"{streamed('streaming-pulse')['peak_anonymous_gib']:.2f}",
    "pulse-stream-fit": lambda: pulse_streamed("fit of the pulse"),
    "pulse-stream-load": lambda: f"{streamed('streaming-pulse')['load_before']:.1f}",
}


def written(text: str) -> str:
    """A page's text with every table and number made anew."""
    text = TABLE.sub(lambda m: f"{m[1]}{_known(TABLES, m['name'])()}\n{m[3]}", text)
    return VALUE.sub(lambda m: f"{m[1]}{_known(VALUES, m['name'])()}{m[3]}", text)


def _known(makers: dict[str, Callable[[], str]], name: str) -> Callable[[], str]:
    if name not in makers:
        sys.exit(f"a page asks for {name!r}, which does not exist; there are {', '.join(makers)}")
    return makers[name]


def main() -> None:
    stale = [page for page in PAGES if written((ROOT / page).read_text()) != (ROOT / page).read_text()]
    if "--check" in sys.argv:
        sys.exit(f"tables out of date in {', '.join(stale)}: run python benchmarks/tables.py" if stale else 0)
    for page in stale:
        (ROOT / page).write_text(written((ROOT / page).read_text()))


if __name__ == "__main__":
    main()
