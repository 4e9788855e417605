"""kill -9 under load: no acknowledged event is lost, and how long a restart takes.

    python benchmarks/serve_kill.py --kills 20

Threads post events with ids of their own and ask questions; the server is killed at a random moment and started again
on the same store. In the end every acknowledged id must be in the store, once.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from serve_load import END, make_run

from trope.bench.server import Server, serve

THREADS = 16


class Client(threading.Thread):
    """Posts events, and asks, over one connection until it breaks."""

    numbers = itertools.count()

    def __init__(self, url: str, acknowledged: list[int], wrong: list[str]) -> None:
        super().__init__(daemon=True)
        self.url, self.acknowledged, self.wrong = urlsplit(url), acknowledged, wrong
        self.start()

    def run(self) -> None:
        try:
            connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=30)
            while True:
                self.once(connection)
        except (OSError, http.client.HTTPException):
            return  # the server is dead

    def once(self, connection: http.client.HTTPConnection) -> None:
        numbers = [next(self.numbers) for _ in range(3)]
        user = f"killed {numbers[0] % 50}"
        events = [
            {"user_id": user, "item_id": 1 + n % 1000, "timestamp": END + n // 100, "event_id": str(n)} for n in numbers
        ]
        status, _ = self.post(connection, "/events", {"events": events})
        if status == 200:
            self.acknowledged.extend(numbers)
        seen = {"user_id": user, "moment": END + 10**6, "k": 1000, "filter_seen": "history"}
        status, answer = self.post(connection, "/recommend", seen)
        listed = {item["item_id"] for item in answer["items"]}
        if status != 200 or answer["from"] != "model" or any(event["item_id"] in listed for event in events):
            self.wrong.append(f"an answer without its own event: {status}")

    def post(self, connection: http.client.HTTPConnection, path: str, content: object) -> tuple[int, dict]:
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trope-serve-bench")
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    run, acknowledged, wrong, starts, cpu = make_run(given.folder), [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "events.sqlite"
        for kill in range(given.kills):
            server: Server = serve(run, "--quiet", "--store", str(store))
            starts.append(server.start_seconds)
            cpu.append(server.cpu_seconds())
            clients = [Client(server.url, acknowledged, wrong) for _ in range(THREADS)]
            time.sleep(random.uniform(0.5, 2.0))
            server.process.kill()
            server.process.wait()
            for client in clients:
                client.join()
            print(
                f"kill {kill + 1}: {len(acknowledged):,} events acknowledged, started in {starts[-1]:.1f} s", flush=True
            )
        stored = [int(row[0]) for row in sqlite3.connect(store).execute("SELECT event_id FROM events")]
    lost, twice = set(acknowledged) - set(stored), len(stored) - len(set(stored))
    print(
        f"{given.kills} kills, {len(acknowledged):,} acknowledged, {len(stored):,} stored: {len(lost)} lost, "
        f"{twice} twice, {len(wrong)} wrong answers; starts {min(starts):.1f} to {max(starts):.1f} s, "
        f"of which {max(cpu):.1f} s of CPU at most"
    )
    raise SystemExit(bool(lost or twice or wrong))


if __name__ == "__main__":
    main()
