"""A long load, random requests, and swaps under load: memory stays, nothing fails.

    python benchmarks/serve_soak.py --minutes 30 --fuzz 10000 --swaps 20

1. Fuzz: requests of all kinds, most of them wrong. None may be answered with a 5xx.
2. Swaps: questions all the time while models are exchanged. None may fail.
3. Soak: questions and events; memory after a warm-up of a fifth of the time against memory in the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from serve_load import END, USERS, make_run

from trope.bench.server import serve


class Connection:
    """One keep-alive connection, opened again where the server closed it."""

    def __init__(self, url: str) -> None:
        self.parts, self.connection = urlsplit(url), None

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        for attempt in range(2):
            if self.connection is None:
                self.connection = http.client.HTTPConnection(self.parts.hostname or "", self.parts.port, timeout=60)
            try:
                self.connection.request(method, path, body, headers)
                answer = self.connection.getresponse()
                found = answer.status, answer.read()
                if answer.will_close:
                    self.connection = None
                return found
            except (http.client.HTTPException, OSError):
                self.connection = None
                if attempt:
                    raise
        raise AssertionError

    def post(self, path: str, content: Any) -> tuple[int, bytes]:
        return self.send("POST", path, json.dumps(content).encode(), {"Content-Type": "application/json"})


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 2**64, 10**30, 1.5, -0.0, 1e308, "", " ", "7", "007", "now",
    "\x00", "\u202e", "x" * 300, "2017-12-20", "2017-12-20T18:00:00Z", "2017-12-20T18:00:00", "9" * 400, "2017-02-30",
    END, END * 1000, END * 10**9, [], {}, [[]], [None], {"$gt": 1}, "'; DROP TABLE events; --", "window", "history",
    ["a"] * 50, [1, 2, 3], [END, END + 86_400], "é\u2028", {"item_id": 1, "timestamp": END}, "../../etc/passwd",
]  # fmt: skip
NAMES = [
    "user_id", "history", "moment", "moments", "history_until", "k", "allow", "deny", "filter_seen", "explain",
    "new_items", "events", "item_id", "timestamp", "event_id", "path", "x", "",
]  # fmt: skip


def any_value(draw: random.Random, depth: int = 0) -> Any:
    if depth < 3 and draw.random() < 0.3:
        if draw.random() < 0.5:
            return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(NAMES): any_value(draw, depth + 1) for _ in range(draw.randrange(5))}
    return draw.choice(ODD)


def any_question(draw: random.Random) -> Any:
    """Right, but for an entry or two."""
    event = {"item_id": draw.randint(1, 1600), "timestamp": END - draw.randrange(10**7)}
    question: dict[str, Any] = draw.choice(
        [{"user_id": draw.randint(1, 3000)}, {"history": [event] * draw.randrange(5)}]
    )
    question |= {"k": draw.randint(1, 50), "explain": draw.random() < 0.3, "new_items": draw.random() < 0.3}
    for _ in range(draw.randrange(3)):
        question[draw.choice(NAMES)] = any_value(draw, 1)
    return question


def any_request(draw: random.Random) -> tuple[str, str, bytes | None, dict[str, str]]:
    kind = draw.random()
    headers = {"Content-Type": "application/json"}
    if kind < 0.35:
        asked = [any_question(draw) for _ in range(draw.randrange(4))] if draw.random() < 0.2 else any_question(draw)
        return "POST", "/recommend", json.dumps(asked).encode(), headers
    if kind < 0.55:
        rows = [
            {"user_id": draw.choice(ODD), "item_id": draw.choice(ODD), "timestamp": draw.choice(ODD)}
            if draw.random() < 0.5
            else {"user_id": "fuzz", "item_id": draw.randint(1, 3000), "timestamp": END + draw.randrange(10**6)}
            for _ in range(draw.randrange(1, 4))
        ]
        return "POST", "/events", json.dumps({"events": rows}).encode(), headers
    if kind < 0.7:
        body = json.dumps(any_value(draw)).encode()
        if draw.random() < 0.5:  # damaged
            place = draw.randrange(len(body) + 1)
            body = body[:place] + draw.randbytes(draw.randrange(4)) + body[place + draw.randrange(3) :]
        return "POST", draw.choice(["/recommend", "/events", "/model"]), body, draw.choice([headers, {}])
    where = [
        f"/users/{quote(str(draw.choice(ODD)), safe='')}/timeline",
        f"/items/{quote(str(draw.choice(ODD)), safe='')}/curve",
    ]
    query = "&".join(
        f"{name}={quote(str(draw.choice([END, END + 86_400, '2017-12-20', 3, *ODD])))}"
        for name in ("from", "to", "steps", "k", "user_id", "x")
        if draw.random() < (0.9 if name in ("from", "to") else 0.3)
    )
    path = draw.choice([*where, "/model", "/metrics", "/health", "/ready", "/", "/openapi.json", "/%00", "/page/../x"])
    method = draw.choice(["GET"] * 8 + ["PUT", "DELETE", "HEAD", "OPTIONS"])
    return method, f"{path}?{query}" if draw.random() < 0.8 else path, None, {}


def fuzz(url: str, count: int, seed: int) -> dict[int, int]:
    """Send random requests; returns how often each status was answered."""
    draw, connection, statuses = random.Random(seed), Connection(url), {}
    for _ in range(count):
        request = any_request(draw)
        status, answer = connection.send(*request)
        statuses[status] = statuses.get(status, 0) + 1
        if status >= 500 or b"Traceback" in answer:
            print(f"FAILED {status}: {request} -> {answer[:500]!r}")
    return statuses


class Asking:
    """Threads that ask questions, and post events, until they are stopped; failed: what was not answered with 200."""

    def __init__(self, url: str, threads: int, event_share: float) -> None:
        self.asked, self.failed, self._stop = 0, [], threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url, seed, event_share), daemon=True) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, seed: int, event_share: float) -> None:
        draw, connection = random.Random(seed), Connection(url)
        while not self._stop.is_set():
            user = draw.randint(1, USERS + 100)
            if draw.random() < event_share:
                event = {"user_id": user, "item_id": draw.randint(1, 1600), "timestamp": int(time.time())}
                status, answer = connection.post("/events", {"events": [event]})
            else:
                status, answer = connection.post("/recommend", {"user_id": user, "k": 10})
            self.asked += 1
            if status != 200:
                self.failed.append((status, answer[:300]))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trope-serve-bench")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--fuzz", type=int, default=10_000)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    runs = [make_run(given.folder, "trope", seed) for seed in (0, 1)]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        server = serve(runs[0], "--quiet", "--store", f"{folder}/fuzz.sqlite")
        statuses = fuzz(server.url, given.fuzz, given.seed)
        failures += sum(count for status, count in statuses.items() if status >= 500)
        print(f"fuzz: {given.fuzz:,} requests, statuses {dict(sorted(statuses.items()))}", flush=True)

        asking, connection = Asking(server.url, 8, 0.1), Connection(server.url)
        for swap in range(given.swaps):
            status, answer = connection.post("/model", {"path": str(runs[(swap + 1) % 2])})
            failures += status != 200
            if status != 200:
                print(f"FAILED swap: {status} {answer[:300]!r}")
        asking.stop()
        failures += len(asking.failed)
        print(
            f"swaps: {given.swaps} under {asking.asked:,} requests, {len(asking.failed)} failed {asking.failed[:3]}",
            flush=True,
        )
        errors = [line for line in server.lines if '"event":"error"' in line]
        print(f"log: {len(errors)} errors {errors[:1]}; the server ended with {server.end()}", flush=True)
        failures += len(errors)

        server = serve(runs[0], "--quiet", "--store", f"{folder}/soak.sqlite")
        asking, began, sizes = Asking(server.url, 8, 0.05), time.monotonic(), []
        while (left := began + 60 * given.minutes - time.monotonic()) > 0:
            time.sleep(min(left, max(1.0, 0.6 * given.minutes)))
            sizes.append(server.memory() / 2**20)
        asking.stop()
        after_warm_up = sizes[len(sizes) // 5 :]
        growth = 100 * (after_warm_up[-1] / after_warm_up[0] - 1) if after_warm_up else 0.0
        failures += len(asking.failed)
        print(
            f"soak: {given.minutes:g} minutes, {asking.asked:,} requests, {len(asking.failed)} failed "
            f"{asking.failed[:3]}; memory {after_warm_up[0]:.0f} MiB after a fifth, {after_warm_up[-1]:.0f} in the "
            f"end ({growth:+.1f} %)"
        )
        print("MiB over time: " + " ".join(f"{size:.0f}" for size in sizes[:: max(1, len(sizes) // 25)]))
        server.end()
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
