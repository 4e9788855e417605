"""Writes every table of numbers in the README and docs/ from a file under results/ or configs/.

    python benchmarks/tables.py           # rewrite the tables in place
    python benchmarks/tables.py --check   # exit 1 if a table does not say what its file says (tests do this)

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a single number between `<!-- value: NAME -->` and
`<!-- end -->`. The headline table stands on HEADLINE_PAGES only; other pages link to it.

No table mixes commits in silence: where the runs of a headline, a comparison or an ablation were trained at several
commits, a line below the table names them. The line is part of the table, so a page without it fails the check.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from table_parts import ROOT, markdown, rows
from tables_export import EXPORT, EXPORT_VALUES
from tables_h200 import H200_VALUES
from tables_online import ONLINE
from tables_replay import REPLAY_VALUES
from tables_scale import SCALE, SCALE_VALUES
from tables_serving import SERVING
from tables_speed import SPEED

from trope.experiments.recipes import Recipe, recipe_files
from trope.experiments.report.comparison import seconds_per_epoch
from trope.experiments.report.controls import control_name
from trope.experiments.report.warnings import mixed_commits
from trope.settings import preset

# docs/tried.md has conclusions; its numbers are in results/tried.csv.
PAGES = (
    "README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "tried.md"),
)
HEADLINE_PAGES = {"README.md", "docs/results.md"}
HEADLINE_MODELS = ("hstu-time", "sasrec", "hstu-trope-paper", "hstu-trope", "trope")
EARLIER = ("tisasrec", "hstu", "hstu-torope", "hstu-trope-attention")
"""Models that were measured at other commits; their files are in results/earlier/."""
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (?P<name>[\w-]+) -->).*?(<!-- end -->)")


def phases() -> str:
    """Phase errors and step sizes by time constant."""
    header = ["beta, s", "FP32 error, mean", "FP32 error, max", "exact error, max", "step, paper", "step, span"]
    keys = ("beta", "fp32_mean_error", "fp32_max_error", "exact_max_error", "paper_step", "span_step")
    return markdown(header, [[r[k] for k in keys] for r in rows("phases.csv")])


def compared(name: str) -> dict[str, Any]:
    """What `trope compare --json` wrote."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def trained(name: str) -> list[dict[str, Any]]:
    """One line for each run: what `trope compare` left in results.jsonl."""
    return [json.loads(line) for line in (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()]


def hit(found: dict[str, Any]) -> str:
    """HR where every user has one positive, else Recall."""
    return "HR" if found["data"]["protocol"]["name"].startswith("loo") else "Recall"


def apart(values: dict[str, Any], metric: str) -> str:
    """How far a system is from the first one, with its interval; nothing for the first itself."""
    found = values.get("minus_first", {}).get(metric)
    return interval(*(100 * found[key] for key in ("mean", "low", "high"))) if found else ""


def interval(mean: float, low: float, high: float) -> str:
    """A difference with its interval."""
    return f"{mean:+.2f} ({low:+.2f} .. {high:+.2f})"


def star(low: float, high: float) -> str:
    """Marks an interval that leaves out zero."""
    return " *" if low > 0 or high < 0 else ""


def with_commits(table: str, runs: Sequence[dict[str, Any]]) -> str:
    """The table; below it the commits of each model, where the runs come from several."""
    commits: dict[str, list[str]] = {}
    for run in runs:
        commit = run["environment"].get("commit", "unknown")
        commits.setdefault(run["name"], []).append(commit[:7] + "+" * commit.endswith("+"))
    return "\n\n".join([table, *(f"{line[0].upper()}{line[1:]}." for line in mixed_commits(commits))])


def comparison(name: str) -> str:
    """Means in percent, and the first metric's difference from the first system; then the baselines."""
    found = compared(name)
    metrics, lines = (f"{hit(found)}@10", "NDCG@10", f"{hit(found)}@50", "MRR"), []
    seeds = Counter(run["name"] for run in trained(name))
    for system, values in found["systems"].items():
        fewer = "" if seeds[system] == max(seeds.values()) else f" ({seeds[system]} seeds)"
        lines.append(
            [system + fewer, *(f"{100 * values[metric]['mean']:.2f}" for metric in metrics), apart(values, metrics[0])]
        )
        if control := found.get("with_counting", {}).get(system):
            lines.append([control_name(system), *(f"{100 * control[metric]:.2f}" for metric in metrics), ""])
    for baseline, means in found.get("baselines", {}).items():
        lines.append([baseline, *(f"{100 * means[metric]:.2f}" for metric in metrics), ""])
    header = [f"{found['users']:,} users", *metrics, f"{metrics[0]} minus {found['reference']}"]
    return with_commits(markdown(header, lines), [run for run in trained(name) if run["name"] in found["systems"]])


def headline() -> str:
    """`trope` with its interval, and what it must be above: models, a model with counting, counting alone."""
    lines, shown = [], []
    for name, title in SETS.items():
        found = compared(name)
        metric, systems = f"{hit(found)}@10", found["systems"]
        seeds = Counter(run["name"] for run in trained(name))
        assert all(seeds[model] == SEEDS for model in HEADLINE_MODELS), f"{name}: {seeds}"
        cells = [f"{100 * systems[model][metric]['mean']:.2f}" for model in HEADLINE_MODELS[:-1]]
        cells += [
            _best({control_name(model): of[metric] for model, of in found["with_counting"].items()}),
            _best({baseline: of[metric] for baseline, of in found["baselines"].items()}),
        ]
        ours = {key: 100 * systems["trope"][metric][key] for key in ("mean", "low", "high")}
        best = max(rows_beside(found, metric).values())
        mark = " *" if ours["low"] > best else " (below)" if ours["high"] < best else ""
        cells.append(f"{ours['mean']:.2f} ({ours['low']:.2f} .. {ours['high']:.2f}){mark}")
        lines.append([title, f"{found['users']:,}", metric, *cells])
        shown += [run for run in trained(name) if run["name"] in HEADLINE_MODELS]
    header = ["hstu-time", "sasrec", "as printed", "hstu-trope", "best + counting", "best counting", "trope"]
    return with_commits(markdown(["", "users", "metric", *header], lines), shown)


def rows_beside(found: dict[str, Any], metric: str) -> dict[str, float]:
    """Every row of a comparison but `trope`, in percent: models, models with counting, counting alone."""
    models = {name: of[metric]["mean"] for name, of in found["systems"].items() if name != "trope"}
    controls = {control_name(name): of[metric] for name, of in found["with_counting"].items()}
    counting = {name: of[metric] for name, of in found["baselines"].items()}
    return {name: 100 * value for name, value in {**models, **controls, **counting}.items()}


def _best(means: dict[str, float]) -> str:
    name = max(means, key=lambda each: means[each])
    return f"{100 * means[name]:.2f}, {name.removesuffix(' + counting')}"


def earlier() -> str:
    """The other models of the paper's table, measured before at other commits."""
    lines, shown = [], []
    for name, title in SETS.items():
        found = compared(f"earlier/{name}")
        metric = f"{hit(found)}@10"
        models = ("hstu-time", *EARLIER)
        lines.append([title, metric, *(_mean(found["systems"].get(model), metric) for model in models)])
        shown += [run for run in trained(f"earlier/{name}") if run["name"] in models]
    return with_commits(markdown(["", "metric", "hstu-time", *EARLIER], lines), shown)


def _mean(values: dict[str, Any] | None, metric: str) -> str:
    return "" if values is None else f"{100 * values[metric]['mean']:.2f}"


def readout_gain() -> str:
    """What the readout adds to T-RoPE in attention."""
    lines = []
    for name, title in SETS.items():
        cells = []
        for row in (row for row in rows("readout.csv") if row["data"] == name):
            change, low, high = (float(row[key]) for key in ("difference", "low", "high"))
            cells += [f"{float(row['attention']):.2f}", f"{float(row['readout']):.2f}"]
            cells.append(interval(change, low, high) + star(low, high))
        if cells:
            lines.append([title, *cells])
    metrics = ("Recall@10", "NDCG@10")
    return markdown(
        ["", *(f"{what}{metric}" for metric in metrics for what in ("", "with the readout, ", "difference, "))], lines
    )


def validation() -> str:
    """What validation saw when it chose, and what the test said: mean over seeds."""
    lines = []
    for name, title in SETS.items():
        runs = trained(name)
        for model in dict.fromkeys(run["name"] for run in runs):
            ours = [run for run in runs if run["name"] == model]
            means = [100 * statistics.mean(run[split]["HR@10"] for run in ours) for split in ("valid", "test")]
            spread = statistics.stdev(100 * run["test"]["HR@10"] for run in ours) if len(ours) > 1 else 0.0
            epochs = ", ".join(f"{run['best_epoch']}/{run['epochs']}" for run in ours)
            lines.append([f"{title}: {model}", f"{means[0]:.2f}", f"{means[1]:.2f}", f"{spread:.2f}", epochs])
    header = ["", "validation HR@10", "test HR@10", "deviation over seeds", "epoch chosen, of trained"]
    return markdown(header, lines)


def ablation(name: str) -> str:
    """The paper's rows and ours, in the paper's metrics; and how far the first metric is from the full model's."""
    found = compared(f"{name}-ablation")
    first, systems = f"{hit(found)}@10", found["systems"]
    metrics = (first, *(f"{kind}@{cut}" for cut in (50, 200) for kind in ("Recall", "NDCG")), "MRR")
    seeds = Counter(run["name"] for run in trained(f"{name}-ablation"))
    lines = []
    for system, row in found["rows"].items():
        if system in systems:
            values = systems[system]
            cells = [f"{100 * values[metric]['mean']:.2f}" for metric in metrics]
            lines.append([row["label"], str(seeds[system]), *cells, apart(values, first)])
    table = markdown([f"{found['users']:,} users", "seeds", *metrics, f"{first} minus the first row"], lines)
    labels = {system: row["label"] for system, row in found["rows"].items() if system in systems}
    runs = [run for run in trained(f"{name}-ablation") if run["name"] in labels]
    return with_commits(table, [{**run, "name": labels[run["name"]]} for run in runs])


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


def pace() -> str:
    """Seconds of an epoch, validation included, of the comparisons under results/."""
    lines = []
    files = [file for file in sorted((ROOT / "results").glob("*.jsonl")) if not file.stem.endswith("-ablation")]
    for file in files:
        runs = [run for run in map(json.loads, file.read_text().splitlines()) if {"best_epoch", "name"} <= run.keys()]
        for name in dict.fromkeys(run["name"] for run in runs):
            ours = [run for run in runs if run["name"] == name]
            seconds = statistics.mean(map(seconds_per_epoch, ours))
            events, device = f"{ours[0]['data']['events']:,}", ours[0]["environment"]["device"]
            lines.append([file.stem, name, events, f"{seconds:.2f}", device, str(len(runs))])
    return markdown(["results", "model", "events", "seconds per epoch", "device", "trainings in the file"], lines)


def prepared(key: str) -> float:
    return float(json.loads((ROOT / "results" / "prepare-158m.json").read_text())[key])


SEEDS = 3  # of every comparison; a table says where one has fewer
# Datasets with results, in the order of the tables; a file under results/ each.
SETS = {
    "globo-news-holdout": "Globo news, the next two hours",
    "amazon-grocery-5core-2014-holdout": "Amazon Grocery, the next 60 days",
    "online-retail-ii-holdout": "Online Retail II, the next 30 days",
    "complete-journey-holdout": "The Complete Journey, the next 14 days",
    "online-retail-ii": "Online Retail II, the next basket",
    "complete-journey": "The Complete Journey, the next basket",
    "globo-news": "Globo news, leave-one-out",
    "amazon-grocery-5core-2014": "Amazon Grocery, leave-one-out",
    "online-retail-ii-loo": "Online Retail II, leave-one-out",
    "ml-1m-strict": "MovieLens 1M, leave-one-out",
    "ml-1m": "MovieLens 1M, leave-one-out as published",
}
SHOPS = ("calendar-shop", "calendar-shop-none")
MORE = (
    "amazon-grocery-5core-2014-holdout-stale",
    "online-retail-ii-november",
    "ml-1m-large",
    "checkins",
    "films-small",
)
ABLATED = ("globo-news-holdout", "globo-news", "amazon-grocery-5core-2014-holdout", "amazon-grocery-5core-2014")
TABLES: dict[str, Callable[[], str]] = {
    **SPEED,
    **ONLINE,
    **SCALE,
    **EXPORT,
    **SERVING,
    "phases": phases,
    "recipes": recipes,
    "pace": pace,
    "headline": headline,
    "earlier": earlier,
    "readout-gain": readout_gain,
    "validation": validation,
    "globo-windows": globo_windows,
    **{name: partial(comparison, name) for name in (*SETS, *SHOPS, *MORE)},
    **{f"ablation-{name}": partial(ablation, name) for name in ABLATED},
}


def of_model(name: str, model: str) -> str:
    """A model's cell of the headline table, without its interval."""
    found = compared(name)
    return f"{100 * found['systems'][model][f'{hit(found)}@10']['mean']:.2f}"


def of_counting(name: str, baseline: str | None = None) -> str:
    """Counting's cell of the headline table: the best of them, or one."""
    found = compared(name)
    values = {each: of[f"{hit(found)}@10"] for each, of in found["baselines"].items()}
    return f"{100 * (max(values.values()) if baseline is None else values[baseline]):.2f}"


def baskets_served(server: str) -> float:
    """Requests a second with the demo's own baskets: of `trope serve`, or of LitServe, each with its best setting."""
    rows = json.loads((ROOT / "results" / "serve_http_demo.json").read_text())["rows"]
    return float(max(row["rate"] for row in rows if row["server"].startswith(server)))


def streamed(name: str = "streaming") -> dict[str, Any]:
    """What `benchmarks/streaming.py` measured, or `benchmarks/streaming_pulse.py`."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def spread() -> float:
    """How much longer the slower run took than the faster one, in per cent, streamed or in memory."""
    seconds = [[run["seconds"] for run in runs] for runs in streamed()["runs"].values()]
    return max(100 * (max(each) / min(each) - 1) for each in seconds)


def pulse_streamed(part: str) -> str:
    """Seconds of a part of what `benchmarks/streaming_pulse.py` did."""
    return f"{streamed('streaming-pulse')['seconds'][part]:.0f}"


VALUES: dict[str, Callable[[], str]] = {
    **{f"{name}-{model}": partial(of_model, name, model) for name in SETS for model in HEADLINE_MODELS},
    **{f"checkins-{model}": partial(of_model, "checkins", model) for model in ("trope", "sasrec")},
    **{f"{name}-counting": partial(of_counting, name) for name in SETS},
    **{f"{name}-again": partial(of_counting, name, "again") for name in (*SETS, "checkins")},
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
    "pulse-stream-kept": lambda: pulse_streamed("counts that are kept"),
    "pulse-stream-test": lambda: pulse_streamed("ranks of the test users"),
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
