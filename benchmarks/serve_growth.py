"""What the memory of a server that is asked all day consists of: the worker alone, without HTTP, as fast as it can.

    python benchmarks/serve_growth.py --requests 280000 --out results/serve_growth.json

The mix is that of serve_soak.py: one request in twenty is an event, batches have one to eight requests. In MiB:
`allocated` pages of the process; the allocator's `heap`, and how much of it is `used` and `free` (holes, and what the
largest batch needed); the encoder's `memories` (outside of the heap), `histories` of users, the `store`'s file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import tempfile
import threading
import time
from pathlib import Path

import torch
from serve_load import USERS, make_run

from trope.environment import describe
from trope.server.heap import HeapTrim
from trope.server.limits import Limits
from trope.server.metrics import Metrics
from trope.server.schema import Event, Question
from trope.server.served import Served
from trope.server.sqlite_store import SqliteStore
from trope.server.worker import Ask, Job, Post, Worker

_NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def measure(requests: int, served: Served, store: SqliteStore) -> dict[str, float]:
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallInfo
    heap = libc.mallinfo2()
    found = re.search(r"^Anonymous:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    persons = served.people._cache.values()
    parts = {
        "allocated": 1024 * int(found[1]), "heap": heap.arena, "used": heap.uordblks, "free": heap.fordblks,
        "memories": served.encoder._bytes, "histories": sum(x.items.nbytes + x.times.nbytes for x in persons),
        "store": store.path.stat().st_size,
    }  # fmt: skip
    return {"requests": requests, **{name: round(size / 2**20, 1) for name, size in parts.items()}}


def load(worker: Worker, store: SqliteStore, requests: int, rows: list[dict[str, float]]) -> None:
    """Ask and tell; appends a row to `rows` after every twentieth part, with the longest pause to give pages back."""
    draw, asked, trim_heap, longest = random.Random(0), 0, HeapTrim(), 0.0
    while asked < requests:
        jobs: list[Job] = []
        for _ in range(draw.randint(1, 8)):
            user, now = str(draw.randint(1, USERS + 100)), int(time.time())
            if draw.random() < 0.05:
                jobs.append(Post([Event(user, draw.randint(1, 1600), now)]))
            else:
                jobs.append(Ask([Question(user, None, [now])], is_list=False, is_shown=True))
        asked += len(jobs)
        worker.run(jobs, lambda outcomes: None)
        began = time.perf_counter()
        trim_heap()
        longest = max(longest, time.perf_counter() - began)
        if asked >= len(rows) * requests / 20:
            rows.append({**measure(asked, worker.served, store), "longest_trim_ms": round(1e3 * longest, 2)})
            print(rows[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trope-serve-bench")
    parser.add_argument("--requests", type=int, default=280_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "events.sqlite")
        served = Served.open(make_run(given.folder), None, store, Limits().history, "cpu")
        worker = Worker({"": served}, store, Metrics())
        # In a thread of its own, as in the server: threads have heaps of their own.
        thread = threading.Thread(target=load, args=(worker, store, given.requests, rows))
        thread.start()
        thread.join()
        store.close()
    fifth = next(row for row in rows if row["requests"] >= given.requests / 5)
    grown = 100 * (rows[-1]["allocated"] / fifth["allocated"] - 1)
    print(f"{fifth['allocated']} MiB after a fifth, {rows[-1]['allocated']} in the end ({grown:+.1f} %)")
    if given.out:
        found = {"environment": describe(), "percent_after_a_fifth": round(grown, 2), "rows": rows}
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
