"""Shared by the serving benchmarks: a run of the demo's size, a server in a process of its own, and a load generator.

    python benchmarks/serve_load.py URL PATH BODIES --clients 64 --seconds 10     # a load, as a process of its own

The model has the demo's shape and random weights: how fast it answers does not depend on what it has learned. All
traffic stays on the loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

USERS, ITEMS, EVENTS = 2_469, 1_500, 1_469_307
"""Of The Complete Journey by product type, as the demo prepares it; items are those with five events or more."""
START, END = 1_483_228_800, 1_514_764_800  # the year 2017


def make_run(folder: Path, preset_name: str = "trope", seed: int = 0) -> Path:
    """A dataset and a run of the demo's size, made once; returns the run's folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from trope.cli.demo import SETTINGS
    from trope.data.prepare import Options, prepare
    from trope.data.sequences import Sequences
    from trope.data.sources.resolve import Request, resolve
    from trope.models.recommender import SequentialRecommender
    from trope.runs import open_run
    from trope.settings import preset

    data, run = folder / "data", folder / f"run-{preset_name}-{seed}"
    if not (data / "meta.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        items = np.minimum(random.zipf(1.3, EVENTS), ITEMS)  # some items are chosen by all, most by few
        items[:ITEMS] = np.arange(1, ITEMS + 1)
        columns = {"user": random.integers(1, USERS + 1, EVENTS), "item": items}
        log = folder / "log.parquet"
        pq.write_table(pa.table({**columns, "timestamp": random.integers(START, END, EVENTS)}), log)
        prepare(resolve(Request(str(log))), data, Options(min_user=1, min_item=1))
    if not (run / "best").is_dir():
        torch.manual_seed(seed)
        store = Sequences.load(data)
        sizes = [f"{name}={value}" for name, value in SETTINGS.items() if name.startswith("model.")]
        config = preset(preset_name, sizes)
        open_run(run, store, config, resume=False)
        model = SequentialRecommender(config, store.num_items, store.time_span)
        if model.pulse is not None:
            for name in ("everybody", "own"):
                model.pulse.get_buffer(name).normal_(std=0.05)
            stream = model.pulse.count(store.items, store.times)
            list(stream.at(torch.tensor([END])))
            model.pulse.keep(stream)
        model.save_pretrained(run / "best")
    return run


class Server:
    """A server process; `ready` is what it prints on stderr with its address as the first group."""

    def __init__(self, command: list[str], ready: str = r"trope: serving \S+ at (\S+)") -> None:
        started = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        # A group of its own: LitServe leaves its workers behind when it alone is ended.
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        assert self.process.stderr is not None
        self.url, self.lines = "", []
        for raw in self.process.stderr:
            self.lines.append(raw.decode())
            if found := re.search(ready, self.lines[-1]):
                self.url = found[1]
                break
        if not self.url:
            raise RuntimeError("the server ended:\n" + "".join(self.lines))
        threading.Thread(target=self._drain, daemon=True).start()
        wait_until_answering(self.url)
        self.start_seconds = time.perf_counter() - started

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self.lines.append(raw.decode())
            del self.lines[:-1000]

    def memory(self) -> int:
        """Bytes in memory that the process allocated.

        Pages of files are left out: whether those of a library count as the process's own depends on which other
        processes use it at the moment, and the kernel drops them at will.
        """
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        found = re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)
        assert found is not None, text
        return 1024 * int(found[1])

    def cpu_seconds(self) -> float:
        """Of the process and all that it started, so far."""
        total = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the third field on
                if int(fields[2]) == self.process.pid:  # its process group
                    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def end(self, seconds: float = 40) -> int:
        self.process.terminate()
        try:
            return self.process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def serve(run: Path, *arguments: str) -> Server:
    """`trope serve` on a free port."""
    return Server([sys.executable, "-m", "trope", "serve", str(run), "--port", "0", "--device", "cpu", *arguments])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_answering(url: str, seconds: float = 120) -> None:
    import urllib.request

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            return
        except OSError:  # also an HTTPError: LitServe answers 503 until its workers are ready
            time.sleep(0.02)
    raise RuntimeError(f"{url} does not answer")


def load(url: str, path: str, bodies: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Run this file as a load generator in a process of its own, and return what it measured."""
    command = [sys.executable, __file__, url, path, str(bodies), "--clients", str(clients), "--seconds", str(seconds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Client(asyncio.Protocol):
    """One client: the next request goes out when the last answer is there. Parses just enough HTTP to be cheap."""

    def __init__(self, requests: list[bytes], first: int, results: Results) -> None:
        self.requests, self.place, self.results = requests, first, results
        self.buffer, self.sent = b"", 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.requests[self.place % len(self.requests)])
        self.place += 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self.buffer, 0, head)
        assert length is not None, self.buffer[:head]
        end = head + 4 + int(length[1])
        if len(self.buffer) < end:
            return
        assert len(self.buffer) == end, "more than one answer"
        self.results.add(self.buffer, head + 4, self.sent)
        self.buffer = b""
        if self.results.is_open:
            self.send()
        else:
            self.transport.close()


_LENGTH = re.compile(rb"[Cc]ontent-[Ll]ength: (\d+)")
_SAMPLE = 100


class Results:
    """Statuses and latencies; the first second warms up and is not counted. One answer in a hundred is parsed.

    items: that an answer is to have.
    """

    def __init__(self, items: int, warm_up: float = 1.0) -> None:
        self.items, self.checked, self.wrong = items, 0, 0
        self.statuses: dict[int, int] = {}
        self.seconds: list[float] = []
        self.is_open, self._counts_from = True, time.perf_counter() + warm_up

    def add(self, answer: bytes, body: int, sent: float) -> None:
        """body: where the body begins. sent: when the request was."""
        now = time.perf_counter()
        if now < self._counts_from:
            return
        status = int(answer[9:12])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.seconds.append(now - sent)
        if len(self.seconds) % _SAMPLE == 0 and status == 200:
            self.checked += 1
            self.wrong += len(json.loads(answer[body:])["items"]) != self.items


async def _load(url: str, path: str, bodies: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    parts = urlsplit(url)
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
    requests = [head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies]
    loop, results = asyncio.get_running_loop(), Results(json.loads(bodies[0])["k"])
    step = max(1, len(requests) // clients)
    for place in range(clients):
        await loop.create_connection(lambda p=place: Client(requests, p * step, results), parts.hostname, parts.port)
    began = time.process_time()
    await asyncio.sleep(1.0 + seconds)
    used, results.is_open = time.process_time() - began, False
    if results.wrong:
        raise RuntimeError(f"{results.wrong:,} answers have not {results.items} items")
    found = np.array(results.seconds) * 1000
    return {
        "rate": len(found) / seconds, "p50": float(np.percentile(found, 50)), "p99": float(np.percentile(found, 99)),
        "statuses": {str(status): count for status, count in results.statuses.items()}, "checked": results.checked,
        "client_cpu_ms": 1000 * used / max(1, len(found)) * seconds / (1 + seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("path")
    parser.add_argument("bodies", type=Path, help="a JSON body a line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    import uvloop

    bodies = given.bodies.read_bytes().splitlines()
    print(json.dumps(uvloop.run(_load(given.url, given.path, bodies, given.clients, given.seconds))))


if __name__ == "__main__":
    main()
