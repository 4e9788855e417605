"""Train on a stream under a real limit on memory, next to the same training with all data in memory.

    python benchmarks/streaming.py --work DISK --result results/streaming.json

It writes a sharded dataset whose events take ten times the memory that the whole streaming process may use (the limit
is a memory cgroup where one can be made), trains on both ways in turn with the same order of users, and evaluates the
stream once under the same limit. Losses of all steps must be equal. The network is tiny, so that reading is a large
part of a step: a larger one hides it better. In memory, the data need 1.5 times their size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from limited import run

from trope.config import Config
from trope.data.folder import SHARDED_FORMAT, shard_folder
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.data.shards import ShardJob
from trope.data.stream import EVENT_BYTES, Stream, parse_bytes
from trope.data.writer import write_ids, write_meta
from trope.environment import describe
from trope.evaluate.streamed import evaluate
from trope.models.recommender import SequentialRecommender
from trope.settings import preset
from trope.train.block_order import whole_order
from trope.train.distributed import Group
from trope.train.optimizer import make_optimizer
from trope.train.process import reproducible
from trope.train.step import Feed
from trope.train.stepper import Stepper
from trope.train.streamed import StreamFeed

ITEMS, EVENTS_A_USER, SHARD_USERS = 10_000, 20, 50_000
DRAWN = 16  # different shards
START, SPAN = 1_500_000_000, 10**8
WARM_UP = 50
ALONE = Group(0, 1, torch.device("cpu"))
SETTINGS = (
    "model.width=32", "model.heads=1", "model.head_dim=32", "model.blocks=1", "model.max_len=50", "train.batch=512",
    "train.negatives=64", "train.shared_negatives=true",
)  # fmt: skip


def config() -> Config:
    return preset("hstu-trope", list(SETTINGS))


def generate(folder: Path, events: int) -> None:
    """A dataset of random events: shards as `trope prepare` writes them. Few users have a test event.

    Sixteen shards are drawn; the others are copies of their files, which is quick and reads no faster.
    """
    shards = max(2, events // (EVENTS_A_USER * SHARD_USERS))
    window = SPAN // 10_000  # a user in five hundred has an event in it
    job = ShardJob(str(folder), 1, Protocol("holdout", START + SPAN - window, window), SHARD_USERS)
    found = []
    for number in range(shards):
        if number >= DRAWN:
            shutil.copytree(shard_folder(folder, number % DRAWN), shard_folder(folder, number))
            found.append({**found[number % DRAWN], "number": number})
            continue
        random = np.random.default_rng(number)
        counts = random.integers(EVENTS_A_USER // 2, EVENTS_A_USER * 3 // 2 + 1, SHARD_USERS)
        total = int(counts.sum())
        users = np.arange(number * SHARD_USERS, (number + 1) * SHARD_USERS)
        owner = np.repeat(users, counts)
        ticks = START + random.integers(0, SPAN, total)
        order = np.argsort((owner - users[0]) * (1 << 40) + ticks - START)
        items = 1 + (ITEMS * random.random(total) ** 2).astype(np.int32)
        rows = {"user": owner, "item": items, "tick": ticks[order], "place": np.arange(total)}
        who = {"user": users, "user_id": users, "user_events": counts}
        found.append(job(number, pa.table(who), pa.table(rows)))
    facts = [shard["facts"] for shard in found]
    counts_of = {key: sum(each[key] for each in facts) for key in ("train_events", "valid_users", "test_users")}
    write_meta(
        folder,
        {
            "format": SHARDED_FORMAT,
            "protocol": job.protocol.to_dict(),
            "counts": {
                "users": shards * SHARD_USERS, "items": ITEMS, "events": sum(each["events"] for each in facts),
                **counts_of,
            },
            "time_span": {"train": [START, START + SPAN - 2 * window]},
            "arrays": write_ids(folder, "item_ids", pa.chunked_array([pa.array(range(1, ITEMS + 1))])),
            "shard_users": SHARD_USERS,
            "shards": [shard["arrays"] for shard in found],
        },
    )  # fmt: skip


class BlockFeed(Feed):
    """The feed of a store in memory, in the order of a stream."""

    def __init__(self, data: Sequences, config: Config, counts: list[int], window: int) -> None:
        super().__init__(data, config, ALONE)
        self.counts, self.window = counts, window

    def _shuffle(self, epoch: int) -> None:
        self._order = whole_order(self.counts, self.window, self.config.train.seed, epoch)
        self._epoch, self._ordered_lengths_W = epoch, self._lengths_W[self._order]


def train(path: Path, how: str, memory: int, steps: int, out: Path) -> None:
    """Some steps of an epoch; writes the losses and how long the steps after the first few took."""
    settings = config()
    stream = Stream.open(path, memory, verify=False)
    feed: Feed = StreamFeed(stream, settings, ALONE)
    assert isinstance(feed, StreamFeed)
    counts, window = feed.counts, feed.window
    data: Sequences | Stream = stream
    if how == "memory":
        data = Sequences.load(path, verify=False)
        feed = BlockFeed(data, settings, counts, window)
    with reproducible(ALONE.device):
        torch.manual_seed(0)
        model = SequentialRecommender(settings, data.num_items, data.time_span)
        optimizer = make_optimizer(model, settings)
        stepper = Stepper(model, data, settings, feed, optimizer, ALONE)
        model.train()
        losses, tokens, started, cpu = [], 0, 0.0, 0.0
        for step in range(steps + WARM_UP):
            if step == WARM_UP:
                started, cpu, tokens = time.perf_counter(), time.process_time(), 0
            # Not the tensor: thousands of small ones, each among large ones that go, keep the heap from shrinking.
            losses.append(float(stepper(0, step, step)[0]))
            tokens += int(feed.rows(0, step)[2].sum())
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    feed.close()
    found = {
        "tokens": tokens, "seconds": seconds, "cpu_s": cpu, "shards_in_a_block": window,
        "blocks": 1 + (steps + WARM_UP) * settings.train.batch * len(counts) // (sum(counts) * window),
        "losses": losses,
    }  # fmt: skip
    out.write_text(json.dumps(found))


def rank(path: Path, memory: int, out: Path) -> None:
    """Evaluate all test users of the stream by an untrained network."""
    settings, stream = config(), Stream.open(path, memory)
    model = SequentialRecommender(settings, stream.num_items, stream.time_span)
    found = evaluate(model, stream, "test", "none", settings.model.max_len)
    out.write_text(json.dumps({"users": len(found.users), "MRR": found.metrics["MRR"]}))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder, limit = arguments.work / "data", int(parse_bytes(arguments.limit, "--limit"))
    if not (folder / "meta.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generate(folder, 10 * limit // EVENT_BYTES + EVENTS_A_USER * SHARD_USERS)
    meta = json.loads((folder / "meta.json").read_text())
    size = meta["counts"]["events"] * EVENT_BYTES
    runs: dict[str, list[dict[str, Any]]] = {"stream": [], "memory": []}
    memory = str(parse_bytes(arguments.memory, "--memory"))
    command = [sys.executable, __file__, "--work", str(arguments.work), "--memory", memory]
    command += ["--threads", str(arguments.threads)]
    load = os.getloadavg()[0]
    for turn in range(arguments.turns):
        for how, found in runs.items():
            file = arguments.work / f"{how}.json"
            words = [*command, "--child", how, "--steps", str(arguments.steps), "--child-result", str(file)]
            most = limit if how == "stream" else 1 << 42
            measured = run(words, most)
            assert measured["exit_code"] == 0, f"{how} ended with {measured}"
            found.append({**measured, "process_cpu_s": measured["cpu_s"], **json.loads(file.read_text())})
            rate = found[-1]["tokens"] / found[-1]["seconds"]
            print(f"turn {turn}, {how}: {rate:,.0f} tokens/s, {measured['peak_anonymous_gib']} GiB", flush=True)
    file = arguments.work / "rank.json"
    ranked = run([*command, "--child", "rank", "--child-result", str(file)], limit)
    assert ranked["exit_code"] == 0, f"evaluation ended with {ranked}"
    losses = [found.pop("losses") for both in runs.values() for found in both]
    rates = {how: statistics.median(each["tokens"] / each["seconds"] for each in both) for how, both in runs.items()}
    return {
        "events": meta["counts"]["events"],
        "event_bytes": size,
        "limit_bytes": limit,
        "events_over_limit": round(size / limit, 2),
        "stream_memory_bytes": int(memory),
        "peak_anonymous_gib": max(each["peak_anonymous_gib"] for each in runs["stream"]),
        "tokens_per_s": {how: round(rate) for how, rate in rates.items()},
        "stream_over_memory": round(rates["stream"] / rates["memory"], 4),
        "cpu_stream_over_memory": round(
            statistics.median(each["cpu_s"] for each in runs["memory"])
            / statistics.median(each["cpu_s"] for each in runs["stream"]), 4,
        ),
        "equal_losses": all(each == losses[0] for each in losses),
        "steps": len(losses[0]),
        "first_and_last_loss": [losses[0][0], losses[0][-1]],
        "evaluation": {**ranked, **json.loads(file.read_text())},
        "runs": runs,
        "settings": list(SETTINGS),
        "load_before": load,
        "threads": arguments.threads,
        "environment": describe(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder on a disk with room for the data")
    parser.add_argument("--limit", default="768MB", help="of the whole streaming process")
    parser.add_argument("--memory", default="192MB", help="of the stream")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the computation")
    parser.add_argument("--result", type=Path, help="the JSON file to write")
    parser.add_argument("--keep", action="store_true", help="keep the data under --work")
    parser.add_argument("--child", choices=["stream", "memory", "rank"], help=argparse.SUPPRESS)
    parser.add_argument("--child-result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child is not None:
        data, memory = arguments.work / "data", int(arguments.memory)
        if arguments.child == "rank":
            rank(data, memory, arguments.child_result)
        else:
            train(data, arguments.child, memory, arguments.steps, arguments.child_result)
        return
    found = measure(arguments)
    text = json.dumps(found, indent=1) + "\n"
    if arguments.result is not None:
        arguments.result.write_text(text)
    print(text, end="")
    if not arguments.keep:
        subprocess.run(["rm", "-r", str(arguments.work)], check=True)
    sys.exit(not found["equal_losses"])


if __name__ == "__main__":
    main()
