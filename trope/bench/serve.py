"""`trope bench serve`: requests a second of `trope serve` with a run's model, on this machine, over HTTP.

The server is started on a free port of the loopback interface with a store of its own, which is removed afterwards. Its
users are asked three times first, as a server that has been running for a while would have been: it then remembers
their histories, where the model can. The load asks for now, and shares the machine with the server.
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trope.bench.load import load
from trope.bench.server import Server, serve
from trope.bench.tools import keep_rows, make_console, make_table
from trope.data.printable import counted
from trope.data.stream import data_of_run
from trope.environment import describe

USERS = 2_000  # that are asked for, at most
TOGETHER = 256  # users of a request of the warm-up, at most
LISTED = 20_000  # items of all lists of such a request; a server takes little more


@dataclass(frozen=True)
class Row:
    """One line of the CSV; milliseconds from request to answer, and of the server's CPU time."""

    clients: int
    k: int
    users: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def serving_benchmark(
    run: Path, clients: tuple[int, ...], seconds: float, k: int, device: str, csv: Path | None
) -> list[Row]:
    """Start the server, load it with each number of clients, print the table and write it to `csv`."""
    data = data_of_run(run)
    ids = data.ids("user_ids")
    if ids is None or not len(ids):
        raise ValueError(f"{run} has a dataset without user ids; prepare the data again")
    if k > data.num_items:
        raise ValueError(f"{run} has {counted(data.num_items, 'item')}, fewer than -k {k}; ask for fewer")
    drawn = np.random.default_rng(0).permutation(len(ids))[:USERS]
    questions = [{"user_id": str(ids[int(row)]), "k": k} for row in drawn]
    console, environment = make_console(), describe()
    view = make_table(f"trope serve {run.name}", (), ("clients", "requests/s", "p50 ms", "p99 ms", "CPU ms each"))
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies.jsonl"
        bodies.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
        server = serve(run, "--quiet", "--rate", "0", "--store", f"{folder}/store", device=device, threads=None)
        try:
            warm_up(server.url, questions)
            rows = [_measure(server, bodies, number, seconds, k, len(questions)) for number in clients]
        finally:
            server.end()
    for row in rows:
        times = f"{row.requests_per_s:,.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}", f"{row.cpu_ms:.2f}"
        view.add_row(str(row.clients), *times)
    console.print(view)
    keep_rows(console, csv, rows, environment)
    return rows


def warm_up(url: str, questions: list[dict[str, Any]]) -> None:
    """Ask all questions three times, in lists."""
    k = max(question.get("k", 1) for question in questions)
    together = max(1, min(TOGETHER, LISTED // k))
    for first in [*range(0, len(questions), together)] * 3:
        body, headers = json.dumps(questions[first : first + together]), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/recommend", body.encode(), headers, method="POST")
        try:
            urllib.request.urlopen(request, timeout=300).read()
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refused a question: {json.load(error)['error']}") from None


def _measure(server: Server, bodies: Path, clients: int, seconds: float, k: int, users: int) -> Row:
    before = server.cpu_seconds()
    found = load(server.url, "/recommend", bodies, clients, seconds)
    if found["statuses"].keys() != {"200"}:
        raise RuntimeError(f"the server answered with {found['statuses']}")
    # The load's first second warms up and is not counted, but the server's time has it.
    each = (server.cpu_seconds() - before) / (found["rate"] * (seconds + 1))
    return Row(clients, k, users, found["rate"], found["p50"], found["p99"], 1000 * each)
