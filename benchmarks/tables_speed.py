"""The tables of docs/speed.md and of the README's speed, from what `trope bench` measured or counts; `tables.py` writes
them."""

from __future__ import annotations

from table_parts import markdown, rows

from trope.bench.cost import TOTALS, numbers
from trope.bench.shapes import find_shape
from trope.config import PRESETS
from trope.models.cost import Part, model_cost, total


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
    return _measured_on(data[0], "bf16") + markdown(header, lines)


def _measured_on(row: dict[str, str], *more: str) -> str:
    return f"{', '.join((row['device'], 'torch ' + row['torch'], *more))}; commit {row['commit'][:7]}.\n\n"


def train_rows(**wanted: str) -> list[dict[str, str]]:
    """Rows of the training benchmark."""
    return [r for r in rows("train-h200.csv") if all(r[key] == value for key, value in wanted.items())]


def steps(shape: str, model: str, lengths: str = "full") -> dict[str, str]:
    """The row of a fused step."""
    (row,) = train_rows(shape=shape, model=model, version="fused", lengths=lengths)
    return row


def training() -> str:
    """Steps per second, full histories: fused, and what one writes first."""
    eager = {r["shape"]: float(r["it_per_s"]) for r in train_rows(version="eager", model="hstu-trope")}
    lines = []
    for r in train_rows(version="fused", model="hstu-trope", lengths="full"):
        speed = float(r["it_per_s"])
        times = f"{speed / eager[r['shape']]:.0f} x" if r["shape"] in eager else ""
        plain = f"{eager[r['shape']]:.1f}" if r["shape"] in eager else ""
        lines.append(
            [r["shape"], f"{speed:.0f}" if speed > 20 else f"{speed:.1f}", plain, times,
             f"{float(r['tokens_per_s']):,.0f}", f"{float(r['peak_GiB']):.1f}",
             f"{float(r['fraction_of_roofline']):.0%}"]
        )  # fmt: skip
    header = ["shape", "fused it/s", "eager it/s", "faster", "tokens/s", "peak GiB", "of roofline"]
    return f"{_machine(rows('train-h200.csv'))}\n\n" + markdown(header, lines)


MODELS = ("hstu", "hstu-time", "hstu-torope", "hstu-trope-attention", "hstu-trope", "transformer", "transformer-trope")


def training_slower() -> str:
    """By how many percent the slowest of `hstu-trope`'s fused steps takes longer than at the commit before."""

    def found(name: str) -> dict[tuple[str, str], float]:
        ours = (r for r in rows(name) if (r["model"], r["version"]) == ("hstu-trope", "fused"))
        return {(r["shape"], r["lengths"]): float(r["it_per_s"]) for r in ours}

    before, now = found("train-h200-before.csv"), found("train-h200.csv")
    assert before.keys() == now.keys()
    return f"{100 * (1 - min(now[key] / before[key] for key in now)):.0f}"


def training_models() -> str:
    """Steps per second of the models, what T-RoPE costs over hstu-time, and the readout over T-RoPE in attention."""
    lines = []
    for shape, lengths in dict.fromkeys((r["shape"], r["lengths"]) for r in train_rows(version="fused")):
        found = train_rows(shape=shape, lengths=lengths, version="fused")
        time = {r["model"]: float(r["p50_ms"]) for r in found}
        if "hstu-time" not in time:
            continue
        speeds = (f"{1e3 / time[model]:.0f}" if model in time else "" for model in MODELS)
        costs = [_cost(time, "hstu-trope-attention", "hstu-time"), _cost(time, "hstu-trope", "hstu-trope-attention")]
        lines.append([f"{shape}, {lengths}", *speeds, *costs])
    return markdown(["it/s", *MODELS, "T-RoPE's cost", "the readout's"], lines)


def _cost(time: dict[str, float], ours: str, theirs: str) -> str:
    return f"{time[ours] / time[theirs] - 1:.1%}" if ours in time and theirs in time else ""


