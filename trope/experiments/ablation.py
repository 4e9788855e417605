"""The rows of the ablation: the paper's eight (its Table 3), our own, and those of the readout.

Each row is a preset with settings. The paper's rows and our own remove parts of T-RoPE in attention. The readout is off
in them, because it would make up for a part that is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trope.experiments.pool import Variant
from trope.experiments.variants import NAMED
from trope.settings import preset

FULL = "full"
_ATTENTION = NAMED["hstu-trope-attention"].settings
# Rows 2 to 4 each remove one part more; a part is a switch of RotaryConfig.
_STATIONARY = ("rotary.conjugate=false",)
_UNSHIFTED = (*_STATIONARY, "rotary.shifted=false")
_ONE_SCALE = (*_UNSHIFTED, "rotary.multiscale=false")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    label: the paper's. table: paper, ours or readout. variant: how to train it; its name is that of the run folder.
    """

    label: str
    table: str
    variant: Variant


def _row(table: str, name: str, label: str, *settings: str, model: str = "hstu-trope") -> Row:
    if model == "hstu-trope" and table != "readout":
        settings = (*_ATTENTION, *settings)
    return Row(label, table, Variant(name, model, settings))


ROWS = (
    _row("paper", FULL, "T-RoPE"),
    _row("paper", "minus-nonstationary", "- Non-Stationary", *_STATIONARY),
    _row("paper", "minus-shifted", "- shifted", *_UNSHIFTED),
    _row("paper", "minus-multiscale", "- multiscale freq. bank", *_ONE_SCALE),
    _row("paper", "minus-time", "- abs. time embedding (HSTU + Time RAB)", model="hstu-time"),
    _row("paper", "no-shifted-query", "- Shifted Query RoPE", "rotary.shifted=false"),
    _row("paper", "no-key", "- Key RoPE", "rotary.rotate_key=false"),
    _row("paper", "no-time-rab", "- Time RAB", "model.time_bias=false"),
    _row("ours", "fp32", "fp32 phases", "rotary.phase=fp32"),
    _row("ours", "paper-conditioning", "paper's coefficients", "rotary.conditioning=paper"),
    _row("ours", "no-floor", "no floor in the gate", "model.gate_floor=none"),
    _row("ours", "time-floor", "HSTU + Time RAB with the floor", "model.gate_floor=auto", model="hstu-time"),
    Row("paper's recipe (all three)", "ours", replace(NAMED["hstu-trope-paper"], name="printed")),
    _row("ours", "shared", "shared coefficients", "rotary.share_alpha=true"),
    _row("ours", "shared-stationary", "shared, stationary", "rotary.share_alpha=true", "rotary.conjugate=false"),
    _row("ours", "frozen", "frozen frequencies", "rotary.learnable=false"),
    _row("ours", "one-scale", "- multiscale freq. bank alone", "rotary.multiscale=false"),
    _row("ours", "calendar", "calendar bank", "rotary.bank=calendar"),
    _row("ours", "no-query", "- Query RoPE", "rotary.rotate_query=false"),
    _row("ours", "torope", "TO-RoPE", model="hstu-torope"),
    _row("ours", "torope-floor", "TO-RoPE with the floor", "model.gate_floor=auto", model="hstu-torope"),
    _row("ours", "torope-no-time-rab", "TO-RoPE - Time RAB", "model.time_bias=false", model="hstu-torope"),
    _row(
        "ours", "torope-no-rab", "TO-RoPE - all RAB", "model.time_bias=false", "model.position_bias=false",
        model="hstu-torope",
    ),
    _row("readout", "default", "+ readout (hstu-trope, the default)"),
    _row("readout", "readout-alone", "readout, no rotation in attention", "rotary.readout=auto", model="hstu-time"),
    _row("readout", "readout-no-time", "the same - Time RAB", "rotary.readout=auto", model="hstu"),
    _row("readout", "readout-no-key", "+ readout - Key RoPE", "rotary.rotate_key=false"),
    _row("readout", "readout-eighth", "+ readout of an eighth of the planes", "rotary.readout=0.125"),
    _row("readout", "readout-half", "+ readout of half of the planes", "rotary.readout=0.5"),
)  # fmt: skip

NOTES = {
    "paper": (
        "Rows 2 to 5 each remove one part more, down to HSTU + Time RAB. Rows 6 to 8 each remove one part from the "
        "full model. Row 2 is the same family of functions as row 1: with independent coefficients the non-stationary "
        'key only changes the sign of alpha_k. The row "shared coefficients" measures the non-stationary key. In row 6 '
        "the query uses the time of its own event; the paper's words also allow a query that is not rotated, which is "
        'the row "- Query RoPE".'
    ),
    "ours": (
        "Each row changes one thing of the full model. The paper has fp32 phases, its own coefficients and no floor. "
        "Shared: query and key have the same coefficients, as Theorems 1 and 2 assume; stationary: and the key is not "
        "conjugated. Frozen: frequencies stay as drawn. Multiscale alone: one time constant, with the shifted query "
        "that row 4 has not. Calendar bank: half of the planes know only gaps, half turn with day, week and year. "
        "TO-RoPE has time and position RAB, position RAB alone, or none."
    ),
    "readout": (
        "The readout rotates some planes of the output by the request time, before the output is compared with the "
        "items. The rows have it together with T-RoPE in attention, which is our default, and without."
    ),
}


def select(only: str | None) -> list[Row]:
    """All rows, or those of tables (paper, ours, readout) or names; the full model, the reference, is always first."""
    if only is None:
        return list(ROWS)
    asked = {name.strip() for name in only.split(",")}
    names, tables = [row.variant.name for row in ROWS], list(NOTES)
    if unknown := sorted(asked.difference(names, tables)):
        raise ValueError(f"no such row: {', '.join(unknown)}; there are {', '.join([*tables, *names])}")
    chosen = [row for row in ROWS if row.variant.name in asked | {FULL} or row.table in asked]
    if len(chosen) < 2:
        raise ValueError(f"an ablation needs a row besides {FULL}, got --only {only}")
    return chosen


def variants(rows: Sequence[Row], common: Sequence[str]) -> list[Variant]:
    """The variants to train; common: settings of all, which are checked here."""
    found = [Variant(row.variant.name, row.variant.model, (*common, *row.variant.settings)) for row in rows]
    for variant in found:
        preset(variant.model, variant.settings)
    return found
