"""`trope bench cost`: the parameters and FLOPs of each part of a model, from its config alone (trope.models.cost)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from trope.bench.shapes import find_shape
from trope.bench.tools import keep_rows, make_console, make_table
from trope.config import Config
from trope.models.cost import Part, Stage, model_cost, total

TOTALS: dict[str, tuple[Stage, ...]] = {
    "a forward": ("network",),
    "a request: forward and all items": ("network", "request"),
    "a training step's forward": ("network", "training"),
}
"""What the parts add up to."""


@dataclass(frozen=True)
class Row:
    """One line of the CSV: a part of a model, and the shape it was counted for."""

    model: str
    items: int
    batch: int
    length: int
    part: str
    stage: str
    parameters: int
    held: int
    products: int
    other: int


def cost_table(
    configs: Mapping[str, Config],
    items: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    csv: Path | None = None,
) -> list[Row]:
    """Print what each model's parts cost; see `trope bench cost --help`.

    configs: by the name to print. items: Pixel1M's without any.
    """
    items = find_shape("pixel1m").items if items is None else items
    console, rows = make_console(110), []
    for name, config in configs.items():
        shape = (
            items,
            config.train.batch if batch is None else batch,
            config.model.max_len if length is None else length,
        )
        parts = model_cost(config, *shape)
        console.print(table(name, shape, parts))
        rows += [
            Row(name, *shape, part.name, part.stage, part.parameters, part.held, part.products, part.other)
            for part in parts
        ]
    console.print(
        "Products: matrix products, a multiply-add is 2. Other: what lies between them, an operation is 1, without\n"
        "exp, log, sin and cos. Held: fitted weights and counts, which no optimiser learns."
    )
    keep_rows(console, csv, rows, {})
    return rows


def table(name: str, shape: tuple[int, int, int], parts: list[Part]) -> Table:
    """The parts of one model for a terminal.

    shape: items, batch and length.
    """
    items, batch, length = shape
    title = f"{escape(name)}: {batch:,} histories of {length:,} events, {items:,} items"
    view = make_table(title, ["part"], ["parameters", "held", "products, MFLOP", "other, MFLOP"])
    for part in parts:
        note = f" ({part.stage})" if part.stage != "network" else ""
        view.add_row(f"{part.name}{note}", *numbers(part))
    view.add_section()
    for heading, stages in TOTALS.items():
        view.add_row(heading, *numbers(total(parts, *stages)))
    return view


def numbers(part: Part) -> list[str]:
    """Parameters, held numbers, and both kinds of FLOPs in millions; nothing for none."""
    counts = [f"{count:,}" if count else "" for count in (part.parameters, part.held)]
    return counts + [f"{flops / 1e6:,.1f}" if flops else "" for flops in (part.products, part.other)]
