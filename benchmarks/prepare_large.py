"""Generate a log of any size and prepare it as shards, within a limit on memory: wall time, peak memory, disk.

python benchmarks/prepare_large.py --events 1e9 --work DISK --result results/prepare-1b.json

The log has the users' histories of PixelRec 8M (17.8 events a user). It takes 7 GB of disk for a billion events, the
dataset 25 GB, and what is spilled meanwhile up to 40 GB. Everything under --work is removed at the end, unless --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from limited import GIB, run

from trope.environment import describe

EVENTS_A_USER = 17.83


class Disk:
    """The most bytes that a folder held, looked at every two seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self._over = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most

    def _watch(self) -> None:
        while not self._over.wait(2.0):
            self.most = max(self.most, _size(self.folder))


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_blocks * 512
            except OSError:  # removed meanwhile
                continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=float, default=1e9)
    parser.add_argument("--items", type=int, default=407_082)
    parser.add_argument("--shard-users", type=int, default=250_000)
    parser.add_argument("--limit", type=float, default=8.0, help="of the whole process, GiB")
    parser.add_argument("--memory", default="5GB", help="of DuckDB's tables")
    parser.add_argument("--work", type=Path, required=True, help="a folder on a disk with room")
    parser.add_argument("--result", type=Path, help="the JSON file to write")
    parser.add_argument("--keep", action="store_true", help="keep the log and the dataset under --work")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    log, out = arguments.work / "log", arguments.work / "data"
    users = round(arguments.events / EVENTS_A_USER)
    trope = [sys.executable, "-m", "trope"]
    if not log.exists():
        size = ["--users", str(users), "--items", str(arguments.items), "--mean-events", str(EVENTS_A_USER)]
        subprocess.run([*trope, "generate", "--out", str(log), *size], check=True)
    load, disk = os.getloadavg()[0], Disk(arguments.work)
    options = ["--shard-users", str(arguments.shard_users), "--memory", arguments.memory, "--overwrite"]
    command = [*trope, "prepare", str(log), "--out", str(out), *options]
    measured = run(command, int(arguments.limit * GIB))
    most = disk.stop()
    result: dict[str, Any] = {"command": ["trope", "prepare", "shop", *options], **measured, "load_before": load}
    if measured["exit_code"] == 0:
        meta = json.loads((out / "meta.json").read_text())
        result |= {
            "rows": meta["source"]["rows"],
            "kept": {name: meta["counts"][name] for name in ("events", "users", "items")},
            "shards": len(meta["shards"]),
            "input_bytes": sum(file["bytes"] for file in meta["source"]["files"]),
            "output_bytes": _size(out),
            "most_disk_bytes": most,
            "checksum": meta["checksum"],
        }
    result["environment"] = describe()
    text = json.dumps(result, indent=2) + "\n"
    if arguments.result is not None:
        arguments.result.write_text(text)
    print(text, end="")
    if not arguments.keep:
        shutil.rmtree(log)
        shutil.rmtree(out, ignore_errors=True)
    sys.exit(measured["exit_code"])


if __name__ == "__main__":
    main()
