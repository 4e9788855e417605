"""The tables of docs/scale.md: the estimates of `trope.bench.scale` over measured steps, and what benchmarks/ranks.py
and others measured; `tables.py` writes them."""

from __future__ import annotations

import json
from typing import Any

from table_parts import ROOT, markdown
from tables_speed import train_rows

from trope.bench.scale import GIB, Measured, estimate, pulse_bytes
from trope.bench.shapes import find_shape

EVENTS = 6_000_000_000  # of the paper's industrial set
GPUS = (1, 8, 64, 256, 1024)


def scale(shared: bool) -> str:
    """The shop's shape on many GPUs."""
    (row,) = train_rows(version="fused", model="hstu-trope", lengths="full", shape="shop", table_state="row")
    measured = Measured(
        float(row["p50_ms"]), float(row["table_ms"]), float(row["peak_GiB"]), int(row["tokens"])
    )  # fmt: skip
    shape = find_shape("shop")
    config = shape.config("hstu-trope", f"train.shared_negatives={str(shared).lower()}")
    lines = []
    for gpus in GPUS:
        found = estimate(config, shape.items, gpus, measured)
        hours = EVENTS / found.tokens_per_s / 3600
        lines.append(
            [f"{gpus:,}", f"{found.table_GiB:.2f}", f"{found.rows_GiB:.2f}", f"{found.memory_GiB:.1f}",
             f"{found.sent_GiB:.2f}", f"{found.exchange_ms:.1f}", f"{found.reduce_ms:.1f}", f"{found.step_ms:.1f}",
             f"{found.tokens_per_s / 1e6:,.1f}", f"{3600 * hours:,.0f}"]
        )  # fmt: skip
    header = ["GPUs", "table GiB", "batch rows GiB", "all GiB", "sent GiB", "exchange ms", "all-reduce ms", "step ms",
              "M tokens/s", "seconds an epoch"]  # fmt: skip
    return markdown(header, lines)


def ranks() -> str:
    """Several processes against one, on a CPU."""
    found = json.loads((ROOT / "results" / "ranks-cpu.json").read_text())
    lines = [
        [row["model"] + row["silu_for_relu"] * ", SiLU for ReLU", ", ".join(row["settings"]) or "defaults",
         str(row["ranks"]), str(row["steps"]),
         *(f"{row[f'{what}_difference{dtype}']:.1e}" for dtype in ("", "_float64") for what in ("loss", "table")),
         f"{row['ranks_that_differ']} of {row['positives']}",
         f"{row['ranks_that_differ_with_equal_weights']} of {row['positives']}"]
        for row in found["curves"]
    ]  # fmt: skip
    header = [
        "model", "settings", "processes", "steps", "losses, float32", "table, float32", "losses, float64",
        "table, float64", "ranks that differ", "with equal weights",
    ]  # fmt: skip
    return markdown(header, lines)


def ranks_parts() -> str:
    """Several processes against one, with `train.parts`."""
    found = json.loads((ROOT / "results" / "ranks-cpu.json").read_text())["parts"]
    lines = [
        [row["model"], ", ".join(row["settings"]), str(row["ranks"]), str(row["steps"]),
         *(f"{row[f'{what}_difference']:g}" for what in ("loss", "table")), "yes" if row["same_bits"] else "no",
         f"{row['ranks_that_differ']} of {row['positives']}"]
        for row in found
    ]  # fmt: skip
    header = ["model", "settings", "processes", "steps", "losses", "table", "same bits", "ranks that differ"]
    return markdown(header, lines)


def ranks_killed(key: str) -> str:
    """Runs of which one process was killed, against an undisturbed one."""
    found = json.loads((ROOT / "results" / "ranks-cpu.json").read_text())[key]
    names = {
        "restarted_by_torchrun": "restarted by torchrun on 4", "resumed_on_4": "resumed on 4",
        "resumed_on_2": "resumed on 2", "resumed_on_1": "resumed on 1",
    }  # fmt: skip
    lines = [
        [names[kind], *(f"{row[what]:.1e}" if row[what] else "0" for what in
                        ("epoch_loss_difference", "difference_of_all_weights")),
         "yes" if row["same_test_metrics"] else "no"]
        for kind, row in found.items()
    ]  # fmt: skip
    header = [
        "one of 4 processes was killed",
        "largest difference of an epoch's loss",
        "of a weight",
        "same test metrics",
    ]
    return markdown(header, lines)


