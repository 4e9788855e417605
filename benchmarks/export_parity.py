"""Six models x three formats: are the exported models' answers the models' own, for 10,000 users?

    python benchmarks/export_parity.py --out results/export-parity.json      # AOTInductor compiles for minutes a model
    python benchmarks/export_parity.py --models trope --sizes demo --users 500
    python benchmarks/export_parity.py --run runs/grocery                    # a trained run instead; not written

Users are made up (`trope.serve.export.parity`). "cosines": largest difference of a user's cosine with any item, by
`encode` and by `remember` and `look`. "scores": of the scores in the top 100, the pulse included, relative to the
user's largest if above 1. "other items": places of the top 100 with another item. "apart by": largest difference of the
scores at these places; where it is rounding, the items are tied. "sets": users whose 100 items are the same 100.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from export_models import SIX, SIZES, exported_of, write_rows

from trope.environment import commit
from trope.serve.export import formats
from trope.serve.export.exported import ExportedModel
from trope.serve.export.folder import export
from trope.serve.export.parity import TOP, compare
from trope.serve.recommender import Recommender


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIX))
    parser.add_argument("--formats", nargs="+", default=["torch", "onnx", "aoti"], choices=formats.FORMATS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--run", type=Path, help="a trained run, instead of presets with made-up weights")
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="folder for the exported models; an existing one is not made again")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file; other rows in it stay")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.users:,} users, torch {torch.__version__}, commit {commit()}")
    for size in ["run"] if args.run else args.sizes:
        print(f"\n{args.run or SIZES[size].words}\n")
        print("| model | format | cosines | scores | other items | apart by | sets | export, s |\n" + "|---" * 8 + "|")
        for name in [args.run.name] if args.run else args.models:
            for kind in args.formats:
                row = measure(name, kind, size, args)
                if args.out and not args.run:
                    write_rows(args.out, [row])


def measure(name: str, kind: str, size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Export one model to one format, ask both for all users, and print the row."""
    with tempfile.TemporaryDirectory() as temporary:
        if args.run:
            folder, started = Path(temporary) / kind, time.monotonic()
            export(args.run, kind, folder)
            seconds = time.monotonic() - started
            recommender, exported = Recommender.from_pretrained(args.run, "cpu"), ExportedModel.load(folder)
        else:
            recommender, exported, seconds = exported_of(name, kind, size, args.keep or Path(temporary))
        found = compare(recommender, exported, args.users, seed=1)
    places = found.users * min(TOP, len(recommender.catalogue))
    others = round((1 - found.same_places) * places)
    print(
        f"| {name} | {kind} | {found.cosines:.1e} | {found.answers:.1e} | {others} of {places} | {found.swaps:.1e} | "
        f"{100 * found.same_sets:.2f} % | {seconds:.0f} |",
        flush=True,
    )
    return {
        "size": size, "model": name, "format": kind, **found._asdict(), "places": places, "other_items": others,
        "holds": found.holds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
