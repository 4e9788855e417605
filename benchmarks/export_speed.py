"""CPU time of one answer: the model in eager PyTorch against its exported programs, batch 1, one thread.

    python benchmarks/export_speed.py                                # all models and formats, width 64, L 50
    python benchmarks/export_speed.py --models hstu-trope --width 512 --formats onnx

Process time (`time.process_time`), median of many calls; the kinds of call alternate, so that other
work on the machine reaches all of them alike. Each program is compared with the model's function of its name, and
`remember + look` with both. "answer": the same programs against `encode_last`, the eager way to one vector at one
moment, which has less to do. Ranking the catalogue is the same for all and not part of it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from export_models import SIX, SPAN, recommender_of

from trope.environment import commit
from trope.models.recommender import SequentialRecommender
from trope.serve.export import formats
from trope.serve.export.exported import ExportedModel
from trope.serve.export.folder import fill
from trope.serve.recommender import Recommender
from trope.times import DAY

ITEMS = 5_000
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIX))
    parser.add_argument("--formats", nargs="+", default=["torch", "onnx", "aoti"], choices=formats.FORMATS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--moments", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="folder for the exported models; an existing one is not made again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"width {args.width}, L {args.length}, batch 1, one thread, torch {torch.__version__}, commit {commit()}\n")
    print("| model | what | eager, ms | " + " | ".join(f"{kind}, ms | less CPU time" for kind in args.formats) + " |")
    print("|---|---|---|" + "---|---|" * len(args.formats))
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            recommender, exported = models_of(name, args, args.keep or Path(temporary))
            for what, ways in calls(recommender, exported, args).items():
                found = measure(ways, args.repeats)
                cells = [f"{1e3 * found[kind]:.3f} | {found['eager'] / found[kind]:.1f}x" for kind in exported]
                print(f"| {name} | {what} | {1e3 * found['eager']:.3f} | {' | '.join(cells)} |", flush=True)


def models_of(name: str, args: argparse.Namespace, keep: Path) -> tuple[Recommender, dict[str, ExportedModel]]:
    """One model, and what it is exported to."""
    exported = {}
    for kind in args.formats:
        folder = keep / f"{name}-next-event-{args.width}-{kind}"
        recommender = recommender_of(name, folder, ITEMS, args.width, args.length)
        if not (folder / "manifest.json").is_file():
            fill(recommender, kind, folder, lambda _: None)
        exported[kind] = ExportedModel.load(folder)
    return recommender, exported


def calls(
    recommender: Recommender, exported: dict[str, ExportedModel], args: argparse.Namespace
) -> dict[str, dict[str, Callable[[], object]]]:
    """What is timed: by its name, the eager call and those of each format."""
    L = args.length
    items = torch.randint(1, ITEMS + 1, (1, L), generator=torch.Generator().manual_seed(1))
    times = SPAN[0] + torch.arange(L)[None] * ((SPAN[1] - SPAN[0]) // L)
    history = items, times, torch.tensor([L])
    moments = SPAN[1] + DAY * torch.arange(1, args.moments + 1)[None]
    model: SequentialRecommender = recommender.model

    found: dict[str, dict[str, Callable[[], object]]] = {}
    networks = {"eager": model, **{kind: each.model for kind, each in exported.items()}}
    if model.can_remember:
        memory = {kind: each.remember(*history) for kind, each in networks.items()}
        found["remember"] = {kind: (lambda each=each: each.remember(*history)) for kind, each in networks.items()}
        found["look"] = {kind: (lambda kept=kept: kept.look(moments)) for kind, kept in memory.items()}
        found["remember + look"] = {
            kind: (lambda each=each: each.remember(*history).look(moments)) for kind, each in networks.items()
        }
    found["answer"] = {
        kind: (lambda each=each: each.encode_last(*history, moments[:, 0])) for kind, each in networks.items()
    }
    return found


@torch.inference_mode()
def measure(calls: dict[str, Callable[[], object]], repeats: int, warm_up: int = 20) -> dict[str, float]:
    """Median seconds of process time of each call."""
    times: Times = {name: [] for name in calls}
    for _ in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: sorted(found[warm_up:])[repeats // 2] for name, found in times.items()}


if __name__ == "__main__":
    main()
