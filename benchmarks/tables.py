"""Every table of numbers in README and docs is written from a file under results/, by this command:

    python benchmarks/tables.py           # rewrite the tables in place
    python benchmarks/tables.py --check   # exit 1 if a table does not say what its file says (tests do this)

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a single number between `<!-- value: NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/method.md", "docs/results.md")
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (?P<name>[\w-]+) -->).*?(<!-- end -->)")


def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table with aligned columns; all but the first column are numbers."""
    table = [header, *lines]
    widths = [max(3, *(len(line[i]) for line in table)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in table
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def kernels() -> str:
    """The operator's forward + backward on the benchmark's shapes, interleaved."""
    data = [
        r for r in rows("kernels-h200.csv") if r["layout"] == "interleaved" and r["direction"] == "forward+backward"
    ]
    time = {(r["name"], r["version"]): float(r["p50_us"]) for r in data}
    lines = [
        [
            f"{r['B']} x {r['L']} x {r['H']} x {r['D']}",
            f"{time[r['name'], 'reference']:.0f}",
            f"{time[r['name'], 'reference compiled']:.0f}",
            f"{time[r['name'], 'triton']:.0f}",
            f"{float(r['fraction_of_copy']):.0%}",
            f"{time[r['name'], 'TRoPE module compiled']:.0f}",
        ]
        for r in data
        if r["version"] == "triton"
    ]
    header = ["B x L x H x D", "eager us", "compiled us", "fused us", "of copy bandwidth", "whole module us"]
    return f"{data[0]['device']}, torch {data[0]['torch']}, bf16.\n\n" + markdown(header, lines)


def phases() -> str:
    """Phase errors and step sizes by time constant."""
    header = ["beta, s", "FP32 error, mean", "FP32 error, max", "exact error, max", "step, paper", "step, span"]
    keys = ("beta", "fp32_mean_error", "fp32_max_error", "exact_max_error", "paper_step", "span_step")
    return markdown(header, [[r[k] for k in keys] for r in rows("phases.csv")])


def comparison(name: str, metrics: tuple[str, ...] = ("HR@10", "NDCG@10", "HR@50", "MRR")) -> str:
    """What `trope compare --json` wrote: means in percent, and the first metric's difference from the first system."""
    found = json.loads((ROOT / "results" / f"{name}.json").read_text())
    lines = []
    for system, values in found["systems"].items():
        apart = values.get("minus_first", {}).get(metrics[0])
        shown = f"{100 * apart['mean']:+.2f} ({100 * apart['low']:+.2f} .. {100 * apart['high']:+.2f})" if apart else ""
        lines.append([system, *(f"{100 * values[metric]['mean']:.2f}" for metric in metrics), shown])
    header = [f"{found['users']:,} users", *metrics, f"{metrics[0]} minus {found['reference']}"]
    return markdown(header, lines)


def prepared(key: str) -> float:
    return float(json.loads((ROOT / "results" / "prepare-158m.json").read_text())[key])


TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "phases": phases,
    "ml-1m": lambda: comparison("ml-1m"),
    "shop-season": lambda: comparison("shop-season"),
    "shop-none": lambda: comparison("shop-none"),
}
VALUES: dict[str, Callable[[], str]] = {
    "prepare-minutes": lambda: f"{prepared('wall_s') / 60:.1f}",
    "prepare-memory": lambda: f"{prepared('peak_memory_gib'):.1f}",
}


def written(text: str) -> str:
    """A page's text with every table and number made anew."""
    text = TABLE.sub(lambda m: f"{m[1]}{TABLES[m['name']]()}\n{m[3]}", text)
    return VALUE.sub(lambda m: f"{m[1]}{VALUES[m['name']]()}{m[3]}", text)


def main() -> None:
    stale = [page for page in PAGES if written((ROOT / page).read_text()) != (ROOT / page).read_text()]
    if "--check" in sys.argv:
        sys.exit(f"tables out of date in {', '.join(stale)}: run python benchmarks/tables.py" if stale else 0)
    for page in stale:
        (ROOT / page).write_text(written((ROOT / page).read_text()))


if __name__ == "__main__":
    main()
