"""Numbers in the text of pages that were measured on an H200: answers, looks, attention, the step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from table_parts import ROOT, read, rows
from tables_speed import steps, training_slower

NARROW = ("narrow_sheet", "narrow_forward", "narrow_keys", "narrow_queries")


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


def rate(model: str, shape: str = "pixel1m") -> float:
    """Steps a second with full histories."""
    return float(steps(shape, model)["it_per_s"])


def share(model: str) -> str:
    """Of `hstu-time`'s steps a second on pixel1m, percent."""
    return f"{100 * rate(model) / rate('hstu-time'):.0f}"


def readout(shape: str) -> str:
    """What the readout costs over T-RoPE in attention alone, percent of the step's time."""
    with_it, without = (float(steps(shape, model)["p50_ms"]) for model in ("hstu-trope", "hstu-trope-attention"))
    return f"{100 * (with_it / without - 1):.1f}"


def rotation() -> str:
    """What T-RoPE in attention costs on pixel1m, percent of the step's time."""
    with_it, without = (float(steps("pixel1m", model)["p50_ms"]) for model in ("hstu-trope-attention", "hstu-time"))
    return f"{100 * (with_it / without - 1):.1f}"


def largest(column: str, form: str) -> str:
    """Of the step with a hundred million items."""
    return format(float(steps("shop-100m", "hstu-trope")[column]), form)


def evaluated(precision: str) -> str:
    """Seconds of evaluating all users of pixel1m by the kernels."""
    (row,) = [r for r in rows("eval-h200.csv") if (r["version"], r["precision"]) == ("kernel", precision)]
    return f"{float(row['total_s']):.1f}"


def kernel_ms(what: str, *kernels: str) -> float:
    """Milliseconds of some kernels, or of all, in a step of results/profile-h200.txt."""
    part = text("profile-h200.txt").split(f"== {what}: ")[1].split("== ")[0]
    if not kernels:
        return float(part.split(" ms")[0])
    lines = [line.split(maxsplit=3) for line in part.splitlines()[1:]]
    return sum(float(us) for us, _, _, name in lines if name.strip() in kernels) / 1e3


def rotary_share(shape: str) -> str:
    """Of copy speed, percent: the forward of the fused rotation, interleaved pairs."""
    wanted = {"name": shape, "version": "triton", "direction": "forward", "layout": "interleaved"}
    (row,) = [r for r in rows("kernels-h200.csv") if all(r[key] == value for key, value in wanted.items())]
    return f"{100 * float(row['fraction_of_copy']):.0f}"


def left_ms() -> float:
    """What attention may take in a step of shop that makes 80 a second, all else as it is."""
    return 1e3 / 80 - (kernel_ms("shop:hstu-trope") - kernel_ms("shop:hstu-trope", *NARROW))


def allowed_ms() -> float:
    """What attention may take in a step of shop-long that reaches 30 % of its roofline, all else as it is."""
    row = steps("shop-long", "hstu-trope")
    return float(row["roofline_ms"]) / 0.3 - (float(row["p50_ms"]) - kernel_ms("shop-long:hstu-trope", *NARROW))


def block_ms(way: str) -> float:
    """Milliseconds of attention in a block of 16 x 4,096, without what a step needs once; the file's last such line."""
    lines = re.findall(rf"16 x 4096 x 8 x 32 {way}: total (\d+) us; (.*) \|", text("attention-h200.txt"))
    total, parts = lines[-1]
    once = re.findall(r"\b(?:runs|bucket) (\d+)", parts)
    return (int(total) - sum(map(int, once))) / 1e3


def gain(name: str, before: str, after: str) -> str:
    """How much shorter the median step is, percent; two lines of a file of step_variants.py, the first ones."""

    def median(variant: str) -> float:
        found = re.search(rf"(?m)^{re.escape(variant)}: \S+ [\d.]+ it/s p50 ([\d.]+)", text(name))
        assert found is not None, variant
        return float(found[1])

    return f"{100 * (1 - median(after) / median(before)):.0f}"


def soak(pattern: str) -> str:
    """What follows the line of the soak in results/serve_soak.txt."""
    found = re.search(rf"(?m)^soak: .*?{pattern}", text("serve_soak.txt"))
    assert found is not None
    return found[1]


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
    "shop-step": lambda: f"{kernel_ms('shop:hstu-trope'):.1f}",
    "shop-table": lambda: f"{kernel_ms('shop:hstu-trope', '_table_kernel'):.1f}",
    "shop-attention": lambda: f"{kernel_ms('shop:hstu-trope', *NARROW):.1f}",
    "shop-left": lambda: f"{left_ms():.1f}",
    "block-cuda": lambda: f"{block_ms('new'):.1f}",
    "block-triton": lambda: f"{block_ms('triton'):.1f}",
    "long-gib": lambda: f"{float(steps('shop-long', 'hstu-trope')['peak_GiB']):.1f}",
    "long-step": lambda: f"{kernel_ms('shop-long:hstu-trope'):.0f}",
    "long-attention": lambda: f"{kernel_ms('shop-long:hstu-trope', *NARROW):.1f}",
    "long-allowed": lambda: f"{allowed_ms():.0f}",
    "long-keys": lambda: f"{kernel_ms('shop-long:hstu-trope', 'narrow_keys'):.1f}",
    "long-queries": lambda: f"{kernel_ms('shop-long:hstu-trope', 'narrow_queries'):.1f}",
    "long-forward": lambda: f"{kernel_ms('shop-long:hstu-trope', 'narrow_forward'):.1f}",
    "late-gain": lambda: gain(
        "step-h200.txt", "as before: nothing late, torch moves small tensors", "late at the network's priority"
    ),
    "beside-gain": lambda: gain("aside-h200.txt", "default", "sort and table beside, small programs"),
    "soak-requests": lambda: soak(r"minutes, ([\d,]+) requests"),
    "soak-growth": lambda: soak(r"\(\+([\d.]+) %\)"),
    "eval-bf16": lambda: evaluated("bf16"),
    "eval-fp32": lambda: evaluated("fp32"),
    "step-time": lambda: f"{rate('hstu-time'):.0f}",
    "step-trope": lambda: f"{rate('hstu-trope'):.0f}",
    "step-ml20m": lambda: f"{rate('hstu-trope', 'ml20m'):.0f}",
    "step-shop": lambda: f"{rate('hstu-trope', 'shop'):.0f}",
    "step-transformer": lambda: f"{rate('transformer-trope'):.0f}",
    "share-transformer": lambda: share("transformer"),
    "share-transformer-trope": lambda: share("transformer-trope"),
    "share-long": lambda: f"{100 * float(steps('shop-long', 'hstu-trope')['fraction_of_roofline']):.0f}",
    **{f"rotary-{shape}": partial(rotary_share, shape) for shape in ("ml20m", "shop", "pixel1m")},
    "trope-pixel1m": rotation,
    "training-slower": training_slower,
    "readout-pixel1m": lambda: readout("pixel1m"),
    "readout-ml20m": lambda: readout("ml20m"),
}
