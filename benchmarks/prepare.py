"""Measure `trope prepare` as its own process: wall time and peak memory, written to a JSON file under results/.

python benchmarks/prepare.py SOURCE --result results/prepare-NAME.json [-- any option of trope prepare]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="as for trope prepare")
    parser.add_argument("--result", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--work", type=Path, help="a disk with room for the dataset and what spills")
    parser.add_argument("options", nargs="*", help="passed on to trope prepare")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        out = Path(folder) / "out"
        command = ["prepare", arguments.source, "--out", str(out), *arguments.options]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "trope", *command], check=True)
        wall = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        meta = json.loads((out / "meta.json").read_text())
    result = {
        "command": ["trope", "prepare", meta["source"]["name"], *arguments.options],
        "rows": meta["source"]["rows"],
        "filters": meta["filters"],
        "kept": {name: meta["counts"][name] for name in ("events", "users", "items")},
        "input_bytes": sum(file["bytes"] for file in meta["source"]["files"]),
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_gib": round(used.ru_maxrss / 2**20, 2),
        "load_before": round(load, 2),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ibis-framework", "duckdb", "pyarrow", "numpy")},
        "commit": commit,
        "checksum": meta["checksum"],
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")
    print(arguments.result.read_text(), end="")


if __name__ == "__main__":
    main()
