"""A load on a server: so many clients, each of which asks again when its answer is there.

    python -m trope.bench.load URL PATH BODIES --clients 64 --seconds 10

It runs in a process of its own beside the server, keeps its requests as bytes and parses one answer in a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np


def load(url: str, path: str, bodies: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Put a load on a server from a process of its own; returns what it measured.

    bodies: a JSON body a line, each asking for the same number of items.
    """
    options = ["--clients", str(clients), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "trope.bench.load", url, path, str(bodies), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load on {url}{path} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


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
    firsts = itertools.count(step=step)
    for _ in range(clients):
        await loop.create_connection(
            lambda: Client(requests, next(firsts), results), parts.hostname or "", parts.port or 80
        )
    began = time.process_time()
    await asyncio.sleep(1.0 + seconds)
    used, results.is_open = time.process_time() - began, False
    if results.wrong:
        raise RuntimeError(f"{results.wrong:,} answers have not {results.items} items")
    if not results.seconds:
        raise RuntimeError(f"no answer in {seconds:g} seconds; measure for longer")
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
    run = asyncio.run
    if importlib.util.find_spec("uvloop"):  # a part of uvicorn[standard], but not on Windows
        run = importlib.import_module("uvloop").run
    bodies = given.bodies.read_bytes().splitlines()
    print(json.dumps(run(_load(given.url, given.path, bodies, given.clients, given.seconds))))


if __name__ == "__main__":
    main()
