"""Fit and rank by the pulse of `trope` on a stream under a real limit on memory, for events of many times that limit.

    python benchmarks/streaming_pulse.py --work DISK --result results/streaming-pulse.json

It writes a sharded dataset as `benchmarks/streaming.py` does. In a process that may use `--limit` bytes altogether (a
memory cgroup where one can be made) it trains a few steps of the refit, fits the pulse, keeps the counts of the refit,
and ranks the test users by all of it and by counting alone. Training itself is what `benchmarks/streaming.py` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from limited import run
from streaming import ALONE, EVENTS_A_USER, SETTINGS, SHARD_USERS, generate

from trope.data.stream import EVENT_BYTES, Stream, parse_bytes
from trope.environment import describe
from trope.evaluate.streamed import evaluate
from trope.evaluate.streamed_baselines import rank_baselines
from trope.models.recommender import SequentialRecommender
from trope.settings import preset
from trope.train.optimizer import make_optimizer
from trope.train.pulse import fit_pulse, keep_counts
from trope.train.stepper import Stepper
from trope.train.streamed import StreamFeed


def follow(path: Path, memory: int, steps: int, out: Path) -> None:
    """What a training on a stream does besides its first epochs; writes what it found, and the seconds of each part."""
    config, stream = preset("trope", list(SETTINGS)), Stream.open(path, memory)
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def done(part: str) -> None:
        nonlocal started
        seconds[part], started = round(time.perf_counter() - started, 1), time.perf_counter()

    refit = stream.with_validation()
    torch.manual_seed(0)
    model = SequentialRecommender(config, refit.num_items, refit.time_span)
    done("time span of the refit, all files checked")
    feed = StreamFeed(refit, config, ALONE)
    stepper = Stepper(model, refit, config, feed, make_optimizer(model, config), ALONE)
    model.train()
    for step in range(steps):
        stepper(0, step, step)
    feed.close()
    done(f"{steps} steps of the refit")
    found = fit_pulse(model, stream, config, seed=0)
    done("fit of the pulse")
    keep_counts(model, refit)
    done("counts that are kept")
    ranked = evaluate(model, stream, "test", "none", config.model.max_len)
    done("ranks of the test users")
    counted = rank_baselines(stream, "test", config)
    done("ranks by counting alone")
    fitted = {name: found[name] for name in ("exponent", "users", "cosine", "pulse")}
    baselines = {name: result.metrics["MRR"] for name, result in counted.results.items()}
    about = {"users": len(ranked.users), "test": ranked.metrics, "baselines_MRR": baselines}
    out.write_text(json.dumps({"seconds": seconds, "fit": fitted, **about}))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder, limit = arguments.work / "data", int(parse_bytes(arguments.limit, "--limit"))
    memory = int(parse_bytes(arguments.memory, "--memory"))
    if not (folder / "meta.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generate(folder, int(arguments.over * limit) // EVENT_BYTES + EVENTS_A_USER * SHARD_USERS)
    events = json.loads((folder / "meta.json").read_text())["counts"]["events"]
    load, file = os.getloadavg()[0], arguments.work / "found.json"
    words = ["--work", str(arguments.work), "--memory", str(memory), "--steps", str(arguments.steps)]
    words += ["--threads", str(arguments.threads), "--child-result", str(file)]
    measured = run([sys.executable, __file__, *words], limit)
    assert measured["exit_code"] == 0, f"the process ended with {measured}"
    return {
        "events": events, "event_bytes": events * EVENT_BYTES, "limit_bytes": limit,
        "events_over_limit": round(events * EVENT_BYTES / limit, 2), "stream_memory_bytes": memory, **measured,
        **json.loads(file.read_text()), "settings": list(SETTINGS), "load_before": load, "threads": arguments.threads,
        "environment": describe(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder on a disk with room for the data, twice")
    parser.add_argument("--limit", default="768MB", help="of the whole process")
    parser.add_argument("--memory", default="192MB", help="of the stream")
    parser.add_argument("--over", type=float, default=10, help="bytes of events over the limit")
    parser.add_argument("--steps", type=int, default=100, help="of the refit")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the computation")
    parser.add_argument("--result", type=Path, help="the JSON file to write")
    parser.add_argument("--keep", action="store_true", help="keep the data under --work")
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child_result is not None:
        follow(arguments.work / "data", int(arguments.memory), arguments.steps, arguments.child_result)
        return
    text = json.dumps(measure(arguments), indent=1) + "\n"
    if arguments.result is not None:
        arguments.result.write_text(text)
    print(text, end="")
    if not arguments.keep:
        subprocess.run(["rm", "-r", str(arguments.work)], check=True)


if __name__ == "__main__":
    main()
