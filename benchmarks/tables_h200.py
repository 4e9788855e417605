"""Numbers in the text of pages that come from single measurements on an H200: answers, looks, attention, the step."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable

from table_parts import ROOT, read


def text(name: str) -> str:
    return (ROOT / "results" / name).read_text()


def looked(row: str, column: int, form: str) -> str:
    """A column of results/look-h200.txt, from 0; row: what it begins with."""
    line = next(line for line in text("look-h200.txt").splitlines() if line.startswith(f"| {row} |"))
    return format(float(line.strip("| ").split(" | ")[column]), form)


def batched_times() -> float:
    """How many times faster remember and look are than one batch of encodes, results/look-h200.txt."""
    found = re.search(r"against batched encode_last: ([\d.]+) times", text("look-h200.txt"))
    assert found is not None
    return float(found[1])


def steps(line: str) -> float:
    """Steps a second of a line of results/aside-h200.txt, by its beginning."""
    found = re.findall(rf"^{re.escape(line)}: ([\d.]+) it/s", text("aside-h200.txt"), re.M)
    assert len(found) == 1, line
    return float(found[0])


def latest(line: str) -> float:
    """The last of several measurements of one kind, in the order of commits."""
    return float(re.findall(rf"^{re.escape(line)} .*?: ([\d.]+) it/s", text("aside-h200.txt"), re.M)[-1])


def largest(column: str, form: str) -> str:
    """A column of the one row of results/train-100m-h200.csv."""
    (row,) = csv.DictReader(text("train-100m-h200.csv").splitlines())
    return format(float(row[column]), form)


def kernels(heading: str, line: str) -> dict[str, float]:
    """Microseconds by kernel, from results/attention-h200.txt."""
    part = text("attention-h200.txt").split(f"== {heading}\n")[1].split("\n== ")[0]
    found = next(each for each in part.splitlines() if each.startswith(line)).split(";")[1].split("|")[0]
    return {name: float(us) for name, us in re.findall(r"(\w+) (\d+)", found)}


def block(heading: str, forward: str | None = None) -> str:
    """Milliseconds of a block's attention with kept score gradients; forward: the line whose forward pass is meant."""
    found = kernels(heading, "kept")
    if forward is not None:
        found["forward"] = kernels(heading, forward)["forward"]
    return f"{sum(us for name, us in found.items() if name not in ('runs', 'bucket')) / 1e3:.2f}"


TWO_HEADS, ONE_HEAD = "stages 2 forward 64", "stages 3 forward 32"
TROPE, ALONE = "pixel1m hstu-trope sort+table", "pixel1m hstu-trope-attention fused full"
H200_VALUES: dict[str, Callable[[], str]] = {
    "answers-rate": lambda: f"{read('answers-h200.json')['answers_per_second']:,.0f}",
    "look-ms": lambda: looked("remember + look", 1, ".1f"),
    "look-times": lambda: looked("remember + look", 2, ".0f"),
    "look-batched": lambda: f"{batched_times():.0f}",
    "look-encode-ms": lambda: looked("one encode_last", 1, ".1f"),
    "look-append-ms": lambda: looked("append", 1, ".1f"),
    "look-append-many": lambda: looked("append to 16 histories, each", 2, ".0f"),
    "largest-rate": lambda: largest("it_per_s", ".1f"),
    "largest-gib": lambda: largest("peak_GiB", ".0f"),
    "largest-share": lambda: largest("fraction_of_roofline", ".0%").rstrip("%"),
    "aside-time": lambda: f"{steps('pixel1m hstu-time fused full'):.0f}",
    "aside-trope": lambda: f"{steps(TROPE):.0f}",
    "aside-transformer": lambda: f"{latest('pixel1m transformer-trope'):.0f}",
    "aside-readout": lambda: f"{100 * (steps(ALONE) / steps(TROPE) - 1):.1f}",
    "attention-shop": lambda: block("128 512", TWO_HEADS),
    "attention-shop-before": lambda: block("128 512", ONE_HEAD),
    "attention-long": lambda: block("16 4096"),
}
