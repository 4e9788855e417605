"""What the pages' tables are made of: files under results/, and Markdown."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / name).read_text())
    return found


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table with aligned columns; all but the first column are numbers."""
    table = [header, *lines]
    widths = [max(3, *(len(line[i]) for line in table)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in table
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