def lost_machines() -> str:
    """Trainings on four machines of which some were lost, against one process."""
    found = json.loads((ROOT / "results" / "lost-machines.json").read_text())["rows"]
    lines = [
        [row["case"], f"`{row['nodes']}`", str(row["parts"]), f"{row['seconds_to_go_on']:,.0f}",
         *(f"{row[what]:.1e}" if row[what] else "0" for what in
           ("epoch_loss_difference", "difference_of_all_weights")),
         "yes" if row["same_test_metrics"] else "no"]
        for row in found
    ]  # fmt: skip
    header = ["of four machines", "`--nnodes`", "`train.parts`", "seconds until two more epochs", "losses", "weights",
              "same test metrics"]  # fmt: skip
    return markdown(header, lines)


def prepared() -> str:
    """Generated logs prepared as shards under a limit on memory."""
    lines = []
    for name in ("prepare-158m-sharded", "prepare-1b"):
        found = json.loads((ROOT / "results" / f"{name}.json").read_text())
        lines.append(
            [f"{found['rows'] / 1e6:,.0f}", f"{found['kept']['users'] / 1e6:,.1f}", str(found["shards"]),
             f"{found['wall_s'] / 60:.1f}", f"{found['cpu_s'] / 60:.1f}", f"{found['limit_gib']:g}",
             f"{found['peak_resident_gib']:.2f}", f"{found['most_disk_bytes'] / 1e9:.0f}",
             f"{found['load_before']:.1f}", found["environment"]["commit"][:7]]
        )  # fmt: skip
    header = ["M events", "M users", "shards", "minutes", "CPU minutes", "limit GiB", "peak GiB", "disk GB, at most",
              "load before", "commit"]  # fmt: skip
    return markdown(header, lines)


SCALE = {
    "scale-own": lambda: scale(False),
    "scale-shared": lambda: scale(True),
    "ranks": ranks,
    "ranks-parts": ranks_parts,
    "ranks-killed": lambda: ranks_killed("killed"),
    "ranks-killed-parts": lambda: ranks_killed("killed_parts"),
    "lost-machines": lost_machines,
    "prepared": prepared,
}


def furthest(*columns: str, smooth: bool = False) -> str:
    """The largest difference between several processes and one, of all trainings with ReLU or without."""
    found = json.loads((ROOT / "results" / "ranks-cpu.json").read_text())["curves"]
    return f"{max(row[column] for row in found for column in columns if row['silu_for_relu'] == smooth):.1e}"


def slower() -> str:
    """How many times longer one process takes for a step in parts, over all models."""
    found = json.loads((ROOT / "results" / "ranks-cpu.json").read_text())["parts"]
    times = [row["seconds"]["1"] / row["seconds"]["1, without parts"] for row in found]
    return f"{min(times):.1f} to {max(times):.1f}"


def looked_up() -> dict[str, Any]:
    """What benchmarks/sharded_lookup.py measured."""
    return json.loads((ROOT / "results" / "sharded-lookup-cpu.json").read_text())


SCALE_VALUES = {
    "ranks-float32": lambda: furthest("loss_difference"),
    "ranks-smooth": lambda: furthest("loss_difference", smooth=True),
    "ranks-float64": lambda: furthest("loss_difference_float64", "table_difference_float64"),
    "ranks-parts-slower": slower,
    "lookup-ours": lambda: f"{looked_up()['ours']['lookup_and_gradients_ms']:.0f}",
    "lookup-update": lambda: f"{looked_up()['ours']['adamw_of_all_rows_ms']:.0f}",
    "lookup-torchrec": lambda: f"{looked_up()['torchrec']['lookup_gradients_and_adagrad_ms']:.0f}",
    "lookup-items": lambda: f"{looked_up()['items']:,}",
    "lookup-draws": lambda: f"{looked_up()['draws']:,}",
    "scale-pulse": lambda: f"{pulse_bytes(find_shape('shop').config('trope'), find_shape('shop').items) / GIB:.2f}",
}
