"""The tables of docs/serving.md about exported models, from results/export-*.json; `tables.py` writes them."""

from __future__ import annotations

import json
from typing import Any

from table_parts import ROOT, markdown

SIZES = {"demo": "width 64, 1 block, 64 events", "default": "width 512, 2 blocks, 50 events"}
FORMATS = ("aoti", "onnx", "torch")
PULSE = "trope"
"""The model whose scores are not cosines."""


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of one measurement."""
    return json.loads((ROOT / "results" / f"export-{name}.json").read_text())["rows"]


def ratios(size: str, what: str, kind: str) -> dict[str, float]:
    """By model: CPU time of the eager model over that of the exported program."""
    rows = [row for row in measured("speed") if (row["size"], row["what"]) == (size, what)]
    return {row["model"]: row["ms"]["eager"] / row["ms"][kind] for row in rows}


def export_speed() -> str:
    """CPU time of one answer, by model."""
    rows = {(row["size"], row["model"]): row["ms"] for row in measured("speed") if row["what"] == "encode"}
    models = list(dict.fromkeys(model for _, model in rows))
    lines = []
    for model in models:
        cells = []
        for size in SIZES:
            ms = rows[size, model]
            cells += [
                f"{ms['eager']:.2f}",
                *(f"{ms[kind]:.2f} ({ms['eager'] / ms[kind]:.1f}x)" for kind in FORMATS[:2]),
            ]
        lines.append([model, *cells])
    names = [f"{kind}, {words.partition(',')[0]}" for words in SIZES.values() for kind in ("eager", *FORMATS[:2])]
    return markdown(["CPU time in ms", *names], lines)


def export_parity() -> str:
    """By size and format: the models whose scores are cosines, and the one with a pulse."""
    lines = []
    for size, words in SIZES.items():
        for kind in FORMATS:
            found = [row for row in measured("parity") if (row["size"], row["format"]) == (size, kind)]
            pulse = [row for row in found if row["model"] == PULSE]
            others = [row for row in found if row["model"] != PULSE]
            for name, rows in ((f"{len(others)} models", others), (PULSE, pulse)):
                if rows:
                    lines.append([f"{name} as {kind}, {words.partition(',')[0]}", *_agreement(rows)])
    header = [
        "", "users", "cosines differ by", "scores differ by", "places with another item", "scores there differ by",
        "users with another set",
    ]  # fmt: skip
    return markdown(header, lines)


def _agreement(rows: list[dict[str, Any]]) -> list[str]:
    """Sums and largest differences of some models."""
    users, places, items = (sum(row[key] for row in rows) for key in ("users", "places", "other_items"))
    sets = users - round(sum(row["same_sets"] * row["users"] for row in rows))
    cosines, scores, swaps = (f"{max(row[key] for row in rows):.1e}" for key in ("cosines", "answers", "swaps"))
    return [f"{users:,}", cosines, scores, f"{items} of {places:,}", swaps, str(sets)]


def _range(size: str, what: str, kind: str) -> str:
    """The least and the most of the models."""
    found = ratios(size, what, kind).values()
    return f"{min(found):.1f} to {max(found):.1f}"


EXPORT = {"export-speed": export_speed, "export-parity": export_parity}
EXPORT_VALUES = {
    f"export-{size}-{what}-{kind}": lambda size=size, what=what, kind=kind: _range(size, what, kind)
    for size in SIZES for what in ("encode", "remember", "look") for kind in FORMATS
}  # fmt: skip
