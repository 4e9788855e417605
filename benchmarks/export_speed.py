"""CPU time of one answer: the model in eager PyTorch against its exported programs, batch 1, one thread.

    python benchmarks/export_speed.py --keep /tmp/exported --out results/export-speed.json     # all models and formats
    python benchmarks/export_speed.py --models hstu-trope --sizes default --formats onnx

Process time (`time.process_time`), median of many calls. The kinds of call take turns, so that other work on the
machine reaches all of them alike. A turn is ten calls after three that are not counted: four wide networks do not fit
a cache together, and who answers with one network has its weights in the cache.

Each program is compared with the model's function that does the same: `encode` with `encode_last`, `remember` with
`remember`, `look` at one moment with `look`. Ranking the catalogue is the same for all and not part of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from export_models import ITEMS, SIX, SIZES, SPAN, exported_of, write_rows
from torch import nn

from trope.environment import commit
from trope.serve.export import formats
from trope.times import DAY

BURST, WARM = 10, 3  # calls of a turn that count, and those before them that do not
Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIX))
    parser.add_argument("--formats", nargs="+", default=["torch", "onnx", "aoti"], choices=formats.FORMATS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="folder for the exported models; an existing one is not made again")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file; other rows in it stay")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"batch 1, one thread, torch {torch.__version__}, commit {commit()}")
    for size in args.sizes:
        print(f"\n{SIZES[size].words}\n")
        heads = "".join(f" {kind}, ms | less CPU time |" for kind in args.formats)
        print(f"| model | program | eager, ms |{heads}\n|" + "---|" * (3 + 2 * len(args.formats)))
        for name in args.models:
            rows = measure(name, size, args)
            if args.out:
                write_rows(args.out, rows)


def measure(name: str, size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one model and its programs, and print the rows."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        networks: dict[str, nn.Module] = {}
        for kind in args.formats:
            recommender, exported, _ = exported_of(name, kind, size, args.keep or Path(temporary))
            networks |= {"eager": recommender.model, kind: exported.model}
        for what, ways in calls(networks, SIZES[size].length).items():
            found = timed(ways, args.repeats)
            ms = {kind: round(1e3 * seconds, 4) for kind, seconds in found.items()}
            rows.append({"size": size, "model": name, "what": what, "ms": ms, "load": round(os.getloadavg()[0], 1)})
            cells = [f"{1e3 * found[kind]:.3f} | {found['eager'] / found[kind]:.1f}x" for kind in args.formats]
            print(f"| {name} | {what} | {1e3 * found['eager']:.3f} | {' | '.join(cells)} |", flush=True)
    return rows


@torch.inference_mode()
def calls(networks: dict[str, Any], length: int) -> dict[str, Calls]:
    """What is timed: by the program's name, the eager call and those of each format."""
    items = torch.randint(1, ITEMS + 1, (1, length), generator=torch.Generator().manual_seed(1))
    times = SPAN[0] + torch.arange(length)[None] * ((SPAN[1] - SPAN[0]) // length)
    history = items, times, torch.tensor([length])
    now = torch.tensor([SPAN[1] + DAY])
    found: dict[str, Calls] = {
        "encode": {kind: (lambda each=each: each.encode_last(*history, now)) for kind, each in networks.items()}
    }
    if networks["eager"].can_remember:
        memories = {kind: each.remember(*history) for kind, each in networks.items()}
        found["remember"] = {kind: (lambda each=each: each.remember(*history)) for kind, each in networks.items()}
        found["look"] = {kind: (lambda kept=kept: kept.look(now[:, None])) for kind, kept in memories.items()}
    return found


@torch.inference_mode()
def timed(calls: Calls, repeats: int) -> dict[str, float]:
    """Median seconds of process time of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    while len(min(times.values(), key=len)) < repeats:
        for name, call in calls.items():
            for _ in range(WARM):
                call()
            for _ in range(BURST):
                start = time.process_time()
                call()
                times[name].append(time.process_time() - start)
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


if __name__ == "__main__":
    main()