def training_roofline() -> str:
    """The terms of the roofline estimate beside the step's time, in milliseconds."""
    keys = ("table_ms", "candidates_ms", "matmul_ms", "attention_ms", "roofline_ms", "p50_ms")
    header = ["ms", "table", "candidates", "matmul", "attention", "sum", "measured"]
    found = train_rows(version="fused", model="hstu-trope", lengths="full")
    return markdown(header, [[r["shape"], *(f"{float(r[key]):.2f}" for key in keys)] for r in found])


def evaluation() -> str:
    """Full-catalogue evaluation of every user."""
    data, lines = rows("eval-h200.csv"), []
    for r in data:
        on = "all" if r["measured_users"] == r["U"] else f"{int(r['measured_users']):,}, scaled up"
        version = {"kernel": "fused", "plain": "score tiles"}[r["version"]]
        seconds = [f"{float(r[key]):.1f}" for key in ("encode_s", "rank_s", "total_s")]
        lines.append([f"{r['name']}, {version}, {r['precision']}", on, *seconds, f"{float(r['users_per_s']):,.0f}"])
    return _measured_on(data[0]) + markdown(["", "measured users", "encode s", "rank s", "total s", "users/s"], lines)


def _parts(model: str) -> list[Part]:
    """What each part of a model costs at the paper's shape."""
    shape = find_shape("pixel1m")
    return model_cost(shape.config(model), shape.items, shape.batch, shape.max_len)


def cost() -> str:
    """What each part of `trope` costs, and what the parts add up to."""
    parts = _parts("trope")
    lines = [
        *([part.name + (f" ({part.stage})" if part.stage != "network" else ""), *numbers(part)] for part in parts),
        *([f"**{name}**", *numbers(total(parts, *stages))] for name, stages in TOTALS.items()),
    ]
    return markdown(["part", "parameters", "held", "products, MFLOP", "other, MFLOP"], lines)


def cost_models() -> str:
    """What the forward of each model costs, and T-RoPE's share of its FLOPs."""
    models = ("hstu-time", "hstu-torope", "hstu-trope-attention", "hstu-trope", "trope", "sasrec", "sasrec-trope",
              "tisasrec", "transformer", "transformer-trope")  # fmt: skip
    lines = []
    for model in models:
        parts = _parts(model)
        forward, turning = total(parts, "network"), [p for p in parts if p.name in ("rotary encoding", "readout")]
        flops, added = forward.products + forward.other, total(turning)
        network = forward.parameters - next(p.parameters for p in parts if p.name == "item table")
        lines.append(
            [model, f"{network:,}", f"{added.parameters:,}", f"{flops / 1e9:.2f}", f"{added.other / 1e6:.1f}",
             f"{added.other / flops:.2%}"]
        )  # fmt: skip
    header = ["model", "parameters without the item table", "of the rotation", "GFLOP of a forward",
              "MFLOP of the rotation", "share"]  # fmt: skip
    return markdown(header, lines)


def parity() -> str:
    """Losses of 200 steps: fused path and plain PyTorch against float32 on the CPU."""
    header = ["model", "loss", "fused fp32", "fused bf16", "plain bf16", "mean fused bf16", "mean plain bf16"]
    keys = ("largest_fp32", "largest_bf16", "largest_plain_bf16", "mean_bf16", "mean_plain_bf16")
    order = [*PRESETS, "hstu-trope, row", "hstu-trope, CUDA C++"]
    found = sorted(rows("parity-h200.csv"), key=lambda r: order.index(r["model"]))
    return _measured_on(found[0]) + markdown(
        header, [[r["model"], f"{r['first_loss']} to {r['last_loss']}", *(r[k] for k in keys)] for r in found]
    )


def _machine(found: list[dict[str, str]]) -> str:
    """Where and at which commit all rows were measured."""
    row, commits = found[0], dict.fromkeys(r["commit"][:7] for r in found)
    return (
        f"{row['device']}, torch {row['torch']}, bf16; copy {int(row['copy_GB_per_s']):,} GB/s, "
        f"matmul {row['matmul_TFLOP_per_s']} TFLOP/s; commit {', '.join(commits)}."
    )


SPEED = {
    "kernels": kernels,
    "training": training,
    "training-models": training_models,
    "training-roofline": training_roofline,
    "evaluation": evaluation,
    "cost": cost,
    "cost-models": cost_models,
    "parity": parity,
}
"""By their names in the pages."""
