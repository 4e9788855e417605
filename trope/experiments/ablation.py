"""The rows of the ablation: the paper's eight (its Table 3), ours, and those of the readout by time.

Each is a preset with settings and nothing else. The paper's rows and ours take T-RoPE in attention apart, so the
readout is off in them: it would make up for what is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trope.experiments.pool import Variant
from trope.experiments.variants import NAMED
from trope.settings import preset

FULL = "full"
_ATTENTION = NAMED["hstu-trope-attention"].settings
# Rows 2 to 5 remove one part more each; a part is a switch of RotaryConfig.
_STATIONARY = ("rotary.conjugate=false",)
_UNSHIFTED = (*_STATIONARY, "rotary.shifted=false")
_ONE_SCALE = (*_UNSHIFTED, "rotary.multiscale=false")


@dataclass(frozen=True)
class Row:
    """A line of the table.

    label: as the paper has it. table: paper, ours or readout. variant: how to train it; its name is the run folder's.
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
    _row("readout", "readout-alone", "readout, nothing turns in attention", "rotary.readout=auto", model="hstu-time"),
    _row("readout", "readout-no-time", "the same - Time RAB", "rotary.readout=auto", model="hstu"),
    _row("readout", "readout-no-key", "+ readout - Key RoPE", "rotary.rotate_key=false"),
    _row("readout", "readout-eighth", "+ readout of an eighth of the planes", "rotary.readout=0.125"),
    _row("readout", "readout-half", "+ readout of half of the planes", "rotary.readout=0.5"),
)  # fmt: skip

NOTES = {
    "paper": (
        "Rows 2 to 5 remove one part more each, down to HSTU + Time RAB; rows 6 to 8 remove one part from the full "
        "model. With independent coefficients the non-stationary key is a sign of alpha_k, so row 2 is the same family "
        'of functions as row 1; "shared" (of ours) shows what it is worth. Row 6: the query looks from its own '
        "event's time; the paper's words also allow that the query is not rotated at all, which is "
        '"- Query RoPE" (of ours).'
    ),
    "ours": (
        "One change each from the full model. fp32, paper's coefficients and no floor are what the paper prints; "
        "shared: one coefficient for query and key, as Theorems 1 and 2 assume, and stationary without the conjugate; "
        "frozen: frequencies stay as drawn; multiscale alone: one time constant, with the shift that row 4 has lost; "
        "calendar bank: half the planes stationary, half absolute on harmonics of day, week, year; TO-RoPE with time "
        "and position RAB, with position RAB, and with none."
    ),
    "readout": (
        "Some planes of the output turn with the moment it speaks for before it is compared with the items: on top of "
        "T-RoPE in attention, which is our default, and without it."
    ),
}


def select(only: str | None) -> list[Row]:
    """All rows, those of tables (paper, ours, readout), or some by name; always with the full model, the reference."""
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
    """What to train, with the settings that all share; wrong ones are refused here."""
    found = [Variant(row.variant.name, row.variant.model, (*common, *row.variant.settings)) for row in rows]
    for variant in found:
        preset(variant.model, variant.settings)
    return found
