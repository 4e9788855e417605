"""Writes results/readout.csv: what the readout adds to T-RoPE in attention, with intervals.

    python benchmarks/readout.py runs/globo-news runs/globo-news-holdout …

Reads `hstu-trope-attention-seed*` and `hstu-trope-seed*` in each folder, as `trope compare` left them.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from trope.evaluate.compare import compare_values
from trope.experiments.pool import Run, Variant, mean_over_seeds

CSV = Path(__file__).parent.parent / "results" / "readout.csv"
MODELS = ("hstu-trope-attention", "hstu-trope")
METRICS = ("Recall@10", "NDCG@10")
RESAMPLES, SEED = 10_000, 0


def lines(folder: Path) -> list[dict[str, object]]:
    """One line a metric."""
    runs = [
        Run(Variant(model, "hstu-trope"), int(run.name.rsplit("seed", 1)[1]), run)
        for model in MODELS
        for run in sorted(folder.glob(f"{model}-seed*"))
    ]
    runs = [run for run in runs if run.is_finished]
    seeds = {model: [run.seed for run in runs if run.variant.name == model] for model in MODELS}
    if seeds[MODELS[0]] != seeds[MODELS[1]]:
        raise SystemExit(f"{folder} holds other seeds of one model than of the other: {seeds}")
    values = {name: {metric: of[metric] for metric in METRICS} for name, of in mean_over_seeds(runs).items()}
    if tuple(values) != MODELS:
        raise SystemExit(f"{folder} holds no finished runs of {' and '.join(MODELS)}")
    found = compare_values(values, RESAMPLES, SEED)
    apart = found.systems[1].difference
    assert apart is not None
    return [
        {
            "data": folder.name, "metric": metric, "seeds": len(runs) // len(MODELS),
            "attention": 100 * found.means[0, at], "readout": 100 * found.means[1, at],
            "difference": 100 * apart.mean[at], "low": 100 * apart.low[at], "high": 100 * apart.high[at],
        }
        for at, metric in enumerate(found.metrics)
    ]  # fmt: skip


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"give folders of comparisons:\n\n{__doc__}")
    found = [line for folder in sys.argv[1:] for line in lines(Path(folder))]
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in line.items()} for line in found)
    print(f"{len(found)} lines in {CSV.name}")


if __name__ == "__main__":
    main()
