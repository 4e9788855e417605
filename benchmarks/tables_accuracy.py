"""The tables of accuracy, from what `trope compare` and the experiments wrote: headline, comparisons, ablations; and
single numbers of them.

Values are in percent; the metric is the first of a comparison: HR@10 where every user has one positive, else Recall@10.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from table_parts import ROOT, markdown, read, rows

from trope.experiments.report.controls import control_name
from trope.experiments.report.warnings import mixed_commits

HEADLINE_MODELS = ("hstu-time", "sasrec", "hstu-trope-paper", "hstu-trope", "trope")
EARLIER = ("tisasrec", "hstu", "hstu-torope", "hstu-trope-attention")
"""Models that were measured at other commits; their files are in results/earlier/."""
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


def compared(name: str) -> dict[str, Any]:
    """What `trope compare --json` wrote."""
    return read(f"{name}.json")


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


def of_model(name: str, model: str) -> str:
    """A model's cell of the headline table, without its interval."""
    found = compared(name)
    return f"{100 * found['systems'][model][f'{hit(found)}@10']['mean']:.2f}"


def of_counting(name: str, baseline: str | None = None) -> str:
    """Counting's cell of the headline table: the best of them, or one."""
    found = compared(name)
    values = {each: of[f"{hit(found)}@10"] for each, of in found["baselines"].items()}
    return f"{100 * (max(values.values()) if baseline is None else values[baseline]):.2f}"


def of_seed(name: str, model: str, seed: int = 0) -> str:
    """One training of a model: only with a training of the same seed is it comparable."""
    metric = f"{hit(compared(name))}@10"
    (run,) = (run for run in trained(name) if run["name"] == model and run["seed"] == seed)
    return f"{100 * run['test'][metric]:.2f}"


def of_seeds(name: str, model: str) -> str:
    """All trainings of a model, the lowest first."""
    metric = f"{hit(compared(name))}@10"
    return ", ".join(sorted(f"{100 * run['test'][metric]:.2f}" for run in trained(name) if run["name"] == model))


def of_row(row: str) -> str:
    """Recall@10 of a row of results/trope-stale-small.jsonl: the mean of its seeds."""
    runs = [run for run in trained("trope-stale-small") if run["row"] == row]
    return f"{100 * statistics.mean(run['test']['Recall@10'] for run in runs):.2f}"


def low_end(name: str) -> str:
    """Where the interval of `trope` begins."""
    found = compared(name)
    return f"{100 * found['systems']['trope'][f'{hit(found)}@10']['low']:.2f}"


def gain_of_pulse(name: str) -> str:
    """`trope` minus `hstu-trope`."""
    systems, metric = compared(name)["systems"], f"{hit(compared(name))}@10"
    return f"{100 * (systems['trope'][metric]['mean'] - systems['hstu-trope'][metric]['mean']):.1f}"


def seen_items() -> str:
    """Counting with every item in the list, and without the user's earlier ones; `trope` beside it."""
    lines = []
    for name, found in read("seen-items.json")["data"].items():
        best = [max(found["counting"][seen].values()) for seen in ("none", "history")]
        ours = [of_model(name, "trope"), low_end(name)]
        lines.append([SETS[name], f"{found['had_before']:.1%}", *(f"{100 * each:.2f}" for each in best), *ours])
    header = ["", "positives the user had before", "best counting", "without earlier items"]
    return markdown([*header, "trope", "its interval begins at"], lines)


def seen_run() -> str:
    """One network with and without the users' earlier items."""
    found = read("seen-items.json")["run"]
    names = {"none": "every item (as in the tables)", "history": "without the user's earlier items"}
    lines = [
        [
            names[seen],
            *(f"{100 * found[seen][kind]:.2f}" for kind in ("network", "counting", "pulse")),
            interval(*(100 * found[seen]["pulse_minus_counting"][key] for key in ("mean", "low", "high"))),
        ]
        for seen in ("none", "history")
    ]
    header = ["ranked", "hstu-trope", "hstu-trope + counting", "trope", "trope minus hstu-trope + counting"]
    return markdown(header, lines)


COMPARED = (*SETS, *SHOPS, *MORE)
ACCURACY: dict[str, Callable[[], str]] = {
    "headline": headline,
    "earlier": earlier,
    "readout-gain": readout_gain,
    "validation": validation,
    "seen-items": seen_items,
    "seen-run": seen_run,
    **{name: partial(comparison, name) for name in COMPARED},
    **{f"ablation-{name}": partial(ablation, name) for name in ABLATED},
}
ACCURACY_VALUES: dict[str, Callable[[], str]] = {
    **{f"{name}-{model}": partial(of_model, name, model) for name in SETS for model in HEADLINE_MODELS},
    **{f"{name}-trope-seed0": partial(of_seed, name, "trope") for name in SETS},
    **{f"{name}-trope-seeds": partial(of_seeds, name, "trope") for name in SETS},
    **{f"{name}-pulse": partial(gain_of_pulse, name) for name in SETS},
    **{f"checkins-{model}": partial(of_model, "checkins", model) for model in ("trope", "sasrec")},
    **{f"{name}-counting": partial(of_counting, name) for name in SETS},
    **{f"{name}-again": partial(of_counting, name, "again") for name in (*SETS, "checkins")},
    **{row: partial(of_row, row) for row in ("globo-stale", "grocery-stale", "grocery-holdout-64", "grocery-loo-64")},
}
