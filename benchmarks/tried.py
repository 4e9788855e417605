"""Records finished runs outside the comparisons as lines of results/tried.csv.

    python benchmarks/tried.py "second look" runs/tried/*/*

A run's model is the preset whose config, under the recipe of its data (configs/), differs in the fewest settings. These
settings are recorded with it. The same run again replaces its line. docs/tried.md has the conclusions.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trope.config import PRESETS, Config
from trope.experiments.pool import Variant
from trope.experiments.recipes import find
from trope.experiments.variants import NAMED
from trope.runs import CONFIG, ENVIRONMENT, LOG, METRICS
from trope.settings import preset, read_toml, to_dict

ROOT = Path(__file__).parent.parent
CSV = ROOT / "results" / "tried.csv"
KEY = ("data", "look", "model", "settings", "seed")


def nearest(config: Config, data: str) -> tuple[str, list[str]]:
    """The preset that differs from the config in the fewest settings under its recipe, and these settings."""
    common = find(data, ROOT / "configs").settings(data)
    # Of two presets that are equally near, T-RoPE comes first: most runs tried a variant of it.
    named = [NAMED.get(name, Variant(name, name)) for name in dict.fromkeys(("hstu-trope", *NAMED, *PRESETS))]
    seed = f"train.seed={config.train.seed}"
    others = {each.name: preset(each.model, [*common, *each.settings, seed]).resolved for each in named}
    own = {name: list(_apart(config.resolved, other)) for name, other in others.items()}
    model = min(own, key=lambda name: len(own[name]))
    return model, own[model]


def _apart(config: Config, other: Config) -> Iterator[str]:
    theirs = to_dict(other)
    for group, values in to_dict(config).items():
        for name, value in values.items():
            if value != theirs[group][name]:
                text = (
                    f"{value:g}"
                    if isinstance(value, float)
                    else value
                    if isinstance(value, str)
                    else str(value).lower()
                )
                yield f"{group}.{name}={text}"


def describe(run: Path, look: str) -> dict[str, Any]:
    """A line of the CSV."""
    found, machine = (json.loads((run / name).read_text()) for name in (METRICS, ENVIRONMENT))
    log = [json.loads(line) for line in (run / LOG).read_text().splitlines()]
    losses = [line["epoch_loss"] for line in log if "epoch_loss" in line]
    gradients = sorted(line["grad_norm"] for line in log if "grad_norm" in line)
    config, data = read_toml(run / CONFIG), Path(found["data"]["path"]).name
    model, settings = nearest(config, data)
    metrics = {
        f"{split}_{name.replace('@', '')}": round(100 * found[split][name], 3)
        for split, name in (("valid", "HR@10"), ("test", "HR@10"), ("test", "Recall@10"), ("test", "NDCG@10"))
    }
    return {
        "data": data, "protocol": found["data"]["protocol"]["name"], "look": look, "model": model,
        "settings": " ".join(settings), "seed": str(config.train.seed), "epochs": found["epochs"],
        "best_epoch": found["best_epoch"], "lowest_loss": round(min(losses), 4), "last_loss": round(losses[-1], 4),
        "median_gradient": round(gradients[len(gradients) // 2], 3), "largest_gradient": round(gradients[-1], 1),
        **metrics, "commit": machine["commit"], "date": machine["date"],
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(f"give a look and folders of runs:\n\n{__doc__}")
    look, *folders = sys.argv[1:]
    runs = [metrics.parent for folder in map(Path, folders) for metrics in sorted(folder.glob(f"*/{METRICS}"))]
    if not runs:
        sys.exit(f"no finished run (FOLDER/RUN/{METRICS}) in {' '.join(folders)}")
    with CSV.open() as file:
        lines = {tuple(row[key] for key in KEY): row for row in csv.DictReader(file)}
    for run in runs:
        line = describe(run, look)
        lines[tuple(line[key] for key in KEY)] = line
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, next(iter(lines.values())).keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines.values())
    print(f"{len(runs)} runs, {len(lines)} lines in {CSV.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
