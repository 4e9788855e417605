"""The tables of docs/speed.md and of the README's speed, from what `trope bench` measured or counts; `tables.py` writes
them."""

from __future__ import annotations

from table_parts import markdown, rows

from trope.bench.cost import TOTALS, numbers
from trope.bench.shapes import find_shape
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
    return f"{data[0]['device']}, torch {data[0]['torch']}, bf16.\n\n" + markdown(header, lines)


def train_rows(**wanted: str) -> list[dict[str, str]]:
    """Rows of the training benchmark; of two measurements of the same, the newer, which is the first."""
    found = [r for r in rows("train-h200.csv") if all(r[key] == value for key, value in wanted.items())]
    newest = {(r["shape"], r["model"], r["version"], r["lengths"]): r for r in reversed(found)}
    return [r for r in found if any(r is each for each in newest.values())]


def measured_steps(version: str) -> list[dict[str, str]]:
    """T-RoPE's steps with full histories, one row a shape: the default's, or where it was not measured without its
    readout."""
    found = [
        *train_rows(version=version, model="hstu-trope", lengths="full"),
        *train_rows(version=version, model="hstu-trope-attention", lengths="full"),
    ]
    return list({r["shape"]: r for r in reversed(found)}.values())[::-1]


def training() -> str:
    """Steps per second, full histories: fused, and what one writes first."""
    eager = {r["shape"]: float(r["it_per_s"]) for r in measured_steps("eager")}
    lines = []
    for r in measured_steps("fused"):
        speed = float(r["it_per_s"])
        times = f"{speed / eager[r['shape']]:.0f} x" if r["shape"] in eager else ""
        plain = f"{eager[r['shape']]:.1f}" if r["shape"] in eager else ""
        lines.append(
            [r["shape"], r["model"], f"{speed:.0f}" if speed > 20 else f"{speed:.1f}", plain, times,
             f"{float(r['tokens_per_s']):,.0f}", f"{float(r['peak_GiB']):.1f}",
             f"{float(r['fraction_of_roofline']):.0%}"]
        )  # fmt: skip
    header = ["shape", "model", "fused it/s", "eager it/s", "faster", "tokens/s", "peak GiB", "of roofline"]
    return f"{_machine(rows('train-h200.csv')[0])}\n\n" + markdown(header, lines)


def training_models() -> str:
    """Steps per second of the HSTU models, and what T-RoPE costs over hstu-time in the same measurement."""
    models, lines = ("hstu", "hstu-time", "hstu-torope", "hstu-trope-attention", "hstu-trope"), []
    for shape in ("pixel1m", "ml20m", "shop"):
        for lengths in ("full", "own"):
            wanted = (shape, lengths, "fused")
            found = [r for r in rows("train-h200.csv") if (r["shape"], r["lengths"], r["version"]) == wanted]
            for commit in dict.fromkeys(r["commit"] for r in found):
                time = {r["model"]: float(r["p50_ms"]) for r in found if r["commit"] == commit}
                speeds = (f"{1e3 / time[m]:.0f}" if m in time else "" for m in models)
                costs = (_cost(time[m], time["hstu-time"]) if m in time else "" for m in models[3:])
                lines.append([f"{shape}, {lengths}", *speeds, *costs, commit[:7]])
    return markdown(["it/s", *models, "T-RoPE's cost", "with its readout", "commit"], lines)


def readout_kernel() -> str:
    """What the readout by time costs with its kernel, and without it; each over hstu-time of its own measurement."""
    files = {"plain PyTorch": "train-h200-plain-readout.csv", "fused": "train-h200.csv"}
    lines = []
    for shape in ("pixel1m", "ml20m"):
        cells = []
        for file in files.values():
            found = [r for r in rows(file) if (r["shape"], r["lengths"], r["version"]) == (shape, "full", "fused")]
            time = {r["model"]: float(r["p50_ms"]) for r in found if r["commit"] == found[0]["commit"]}
            cells += [f"{time['hstu-trope']:.3f}", _cost(time["hstu-trope"], time["hstu-time"])]
        lines.append([shape, *cells])
    return markdown(["hstu-trope, ms", *(each for name in files for each in (name, "over hstu-time"))], lines)


def _cost(ours: float, theirs: float) -> str:
    return f"{ours / theirs - 1:.1%}"


def training_roofline() -> str:
    """The terms of the roofline estimate beside the step's time, in milliseconds."""
    keys = ("table_ms", "candidates_ms", "matmul_ms", "attention_ms", "roofline_ms", "p50_ms")
    header = ["ms", "table", "candidates", "matmul", "attention", "sum", "measured"]
    return markdown(header, [[r["shape"], *(f"{float(r[key]):.2f}" for key in keys)] for r in measured_steps("fused")])


def evaluation() -> str:
    """Full-catalogue evaluation of every user."""
    lines = []
    for r in rows("eval-h200.csv"):
        on = "all" if r["measured_users"] == r["U"] else f"{int(r['measured_users']):,}, scaled up"
        version = {"kernel": "fused", "plain": "score tiles"}[r["version"]]
        seconds = [f"{float(r[key]):.1f}" for key in ("encode_s", "rank_s", "total_s")]
        lines.append([f"{r['name']}, {version}, {r['precision']}", on, *seconds, f"{float(r['users_per_s']):,.0f}"])
    return markdown(["", "measured users", "encode s", "rank s", "total s", "users/s"], lines)


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
    found = rows("parity-h200.csv")
    return markdown(
        header, [[r["model"], f"{r['first_loss']} to {r['last_loss']}", *(r[k] for k in keys)] for r in found]
    )


def _machine(row: dict[str, str]) -> str:
    return (
        f"{row['device']}, torch {row['torch']}, bf16; copy {int(row['copy_GB_per_s']):,} GB/s, "
        f"matmul {row['matmul_TFLOP_per_s']} TFLOP/s."
    )


SPEED = {
    "kernels": kernels,
    "training": training,
    "training-models": training_models,
    "training-roofline": training_roofline,
    "readout-kernel": readout_kernel,
    "evaluation": evaluation,
    "cost": cost,
    "cost-models": cost_models,
    "parity": parity,
}
"""By their names in the pages."""
