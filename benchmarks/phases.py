"""How wrong float32 phases are, and how far one optimiser step moves them: the reasons for our two departures.

    python benchmarks/phases.py --csv results/phases.csv

The exact phase is computed with rational numbers. Times are drawn from 2017 to 2020, alpha is 1 (float32 and exact) or
one AdamW step of 1e-3 away from where it was (the two conditionings).
"""

from __future__ import annotations

import argparse
import csv
import math
from fractions import Fraction
from pathlib import Path

import torch

from trope import TRoPE
from trope.environment import describe
from trope.kernels.rotary import reference as rotary_reference

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
SPAN = (1_500_000_000, 1_600_000_000)
SAMPLES = 500
LEARNING_RATE = 1e-3


def circular(angle: float, exact_turns: Fraction) -> float:
    """Distance on the circle in radians."""
    off = (Fraction(angle) / (2 * PI) - exact_turns) % 1
    return float(min(off, 1 - off) * 2 * PI)


def errors(phases: torch.Tensor, times: list[int], beta: float) -> list[float]:
    return [circular(a, Fraction(t) / (Fraction(beta) * 2 * PI)) for a, t in zip(phases.tolist(), times, strict=True)]


def step_in_radians(conditioning: str, beta: float) -> float:
    """The largest change of phase inside the data when AdamW moves the learned number by one learning rate."""
    if conditioning == "paper":
        return LEARNING_RATE * SPAN[1] / beta
    rope = TRoPE(2, time_span=SPAN, beta_min=beta, beta_max=beta)
    before = rope.frequencies()[0].item()
    with torch.no_grad():
        rope.delta_q += LEARNING_RATE
    return abs(rope.frequencies()[0].item() - before) * 2 * math.pi * (SPAN[1] - SPAN[0]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    path = parser.parse_args().csv
    times = torch.randint(*SPAN, (SAMPLES,), generator=torch.Generator().manual_seed(0))
    betas = torch.tensor([1e2, 4e2, 2e4, 1e6, 1e8], dtype=torch.float64)
    exact = rotary_reference.phase(times[None, None], (1 / (2 * math.pi * betas))[None])[0].float()
    paper = rotary_reference.phase(times[None, None], torch.ones(1, len(betas)), betas.float())[0]
    environment = describe()
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["beta", "fp32_mean_error", "fp32_max_error", "exact_max_error", "paper_step", "span_step", *environment]
        )
        for p, beta in enumerate(betas.tolist()):
            fp32 = errors(paper[:, p], times.tolist(), beta)
            ours = errors(exact[:, p], times.tolist(), beta)
            numbers = (
                sum(fp32) / SAMPLES,
                max(fp32),
                max(ours),
                *(step_in_radians(c, beta) for c in ("paper", "span")),
            )
            writer.writerow([f"{beta:.0e}", *(f"{x:.2g}" for x in numbers), *environment.values()])
    print(path.read_text())


if __name__ == "__main__":
    main()
