"""Six models x three formats: are the exported models' answers the models' own, for 10,000 users?

    python benchmarks/export_parity.py                          # AOTInductor compiles for minutes a model
    python benchmarks/export_parity.py --models trope --predicts next-moment
    python benchmarks/export_parity.py --run runs/grocery       # a trained run instead

Users are made up (`trope.serve.export.parity`). "cosines": largest difference of a user's cosine with any item.
"scores": of the scores in the top 100, the pulse included, relative to the user's largest if above 1. "same items":
places of the top 100 with the same item; the others hold items whose scores are equal to rounding. "sets": users whose
100 items are the same 100.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from export_models import SIX, recommender_of

from trope.environment import commit
from trope.serve.export import formats
from trope.serve.export.exported import ExportedModel
from trope.serve.export.folder import export, fill
from trope.serve.export.parity import compare
from trope.serve.recommender import Recommender


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIX))
    parser.add_argument("--formats", nargs="+", default=["torch", "onnx", "aoti"], choices=formats.FORMATS)
    parser.add_argument("--run", type=Path, help="a trained run, instead of presets with made-up weights")
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--predicts", default="next-event", choices=("next-event", "next-moment"))
    parser.add_argument("--keep", type=Path, help="folder for the exported models; an existing one is not made again")
    parser.add_argument("--json", type=Path, help="append a line of JSON for each row to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    what = args.run or f"{args.items:,} items, width {args.width}, L {args.length}, {args.predicts}"
    print(f"{args.users:,} users, {what}, torch {torch.__version__}, commit {commit()}\n")
    print(
        "| model | format | cosines | scores | same items | sets | export, s |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for name in ["run"] if args.run else args.models:
        for kind in args.formats:
            row = measure(name, kind, args)
            print(
                f"| {name} | {kind} | {row['cosines']:.1e} | {row['answers']:.1e} | {100 * row['same_places']:.4f} % | "
                f"{100 * row['same_sets']:.2f} % | {row['seconds']:.0f} |",
                flush=True,
            )
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"model": name, "format": kind, "commit": commit(), **row}) + "\n")


def measure(name: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Export one model to one format, and ask both for all users."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)) / f"{name}-{args.predicts}-{args.width}-{kind}"
        started, is_made = time.monotonic(), (folder / "manifest.json").is_file()
        if args.run:
            recommender = Recommender.from_pretrained(args.run, "cpu")
            if not is_made:
                export(args.run, kind, folder)
        else:
            recommender = recommender_of(name, folder, args.items, args.width, args.length, predicts=args.predicts)
            if not is_made:
                fill(recommender, kind, folder, lambda _: None)
        seconds = time.monotonic() - started
        found = compare(recommender, ExportedModel.load(folder), args.users, seed=1)
    return {**found._asdict(), "seconds": seconds}


if __name__ == "__main__":
    main()
